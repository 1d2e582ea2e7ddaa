"""The GPU of this machine, as the CUDA driver reports it through ``cuda-bindings``."""

from __future__ import annotations

from typing import Any

from tapeout.errors import BuildError


def capability() -> str | None:
    """Compute capability of the first GPU, such as ``sm89``; None without a GPU, a driver or ``cuda-bindings``."""
    try:
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        return None
    try:
        checked(driver.cuInit(0))
        if not checked(driver.cuDeviceGetCount()):
            return None
        device = checked(driver.cuDeviceGet(0))
        part = driver.CUdevice_attribute
        major, minor = (
            checked(driver.cuDeviceGetAttribute(name, device))
            for name in (
                part.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                part.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
    except (BuildError, RuntimeError):  # no driver library, or one that finds no device
        return None
    return f"sm{major}{minor}"


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a ``cuda-bindings`` call, which returns its error code first. :class:`BuildError` on any error."""
    code, *values = result
    if int(code) != 0:
        raise BuildError(f"CUDA says {code.name}", expected="a working GPU and driver", remedy="run `nvidia-smi`")
    return values[0] if len(values) == 1 else tuple(values) or None
