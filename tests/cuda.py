"""Kernels for GPUs run as fibers on the CPU: memory, launches, and references in numpy.

Every tensor is a heap block of its own, of exactly its size, so that AddressSanitizer sees what goes beyond. Outputs
and scratch start as NaNs. With ``ON_DRIVER`` kernels
are launched through a driver, on a GPU where there is one (benchmarks/gpu): a tensor is then pinned memory of the host,
which kernels reach at its own address.

M  tokens     N  output channels     K  input channels
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.driver import Driver, Launch
from engines.kernels.cuda import compiler
from engines.kernels.cuda.packing import by_row_pair, packed
from engines.kernels.cuda.parameters import LINEAR_SLICES, BlockLinear, QuantizeRows, Weight
from tapeout.quantized import QuantizedWeight

Array = NDArray[Any]
ORDERS = (0, 1, 7)  # of fibers: first thread first, last first, shuffled
OTHER_LIBRARY = "TAPEOUT_TEST_CUDA_LIBRARY"
ON_DRIVER, MACHINE_CODE = "TAPEOUT_TEST_CUDA_DRIVER", "TAPEOUT_TEST_CUDA_CUBIN"  # its library; what a GPU runs
ALIGNMENT = 16  # of a GPU's allocations it is 256


class Device:
    """Memory of kernels, and a library of them. ``order``: of fibers."""

    def __init__(self, library: Path, order: int = 0) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.tapeout_cuda_launch.restype = ctypes.c_char_p
        self._memory = ctypes.CDLL(None)
        self._memory.posix_memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._memory.free.argtypes = [ctypes.c_void_p]
        self._held: list[int] = []
        self._driver = _driver()
        self.order = order

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """NaNs, or the bytes that are NaNs in floats."""
        size = max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1)
        if self._driver:
            address = self._driver.host_memory(size)
        else:
            taken = ctypes.c_void_p()
            assert self._memory.posix_memalign(ctypes.byref(taken), ALIGNMENT, size) == 0 and taken.value
            address = taken.value
        self._held.append(address)
        ctypes.memset(address, 0xFF, size)
        return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)

    def put(self, values: Array) -> Array:
        held = self.empty(values.shape, values.dtype)
        held[...] = values
        return held

    def launch(self, name: str, parameters: ctypes.Structure, *arguments: Any) -> list[str]:
        """The kernels that an operator launched, in order."""
        launches = (Launch * 4)()
        count = getattr(self._library, f"tapeout_cuda_{name}")(ctypes.byref(parameters), *arguments, launches)
        for one in launches[:count]:
            self.run(one)
        return [one.kernel.decode() for one in launches[:count]]

    def run(self, launch: Launch) -> None:
        if self._driver:
            self._driver.launch(launch, self._driver.stream)
            self._driver.wait()
            return
        error = self._library.tapeout_cuda_launch(ctypes.byref(launch), self.order)
        if error:
            raise RuntimeError(f"{launch.kernel.decode()}: {error.decode()}")

    def free(self) -> None:
        """Arrays of this device may not be used any more."""
        for address in self._held:
            self._driver.free_host_memory(address) if self._driver else self._memory.free(address)
        self._held.clear()


@cache
def host() -> Path:
    """The library of kernels; another one where tests run again with it."""
    other = os.environ.get(OTHER_LIBRARY)
    return Path(other) if other else compiler.host_library()


@cache
def _driver() -> Driver | None:
    library, code = os.environ.get(ON_DRIVER), os.environ.get(MACHINE_CODE)
    return Driver(library, Path(code).read_bytes() if code else b"") if library else None


def at(array: Array | None) -> int | None:
    return None if array is None else array.ctypes.data


def rounded(x: Array) -> tuple[NDArray[np.float16], NDArray[np.float64]]:
    """Activations as kernels read them, and what these mean."""
    half = x.astype(np.float16)
    return half, half.astype(np.float64)


def weight(device: Device, linear: QuantizedWeight, bits: int | None = None, *, half: bool = True) -> Weight:
    """A weight in memory of kernels. ``bits``: in which codes are stored."""
    outputs, columns = linear.codes.shape
    bits = bits or linear.scheme.bits
    assert bits
    scales = by_row_pair(linear.scales.astype(np.float16 if half else np.float32))
    zero_points = None if linear.zero_points is None else device.put(by_row_pair(linear.zero_points))
    codes = device.put(packed(linear.codes, bits))
    shift, e4m3 = linear.group_size.bit_length() - 1, int(linear.scheme.format == "fp8-dynamic")
    return Weight(at(codes), at(device.put(scales)), at(zero_points), outputs, columns, bits, shift, half, e4m3)


def half_weight(device: Device, values: NDArray[np.float16]) -> Weight:
    """A weight in float16 in memory of kernels; it has no scales."""
    return Weight(at(device.put(packed(values, 16))), None, None, *values.shape, 16, 0, 0)


def in_order(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of activations ``[M, K]`` with the channels in their order: kernels exchange two of each four."""
    return codes.reshape(len(codes), -1, 4)[..., [0, 2, 1, 3]].reshape(codes.shape)


def quantized(device: Device, x: Array) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Activations in half as a linear in E4M3 reads them: codes ``[M, K]`` and scales ``[M]``."""
    y, scales = device.empty(x.shape, np.uint8), device.empty((len(x),), np.float32)
    device.launch("quantize", QuantizeRows(at(device.put(x)), at(y), at(scales), *x.shape))
    return y.copy(), scales.copy()


def block_linear(
    device: Device,
    w: Weight,
    x: Array,
    bias: Array | None = None,
    *,
    x_scales: Array | None = None,
    many_blocks: int = 64,
) -> NDArray[np.float32]:
    """``x`` [M, K] in half, or codes in E4M3 with ``x_scales`` [M]; [M, N].

    ``many_blocks``: with fewer each slice of the channels has a block of its own.
    """
    y = device.empty((len(x), w.N), np.float32)
    bias, x_scales = (None if one is None else device.put(one) for one in (bias, x_scales))
    tokens = 32 if len(x) <= 32 else 64  # of a block
    places = -(-w.N // 128) * -(-len(x) // tokens)
    sums = device.empty((places * LINEAR_SLICES * 128 * tokens,), np.float32)
    ended = device.put(np.zeros(places, np.uint32))
    parameters = BlockLinear(w, at(device.put(x)), at(x_scales), at(bias), at(y), at(sums), at(ended), len(x))
    device.launch("block_linear", parameters, many_blocks)
    assert not ended.any()
    return y.copy()
