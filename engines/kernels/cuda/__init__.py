"""Kernels for GPUs, in CUDA C++, which also run on the CPU.

``source/`` has the kernels. ``compiler`` makes machine code of them for each of ``ARCHITECTURES``, and a library in
which the same sources run as fibers on the CPU. ``packing`` says how weights lie in memory, ``kernel_set`` tells passes
what the kernels take. docs/cuda-kernels.md describes them.
"""

from __future__ import annotations

# Machine code runs on its own version and on later minor ones: sm80 also on 8.6, sm100 also on 10.3. So no kernel uses
# what one version alone has (sm_90a). PTX is not shipped: a driver refuses PTX that is newer than itself.
ARCHITECTURES = ("sm80", "sm89", "sm90", "sm100", "sm120")
HOST = "host"  # the level at which fibers run the kernels; never evidence of a GPU
HOST_FILE = "kernels/cuda-host.so"  # in a bundle: what runs on the host at every level


def cubin_file(architecture: str) -> str:
    """Machine code in a bundle."""
    return f"kernels/cuda-{architecture}.cubin"
