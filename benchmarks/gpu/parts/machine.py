"""The driver, the GPU, and its two ceilings: bandwidth of a copy, rate of a bf16 matmul."""

from __future__ import annotations

import platform
from functools import partial

from benchmarks.gpu.place import Place, Record, milliseconds
from engines.kernels.cuda import device

COPY_BYTES, MATMUL = 1 << 32, 8192


def run(place: Place, record: Record) -> None:
    import torch

    gpu = device.find_gpu()
    record("gpu", found=gpu if isinstance(gpu, str) else gpu.name, level=place.level, rehearsal=place.rehearsal)
    if not isinstance(gpu, str):
        record("driver", cuda=gpu.driver, capability=gpu.capability)
    record("software", python=platform.python_version(), torch=torch.__version__)
    size, edge = (1 << 20, 256) if place.rehearsal else (COPY_BYTES, MATMUL)
    source, target = (torch.zeros(size // 8, dtype=torch.int64, device=place.torch_device) for _ in range(2))
    source.random_()
    # A kernel: a copy in a graph gave 2.8 TB/s on an H200, where kernels reach 4.3.
    ms = milliseconds(place, [partial(torch.bitwise_not, source, out=target)])
    record("copy", bytes_per_s=2 * size / ms * 1e3)
    a, b = (torch.randn(edge, edge, device=place.torch_device, dtype=torch.bfloat16) for _ in range(2))
    ms = milliseconds(place, [lambda: a @ b], rounds=10)
    record("bf16 matmul", flop_per_s=2 * edge**3 / ms * 1e3)
