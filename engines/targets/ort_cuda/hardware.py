"""Whether this machine runs ``ort-cuda``: the package, the driver, and a GPU that the package has kernels for."""

from __future__ import annotations

import ctypes
from importlib import metadata

from tapeout.errors import FingerprintError

PACKAGE, VERSION = "onnxruntime-gpu", "1.31.1"
DRIVER = "libcuda.so.1"
CUDA_VERSION = 13000  # that the package is built with: the driver must know it
# What the package has machine code for; code of 8.0 also runs on 8.9, and there is none for 10.x.
CAPABILITIES = ("sm75", "sm80", "sm86", "sm87", "sm89", "sm90", "sm120", "sm121")
INSTALL = f'pip install "tapeout[ort-cuda]": it puts {PACKAGE} {VERSION} in the place of onnxruntime'
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def installed() -> str:
    """The version of the package; empty where it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""


def capability() -> str | None:
    """Compute capability of the first GPU, such as ``sm90``; None without a driver or a GPU."""
    return _driver()[0]


def refusal() -> tuple[str, str, str]:
    """Why no bundle opens here, what is needed and what to do; empty where one does."""
    version = installed()
    if version != VERSION:
        return f"{PACKAGE} is {version or 'not installed'}", f"{PACKAGE} {VERSION}", INSTALL
    if not _has_provider():
        remedy = "pip uninstall onnxruntime onnxruntime-gpu, then install the extra again"
        return "the onnxruntime that Python imports has no CUDA provider", f"that of {PACKAGE}", remedy
    found, reason = _driver()
    if found is None:
        return reason, "an NVIDIA GPU with a driver for CUDA 13", "run `nvidia-smi`; use a machine with a GPU"
    if found not in CAPABILITIES:
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


def _driver() -> tuple[str | None, str]:
    """The compute capability of the first GPU, and why there is none."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None, f"there is no NVIDIA driver ({DRIVER})"
    if code := driver.cuInit(0):
        return None, f"the NVIDIA driver does not start (cuInit gives {code})"
    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < CUDA_VERSION:
        return None, f"the NVIDIA driver is for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    driver.cuDeviceGetCount(ctypes.byref(count))
    if not count.value:
        return None, "the NVIDIA driver finds no GPU"
    driver.cuDeviceGet(ctypes.byref(device), 0)
    parts = [ctypes.c_int() for _ in range(2)]
    for part, name in zip(parts, (MAJOR, MINOR), strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(part), name, device)
    return f"sm{parts[0].value}{parts[1].value}", ""
