"""Memory of the GPU by CUDA's runtime, which ONNX Runtime has loaded: buffers at fixed addresses, and copies."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.errors import ResourceError

RUNTIME = "libcudart.so.13"
UP, DOWN, WITHIN = 1, 2, 3  # cudaMemcpyKind
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class CudaDevice:
    """Frees all that it allocated in :meth:`close`. Copies are complete when they return."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL(RUNTIME)
        self._cuda.cudaGetErrorString.restype = ctypes.c_char_p
        self._memory: list[int] = []
        self._host: list[int] = []

    def allocate(self, size: int, what: str) -> int:
        """The address of ``size`` bytes. :class:`ResourceError` names ``what`` they are for."""
        self._memory.append(self._allocated(self._cuda.cudaMalloc, size, what))
        return self._memory[-1]

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Bytes of zeros in memory of the host that the GPU reads without a copy of its own."""
        self._host.append(self._allocated(self._cuda.cudaMallocHost, size, "the inputs of a step"))
        array = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(self._host[-1])), np.uint8)
        array[:] = 0
        return array

    def upload(self, address: int, array: NDArray[Any], size: int) -> None:
        """The first ``size`` bytes of an array."""
        self._copy(address, array.ctypes.data, size, UP)

    def download(self, array: NDArray[Any], address: int) -> None:
        self._copy(array.ctypes.data, address, array.nbytes, DOWN)

    def move(self, target: int, source: int, size: int) -> None:
        self._copy(target, source, size, WITHIN)

    def wait(self) -> None:
        """Until copies within the device are done: a session's stream does not wait for them."""
        self._check(self._cuda.cudaDeviceSynchronize(), "work on the GPU")

    def close(self) -> None:
        for address in self._memory:
            self._cuda.cudaFree(ctypes.c_void_p(address))
        for address in self._host:
            self._cuda.cudaFreeHost(ctypes.c_void_p(address))
        self._memory.clear()
        self._host.clear()

    def _allocated(self, allocate: Any, size: int, what: str) -> int:
        address = ctypes.c_void_p()
        self._check(allocate(ctypes.byref(address), ctypes.c_size_t(size)), f"{size / 1e9:.2f} GB for {what}")
        return address.value or 0

    def _copy(self, target: int, source: int, size: int, kind: int) -> None:
        code = self._cuda.cudaMemcpy(ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), kind)
        self._check(code, f"a copy of {size} bytes")

    def _check(self, code: int, what: str) -> None:
        if code:
            self._cuda.cudaGetLastError()  # it is not found again by the next call
            text = self._cuda.cudaGetErrorString(code).decode()
            remedy = "open the engine for fewer sequences: --slots or --kv-bytes"
            raise ResourceError(
                f"the GPU gives {text!r} ({code}) for {what}",
                expected="memory on the GPU" if code == OUT_OF_MEMORY else "a working GPU and driver",
                remedy=remedy if code == OUT_OF_MEMORY else "run `nvidia-smi`, and look for Xid errors with `dmesg`",
            )
