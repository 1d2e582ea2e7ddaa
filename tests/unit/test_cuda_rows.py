"""Norms, gates and embeddings for GPUs, their sources run as fibers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.kernels.cuda.parameters import BlockGather, Finite, Gated, Norm
from tapeout import e4m3
from tapeout.schemes import Scheme
from tests.cuda import ORDERS, Array, Device, at, half_weight, host, in_order, weight
from tests.random_linears import random_linear

EPSILON = 1e-5
HALF_UNIT = 2.0**-11  # what rounding to half changes, relative


@pytest.fixture(params=ORDERS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device(host(), request.param)
    yield made
    made.free()


def random(*shape: int, seed: int = 3) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def norm(device: Device, a: Array, b: Array | None, w: Array, rows: list[int] | None) -> tuple[Array, Array]:
    """The norm in half, and the sum."""
    chosen = None if rows is None else device.put(np.array(rows, np.int64))
    count = len(a) if rows is None else len(rows)
    total, y = device.empty((count, a.shape[1]), np.float32), device.empty((count, a.shape[1]), np.float16)
    held = [at(None if x is None else device.put(x)) for x in (a, b, w)]
    sizes = (count, len(a), a.shape[1])
    device.launch("norm", Norm(*held, at(chosen), at(total), at(y), None, *sizes, EPSILON))
    return y.copy(), total.copy()


@pytest.mark.parametrize("columns", [32, 96, 2112, 4160])
def test_a_norm_equals_its_reference(device: Device, columns: int) -> None:
    a, b, w = random(5, columns), random(5, columns, seed=4) * 100, random(columns, seed=5)
    for residual, rows in ((None, None), (b, None), (b, [4, 0, 2])):
        y, total = norm(device, a, residual, w, rows)
        exact = (a if residual is None else a + residual)[rows if rows is not None else slice(None)]
        assert np.array_equal(total, exact)
        x = exact.astype(np.float64)
        wanted = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPSILON) * w
        np.testing.assert_allclose(y, wanted, rtol=HALF_UNIT + 2e-6, atol=1e-7)
        for row in range(len(y)):  # alone
            one = exact[row : row + 1]
            assert np.array_equal(norm(device, one, None, w, None)[0][0], y[row])


@pytest.mark.parametrize("columns", [32, 96, 2112])
def test_tokens_that_are_not_finite_are_found(device: Device, columns: int) -> None:
    """Wherever one channel is NaN or infinity; and none whose sum is too large for a float."""
    for residual in (False, True):
        a, b = random(19, columns), random(19, columns, seed=4)
        a[4] = 1e38
        wrong = {0: np.nan, 7: np.inf, 8: -np.inf, 18: np.nan}
        for token, value in wrong.items():
            (b if residual and token % 2 else a)[token, (token * 37 + columns - 1) % columns] = value
        y = device.empty((19,), np.uint8)
        held = [at(device.put(a)), at(device.put(b)) if residual else None]
        device.launch("finite", Finite(*held, at(y), 19, columns))
        assert {*np.flatnonzero(y == 0)} == {*wrong} and {*y.tolist()} == {0, 1}


def test_a_gate_equals_its_reference(device: Device) -> None:
    x = random(3, 2 * 1056) * np.float32(10)
    x[0, 0], x[0, 1] = -200, 200
    y = device.empty((3, 1056), np.float16)
    device.launch("gated", Gated(at(device.put(x)), at(y), None, 3, 1056))
    gate, up = x[:, :1056].astype(np.float64), x[:, 1056:].astype(np.float64)
    with np.errstate(over="ignore"):
        wanted = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(y, wanted, rtol=HALF_UNIT + 1e-5, atol=1e-7)


def check_codes(codes: Array, scales: Array, wanted: NDArray[np.float64]) -> None:
    """Codes in E4M3 of rows, each with the scale that puts its largest on 448."""
    np.testing.assert_allclose(scales, np.abs(wanted).max(axis=1) / 448, rtol=1e-5)
    decoded = e4m3.decoded(in_order(codes)) * scales[:, None].astype(np.float64)
    step = np.maximum(np.abs(wanted) * 2.0**-4, scales[:, None] * 2.0**-10)  # half of one
    assert (np.abs(decoded - wanted) <= step * 1.001 + 1e-7).all()


@pytest.mark.parametrize("columns", [32, 96, 2112])
def test_norms_and_gates_in_fp8_equal_their_references(device: Device, columns: int) -> None:
    a, b, w = random(5, columns), random(5, columns, seed=4) * 100, random(columns, seed=5)
    codes, scales, total = (
        device.empty(s, t) for s, t in (((5, columns), np.uint8), ((5,), np.float32), (a.shape, "f4"))
    )
    held = [at(device.put(x)) for x in (a, b, w)]
    device.launch("norm", Norm(*held, None, at(total), at(codes), at(scales), 5, 5, columns, EPSILON))
    assert np.array_equal(total, a + b)
    x = (a + b).astype(np.float64)
    check_codes(codes, scales, x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPSILON) * w)

    x = random(3, 2 * columns) * np.float32(10)
    x[2] = 0
    codes, scales = device.empty((3, columns), np.uint8), device.empty((3,), np.float32)
    device.launch("gated", Gated(at(device.put(x)), at(codes), at(scales), 3, columns))
    gate, up = x[:, :columns].astype(np.float64), x[:, columns:].astype(np.float64)
    check_codes(codes, scales, gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize(("bits", "columns"), [(4, 96), (5, 192), (6, 64), (8, 160)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_an_embedding_is_the_rows_of_its_weight(device: Device, bits: int, columns: int, symmetric: bool) -> None:
    table = random_linear(53, columns, Scheme(bits=bits, group_size=32, symmetric=symmetric))
    ids = np.array([0, 52, 8, 15, 16, 31, -1, 53, 64, 1 << 40, 7])
    y = device.empty((len(ids), columns), np.float32)
    device.launch("block_gather", BlockGather(weight(device, table), at(device.put(ids)), None, at(y), len(ids)))
    known = (ids >= 0) & (ids < 53)
    assert np.array_equal(y[known], table.dequantize()[ids[known]])
    assert np.isnan(y[~known]).all()


def test_an_embedding_in_halves_is_the_rows_of_its_weight(device: Device) -> None:
    table = random(53, 160).astype(np.float16)
    ids = np.array([0, 52, 8, 15, 16, -1, 53, 7])
    y = device.empty((len(ids), 160), np.float32)
    device.launch("block_gather", BlockGather(half_weight(device, table), at(device.put(ids)), None, at(y), len(ids)))
    known = (ids >= 0) & (ids < 53)
    assert np.array_equal(y[known], table[ids[known]].astype(np.float32)) and np.isnan(y[~known]).all()
