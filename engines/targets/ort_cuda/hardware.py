"""Whether this machine runs ``ort-cuda``: the package, the driver, and a GPU that the package has kernels for."""

from __future__ import annotations

from importlib import metadata

from engines.kernels.cuda.device import find_gpu
from tapeout.errors import FingerprintError

PACKAGE, VERSION = "onnxruntime-gpu", "1.31.1"
# What the package has machine code for; code of 8.0 also runs on 8.9, and there is none for 10.x.
CAPABILITIES = ("sm75", "sm80", "sm86", "sm87", "sm89", "sm90", "sm120", "sm121")
INSTALL = f'pip install "tapeout[ort-cuda]": it puts {PACKAGE} {VERSION} in the place of onnxruntime'


def installed() -> str:
    """The version of the package; empty where it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""


def capability() -> str | None:
    """Compute capability of the first GPU, such as ``sm90``; None without a driver for CUDA 13 or a GPU."""
    gpu = find_gpu()
    return None if isinstance(gpu, str) else gpu.level


def refusal() -> tuple[str, str, str]:
    """Why no bundle opens here, what is needed and what to do; empty where one does."""
    version = installed()
    if version != VERSION:
        return f"{PACKAGE} is {version or 'not installed'}", f"{PACKAGE} {VERSION}", INSTALL
    if not _has_provider():
        remedy = "pip uninstall onnxruntime onnxruntime-gpu, then install the extra again"
        return "the onnxruntime that Python imports has no CUDA provider", f"that of {PACKAGE}", remedy
    gpu = find_gpu()
    if isinstance(gpu, str):
        return gpu, "an NVIDIA GPU with a driver for CUDA 13", "run `nvidia-smi`; use a machine with a GPU"
    if (found := capability()) not in CAPABILITIES:
        return f"{PACKAGE} {VERSION} has no kernels for {found}", f"one of {', '.join(CAPABILITIES)}", "use such a GPU"
    return "", "", ""


def require_gpu() -> None:
    """:class:`FingerprintError` where no bundle opens."""
    found, expected, remedy = refusal()
    if found:
        raise FingerprintError(f"ort-cuda cannot run here: {found}", expected=expected, remedy=remedy)


def _has_provider() -> bool:
    import onnxruntime as ort

    return "CUDAExecutionProvider" in ort.get_available_providers()
