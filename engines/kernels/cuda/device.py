"""The GPU of this machine, as its driver describes it. Nothing is loaded but the driver's own library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from engines.kernels.cuda import ARCHITECTURES
from tapeout.errors import DeviceError

DRIVER = "libcuda.so.1"
LEAST_DRIVER = 13000  # CUDA 13.0, whose compiler made the machine code
MAJOR, MINOR, MULTIPROCESSORS = 75, 76, 16  # attributes of a device


@dataclass(frozen=True)
class Gpu:
    """``driver``: the CUDA version that it is for, 13000 for 13.0. ``capability``: major and minor version."""

    name: str
    capability: tuple[int, int]
    driver: int

    @property
    def level(self) -> str:
        """
        >>> Gpu("L4", (8, 9), 13000).level
        'sm89'
        """
        return "sm{}{}".format(*self.capability)

    @property
    def capability_text(self) -> str:
        """
        >>> Gpu("L4", (8, 9), 13000).capability_text
        '8.9'
        """
        return "{}.{}".format(*self.capability)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Whose machine code it runs: its own, and that of earlier minor versions.

        >>> Gpu("L4", (8, 9), 13000).architectures, Gpu("B300", (10, 3), 13000).architectures
        (('sm80', 'sm89'), ('sm100',))
        """
        major, minor = self.capability
        numbers = {name: divmod(int(name.removeprefix("sm")), 10) for name in ARCHITECTURES}
        return tuple(name for name, (its, least) in numbers.items() if its == major and least <= minor)


def find_gpu() -> Gpu | str:
    """The first GPU, or why nothing can run on one, as a clause for users."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return f"no driver: {DRIVER} cannot be loaded"
    version, count, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < LEAST_DRIVER:
        return f"the driver is for CUDA {version.value // 1000}.{version.value % 1000 // 10}, and 13.0 is needed"
    if code := driver.cuInit(0):
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        return f"the driver does not start: cuInit gives {(text.value or b'an unknown error').decode()} ({code})"
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the driver finds no GPU"
    device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, len(name), device)
    capability: list[int] = []
    for attribute in (MAJOR, MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(name.value.decode(), (capability[0], capability[1]), version.value)


def free_memory() -> int:
    """Bytes of the first GPU that nobody has taken. :class:`DeviceError` in the driver's words."""
    driver, text = ctypes.CDLL(DRIVER), ctypes.c_char_p()

    def call(name: str, *arguments: object) -> None:
        if code := getattr(driver, name)(*arguments):
            driver.cuGetErrorString(code, ctypes.byref(text))
            raise DeviceError(
                f"{name}: {(text.value or b'an unknown error').decode()} ({code})",
                expected="a device that works",
                remedy="`nvidia-smi -q` shows what the device reports",
            )

    device, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxSetCurrent", context)
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    finally:
        driver.cuCtxSetCurrent(None)
        driver.cuDevicePrimaryCtxRelease_v2(device)
    return free.value
