"""The GPU of this machine, and what ``cuda-bindings`` says of it."""

from __future__ import annotations

from typing import Any

from engines.kernels.cuda.device import find_gpu
from tapeout.errors import BuildError


def capability() -> str | None:
    """Compute capability of the first GPU, such as ``sm89``; None without a driver for CUDA 13 or a GPU."""
    gpu = find_gpu()
    return None if isinstance(gpu, str) else gpu.level


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a ``cuda-bindings`` call, which returns its error code first. :class:`BuildError` on any error."""
    code, *values = result
    if int(code) != 0:
        raise BuildError(f"CUDA says {code.name}", expected="a working GPU and driver", remedy="run `nvidia-smi`")
    return values[0] if len(values) == 1 else tuple(values) or None
