"""The linear for GPUs, its source run as fibers: its reference, its limits, and that tokens share nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engines.kernels.cuda.packing import by_row_pair, packed
from tapeout import e4m3
from tapeout.quantized import QuantizedWeight, round_to_nearest
from tapeout.schemes import Scheme
from tests.cuda import (
    ORDERS,
    Array,
    Device,
    block_linear,
    half_weight,
    host,
    in_order,
    quantized,
    rounded,
    weight,
)
from tests.random_linears import ROUNDING, random_linear

BITS = (4, 5, 6, 8)
# Roundings that bounds count: of a scaled sum of channels, and of parts of K. Plain weights have 64 and 4.
SPAN, WARPS = 32, 8


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device(host())
    yield made
    made.free()


def activations(count: int, columns: int, seed: int = 1) -> Array:
    """Of very different sizes from token to token."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((count, columns)) * 10.0 ** rng.integers(-2, 3, (count, 1))).astype(np.float32)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "block", "outputs", "columns", "half"),
    [
        (4, 64, 37, 192, True),
        (4, 32, 16, 96, False),  # half a chunk at the end
        (5, 64, 48, 192, False),
        (5, 32, 1, 32, True),
        (6, 128, 64, 640, True),  # more chunks than warps
        (6, 32, 32, 96, True),
        (8, 32, 37, 160, True),
        (8, 256, 16, 1280, False),
        (4, 64, 32, 2368, True),  # slices of more chunks than are on their way at once
    ],
)
def test_a_linear_equals_its_reference(
    device: Device, symmetric: bool, bits: int, block: int, outputs: int, columns: int, half: bool
) -> None:
    scheme = Scheme(bits=bits, group_size=block, symmetric=symmetric)
    linear = random_linear(outputs, columns, scheme, half=half)
    held = weight(device, linear, half=half)
    bias = np.random.default_rng(2).standard_normal(outputs).astype(np.float32)
    matrix = linear.dequantize().astype(np.float64)
    for count, added, many in (
        *((1, None, 1), (9, bias, 1), (21, None, 1), (33, bias, 1), (131, bias, 1)),
        *((21, bias, 64), (70, None, 64)),  # a block for each slice
    ):
        x, exact = rounded(activations(count, columns))
        y = block_linear(device, held, x, added, many_blocks=many)
        offset = 0 if added is None else added.astype(np.float64)
        sizes = np.abs(exact) @ np.abs(matrix).T + np.abs(offset)
        over = np.abs(y - (exact @ matrix.T + offset)) - sizes * ROUNDING * (SPAN + columns / SPAN + WARPS)
        assert (over <= 0).all(), f"{over.max():.1e} beyond what rounding explains"


@pytest.mark.parametrize(("outputs", "columns"), [(37, 192), (16, 96), (1, 32), (64, 640), (48, 1280)])
def test_a_linear_over_halves_equals_its_reference(device: Device, outputs: int, columns: int) -> None:
    """Of weights in float16, of very different sizes; a token has the same bits alone and in any batch."""
    rng = np.random.default_rng(3)
    values = (rng.standard_normal((outputs, columns)) * 10.0 ** rng.integers(-4, 3, (outputs, 1))).astype(np.float16)
    held, matrix = half_weight(device, values), values.astype(np.float64)
    bias = rng.standard_normal(outputs).astype(np.float32)
    x, exact = rounded(activations(131, columns))
    together = block_linear(device, held, x, bias, many_blocks=1)
    sizes = np.abs(exact) @ np.abs(matrix).T + np.abs(bias)
    over = np.abs(together - (exact @ matrix.T + bias)) - sizes * ROUNDING * (SPAN + columns / SPAN + WARPS)
    assert (over <= 0).all(), f"{over.max():.1e} beyond what rounding explains"
    for tokens in (slice(0, 1), slice(3, 12), slice(60, 81), slice(7, 40), slice(2, 70)):
        assert np.array_equal(block_linear(device, held, x[tokens], bias), together[tokens])


def fp8_linear(outputs: int, columns: int, seed: int = 3) -> QuantizedWeight:
    """With outputs of very different sizes."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((outputs, columns)) * 10.0 ** rng.integers(-1, 3, (outputs, 1))
    return round_to_nearest(weights.astype(np.float32), Scheme.model_validate({"format": "fp8-dynamic"}))


@pytest.mark.parametrize(
    ("outputs", "columns", "half"),
    [(37, 192, True), (16, 96, False), (1, 32, True), (48, 640, True), (40, 1280, False)],
)
def test_a_linear_in_fp8_equals_its_reference(device: Device, outputs: int, columns: int, half: bool) -> None:
    """Weights with a scale for each output, activations with one for each token; with and without many tokens."""
    linear = fp8_linear(outputs, columns)
    if not half:
        linear.scales[:] *= np.float32(1.0001)
    held, matrix = weight(device, linear, half=half), linear.dequantize().astype(np.float64)
    bias = np.random.default_rng(2).standard_normal(outputs).astype(np.float32)
    for count, added in ((1, None), (9, bias), (21, None), (33, bias), (131, bias)):
        x, exact = rounded(activations(count, columns))
        codes, scales = quantized(device, x)
        np.testing.assert_allclose(scales, np.abs(exact).max(axis=1) / 448, rtol=1e-6)
        decoded = e4m3.decoded(in_order(codes)) * scales[:, None].astype(np.float64)
        step = np.maximum(np.abs(exact) * 2.0**-4, scales[:, None] * 2.0**-10)  # half of one
        assert (np.abs(decoded - exact) <= step * 1.001).all()
        wanted = decoded @ matrix.T + (0 if added is None else added)
        sizes = np.abs(decoded) @ np.abs(matrix).T + (0 if added is None else np.abs(added))
        for many in (1, 64):
            y = block_linear(device, held, codes, added, x_scales=scales, many_blocks=many)
            over = np.abs(y - wanted) - sizes * ROUNDING * (SPAN + columns / SPAN + WARPS + 3)
            assert (over <= 0).all(), f"{over.max():.1e} beyond what rounding explains"


def test_every_code_of_fp8_is_exact(device: Device) -> None:
    """Each output picks one weight by an activation of one: all channels, and codes in all rows of a tile."""
    codes = np.delete(np.arange(256), [127, 255]).astype(np.uint8)
    linear = fp8_linear(len(codes), 64)
    for shift in (0, 5):
        linear.codes[:] = np.roll(codes, shift)[:, None] ^ np.where(np.arange(64) % 3, 0, 128).astype(np.uint8)
        linear.codes[(linear.codes & 127) == 127] = 0
        linear.scales[:] = 1
        x, _ = rounded(np.eye(64, dtype=np.float32))
        fed, scales = quantized(device, x)
        y = block_linear(device, weight(device, linear), fed, x_scales=scales)
        np.testing.assert_allclose(y, e4m3.decoded(linear.codes).T, rtol=1e-6)


def test_a_token_in_fp8_has_the_same_bits_alone_and_in_any_batch(device: Device) -> None:
    held = weight(device, fp8_linear(48, 704))
    x, _ = rounded(activations(70, 704))
    codes, scales = quantized(device, x)
    together = block_linear(device, held, codes, x_scales=scales)
    assert np.array_equal(block_linear(device, held, codes, x_scales=scales, many_blocks=1), together)
    for tokens in (slice(0, 1), slice(6, 7), slice(60, 70), slice(3, 30), slice(2, 40)):
        alone, own = quantized(device, x[tokens])
        assert np.array_equal(alone, codes[tokens]) and np.array_equal(own, scales[tokens])
        assert np.array_equal(block_linear(device, held, alone, x_scales=own), together[tokens])


def test_nan_and_infinity_reach_all_outputs_of_their_token_in_fp8(device: Device) -> None:
    held = weight(device, fp8_linear(32, 128))
    x, _ = rounded(activations(4, 128))
    x[1, 70], x[2, 3], x[3] = np.nan, np.inf, 0
    codes, scales = quantized(device, x)
    y = block_linear(device, held, codes, x_scales=scales)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all() and not np.isfinite(y[2]).any() and not y[3].any()


@pytest.mark.parametrize("bits", BITS)
def test_every_code_less_every_zero_point_is_exact(device: Device, bits: int) -> None:
    """Each output picks one weight by an activation of one."""
    codes = np.arange(1 << bits)
    outputs = max(len(codes), 16)
    linear = random_linear(outputs, 64, Scheme(bits=bits, group_size=32))
    assert linear.zero_points is not None
    linear.codes[:] = np.resize(codes, outputs)[:, None]
    linear.scales[:] = 1
    for zero_point in {0, 1, len(codes) // 2, len(codes) - 1}:
        linear.zero_points[:] = zero_point
        held = weight(device, linear)
        x, _ = rounded(np.eye(64, dtype=np.float32)[[0, 9, 37, 62]])
        y = block_linear(device, held, x)
        assert np.array_equal(y, np.broadcast_to(np.resize(codes, outputs) - zero_point, y.shape))


@pytest.mark.parametrize("bits", BITS)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(device: Device, bits: int) -> None:
    held = weight(device, random_linear(48, 704, Scheme(bits=bits, group_size=64)))
    x, _ = rounded(activations(70, 704))
    together = block_linear(device, held, x)
    assert np.array_equal(block_linear(device, held, x, many_blocks=1), together)
    for tokens in (slice(0, 1), slice(6, 7), slice(60, 70), slice(3, 30), slice(2, 40)):
        assert np.array_equal(block_linear(device, held, x[tokens]), together[tokens])


@pytest.mark.parametrize("count", [21, 70])
def test_blocks_of_outputs_and_of_tokens_have_the_bits_of_few_tokens(device: Device, count: int) -> None:
    """More outputs than a block has, and more tokens."""
    held = weight(device, random_linear(300, 128, Scheme(bits=4, group_size=64)))
    x, _ = rounded(activations(count, 128))
    few = np.concatenate([block_linear(device, held, x[i : i + 16]) for i in range(0, count, 16)])
    for many in (1, 64):
        assert np.array_equal(block_linear(device, held, x, many_blocks=many), few)


def test_results_do_not_depend_on_the_order_of_threads() -> None:
    results: list[Array] = []
    for order in ORDERS:
        device = Device(host(), order)
        held = weight(device, random_linear(37, 192, Scheme(bits=4, group_size=32)))
        x, _ = rounded(activations(70, 192))
        results.append(block_linear(device, held, x, many_blocks=1))
        assert np.array_equal(results[-1], block_linear(device, held, x))
        device.free()
    assert np.isfinite(results[0]).all()
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


def test_nan_and_infinity_reach_all_outputs_of_their_token(device: Device) -> None:
    held = weight(device, random_linear(32, 128, Scheme(bits=4, group_size=64)))
    x, _ = rounded(activations(3, 128))
    clean = block_linear(device, held, x)
    x[1, 70] = np.nan
    x[2, 3] = np.inf
    y = block_linear(device, held, x)
    assert np.array_equal(y[0], clean[0]) and np.isnan(y[1]).all() and not np.isfinite(y[2]).any()


def test_packed_codes_are_a_permutation() -> None:
    """Of their bits: nothing is lost, and what is not there has the code of zero."""
    rng = np.random.default_rng(0)
    halves = rng.standard_normal((40, 96)).astype(np.float16)
    found = packed(halves, 16).view(np.float16)
    assert found.shape == (4, 2 * 1024) and np.array_equal(np.sort(found[found != 0]), np.sort(halves.ravel()))
    for bits in BITS:
        codes = rng.integers(0, 1 << bits, (40, 96)).astype(np.uint8)
        found = packed(codes, bits)
        assert found.shape == (4, 2 * 128 * bits)
        padding = 4 * 16 * 128 - codes.size  # each has its highest bit alone
        assert np.unpackbits(found).sum() == np.unpackbits(codes).sum() + padding
        parts = [packed(codes[:32], bits), packed(codes[32:], bits)]
        assert np.array_equal(np.concatenate(parts), found)
    scales = rng.standard_normal((40, 3))
    pairs = by_row_pair(scales)
    assert pairs.shape == (4, 3, 16)
    assert (pairs[1, 2, 4], pairs[1, 2, 5], pairs[2, 0, 15]) == (scales[18, 2], scales[26, 2], 1)
