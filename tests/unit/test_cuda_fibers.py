"""The fibers that stand in for a GPU's threads: what they compute together, and what they refuse."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest

from engines.kernels.cuda import compiler
from tests.cuda import ORDERS, Array, Device, Launch, at, rounded

SOURCE = """
#include "portable.h"
struct Pointers {
  const void *a, *b;
  float* y;
};

KERNEL(shuffles, Pointers, 64, 1) {
  const float x = static_cast<const float*>(p.a)[threadIdx.x];
  p.y[threadIdx.x] = __shfl_xor_sync(ALL_LANES, x, 5);
  p.y[64 + threadIdx.x] = warp_sum(x);
  p.y[128 + threadIdx.x] = (float)__shfl_sync(ALL_LANES, threadIdx.x * 3, threadIdx.x + 1);
}

KERNEL(multiply, Pointers, 32, 1) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const uint32_t* a = static_cast<const uint32_t*>(p.a); /* [16, 16], pairs of channels */
  const uint16_t* b = static_cast<const uint16_t*>(p.b); /* [16, 8] */
  const auto pair = [&](int row) { return b[row * 8 + g] | (uint32_t)b[(row + 1) * 8 + g] << 16; };
  float4 c = make_float4(1, 2, 3, 4);
  mma_f16(c, make_uint4(a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]),
         make_uint2(pair(2 * t), pair(2 * t + 8)));
  p.y[g * 8 + 2 * t] = c.x, p.y[g * 8 + 2 * t + 1] = c.y;
  p.y[(g + 8) * 8 + 2 * t] = c.z, p.y[(g + 8) * 8 + 2 * t + 1] = c.w;
}

struct Memory {
  float values[96];
};
KERNEL(unset, Pointers, 96, 1) { p.y[threadIdx.x] = shared_memory<Memory>().values[threadIdx.x]; }
KERNEL(reversed, Pointers, 96, 1) {
  Memory& memory = shared_memory<Memory>();
  memory.values[threadIdx.x] = (float)threadIdx.x;
  __syncthreads();
  p.y[blockIdx.x * 96 + threadIdx.x] = memory.values[95 - threadIdx.x];
}
KERNEL(some_wait, Pointers, 64, 1) {
  if (threadIdx.x < 40) __syncthreads();
  p.y[threadIdx.x] = 0;
}
KERNEL(some_meet, Pointers, 32, 1) {
  if (threadIdx.x < 16) __syncwarp();
  p.y[threadIdx.x] = 0;
}
KERNEL(others_meet, Pointers, 32, 1) {
  if (threadIdx.x < 16)
    __syncwarp();
  else
    p.y[0] = warp_sum(1);
}
"""


class Pointers(ctypes.Structure):
    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("y", ctypes.c_void_p))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("fibers")
    for path in (*compiler.SOURCE.glob("*.h"), compiler.SOURCE / "host.cpp"):
        shutil.copyfile(path, source / path.name)
    (source / "small.cu").write_text(SOURCE)
    return compiler.host_library(source)


def run(
    device: Device, name: str, threads: int, y: Array, *inputs: Array, blocks: int = 1, shared_bytes: int = 0
) -> None:
    held = [at(device.put(one)) for one in inputs] + [None] * (2 - len(inputs))
    parameters = Pointers(*held, at(y))
    device.run(
        Launch(name.encode(), ctypes.addressof(parameters), (blocks, 1, 1), threads, shared_bytes),
    )


@pytest.mark.parametrize("order", ORDERS)
def test_lanes_exchange_values(library: Path, order: int) -> None:
    device = Device(library, order)
    x, y = np.random.default_rng(0).standard_normal(64).astype(np.float32), device.empty((3, 64), np.float32)
    run(device, "shuffles", 64, y, x)
    lanes = np.arange(64)
    assert np.array_equal(y[0], x[lanes ^ 5])
    np.testing.assert_allclose(y[1], x.reshape(2, 32).sum(axis=1).repeat(32), rtol=1e-5)
    assert len(set(y[1].tolist())) == 2  # all lanes have the same bits
    assert np.array_equal(y[2], 3 * (lanes // 32 * 32 + (lanes + 1) % 32))
    device.free()


def test_an_mma_is_that_of_ptx(library: Path) -> None:
    """Rows of the second operand are channels, as the test's kernel reads them."""
    device, rng = Device(library), np.random.default_rng(1)
    (a, exact_a), (b, exact_b) = (rounded(rng.standard_normal(shape)) for shape in [(16, 16), (16, 8)])
    y = device.empty((16, 8), np.float32)
    run(device, "multiply", 32, y, a, b)
    start = np.tile([[1, 2]], (16, 4)) + np.repeat([[0], [2]], 8, axis=0)
    np.testing.assert_allclose(y, start + exact_a @ exact_b, rtol=1e-5, atol=1e-5)
    device.free()


def test_shared_memory_is_of_nans_for_every_block(library: Path) -> None:
    device = Device(library)
    y = device.put(np.zeros(96, np.float32))
    run(device, "unset", 96, y, shared_bytes=384)
    assert np.isnan(y).all()
    for order in ORDERS:
        device.order = order
        y = device.empty((2, 96), np.float32)
        run(device, "reversed", 96, y, blocks=2, shared_bytes=384)
        assert np.array_equal(y, np.tile(np.arange(95, -1, -1), (2, 1)))
    device.free()


@pytest.mark.parametrize(
    ("kernel", "threads", "error"),
    [
        ("some_wait", 64, "threads of a block wait for others that do not come"),
        ("some_meet", 32, "threads of a block wait for others that do not come"),
        ("others_meet", 32, "lanes of a warp meet at different instructions"),
        ("no_such", 32, "no kernel of this name"),
        ("multiply", 64, "a block of so many threads"),
        ("shuffles", 33, "a block of so many threads"),
    ],
)
def test_what_a_gpu_would_not_do_is_an_error(library: Path, kernel: str, threads: int, error: str) -> None:
    device = Device(library)
    y = device.empty((192,), np.float32)
    with pytest.raises(RuntimeError, match=f"{kernel}: {error}"):
        run(device, kernel, threads, y)
    run(device, "shuffles", 64, y, np.ones(64, np.float32))  # the next launch is not affected
    assert (y[:64] == 1).all()
    device.free()
