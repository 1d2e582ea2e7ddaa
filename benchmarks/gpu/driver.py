"""Launches single kernels through NVIDIA's driver, or through the stand-in for it.

The driver's library is libcuda.so.1, or the host library of kernels, which has functions of the same names: there
kernels run as fibers, and memory of the device is that of the process.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

U32 = ctypes.c_uint32
PLAIN_SHARED_BYTES, MOST_SHARED_BYTES = 48 << 10, 8  # what a launch may have; the attribute that allows more
MULTIPROCESSORS = 16  # attribute of a device
NON_BLOCKING, MAPPED = 1, 2


class Launch(ctypes.Structure):
    """Of ``source/launch.h``."""

    _fields_ = (("kernel", ctypes.c_char * 56), ("parameters", ctypes.c_void_p), ("grid", U32 * 3), ("threads", U32),
                ("shared_bytes", U32))  # fmt: skip


class DriverError(RuntimeError):
    """What the driver says of a call that failed."""


class Driver:
    """The primary context of the first GPU, which PyTorch uses, too. ``code``: a cubin; empty for the stand-in."""

    def __init__(self, library: Path | str, code: bytes) -> None:
        self._library = ctypes.CDLL(str(library))
        self._code, self._functions, self._shared = code, dict[bytes, ctypes.c_void_p](), dict[bytes, int]()
        device, context, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuDeviceGetAttribute", ctypes.byref(count), MULTIPROCESSORS, device)
        self.multiprocessors = count.value
        self._module, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(self._module), code or None)
        self.call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        self.stream = stream.value or 0

    def call(self, name: str, *arguments: Any) -> None:
        """:class:`DriverError` where the driver reports one."""
        code = self._library[name](*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'an unknown error').decode()} ({code})")

    def host_memory(self, size: int) -> int:
        """The address of pinned memory of the host. A kernel reaches it at the same address."""
        address = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), MAPPED)
        assert address.value
        return address.value

    def free_host_memory(self, address: int) -> None:
        self.call("cuMemFreeHost", ctypes.c_void_p(address))

    def launch(self, launch: Launch, stream: int) -> None:
        """Also while ``stream`` is being captured, if the kernel was launched before."""
        function = self._function(launch)
        parameters = (ctypes.c_void_p * 1)(launch.parameters)
        sizes = (*launch.grid, launch.threads, 1, 1, launch.shared_bytes)
        self.call("cuLaunchKernel", function, *map(U32, sizes), ctypes.c_void_p(stream), parameters, None)

    def wait(self) -> None:
        self.call("cuStreamSynchronize", ctypes.c_void_p(self.stream))

    def _function(self, launch: Launch) -> ctypes.c_void_p:
        name = launch.kernel
        if name not in self._functions:
            self._functions[name] = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(self._functions[name]), self._module, name)
        if launch.shared_bytes > self._shared.get(name, PLAIN_SHARED_BYTES):
            self.call("cuFuncSetAttribute", self._functions[name], MOST_SHARED_BYTES, ctypes.c_int(launch.shared_bytes))
            self._shared[name] = launch.shared_bytes
        return self._functions[name]
