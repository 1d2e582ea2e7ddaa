from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantization import kv_cache
from tapeout.errors import QuantizationError


@given(seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_values_within_the_calibrated_range_err_by_half_a_step_at_most(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = (random.standard_normal((3, 9, 8)) * random.uniform(0.01, 50, (3, 1, 8))).astype(np.float32)
    scale = kv_cache.scales(np.abs(values).max(axis=1), "per_channel", dtype="int8")
    decoded = kv_cache.dequantize(kv_cache.quantize(values, scale, "int8"), scale, "int8")
    assert (np.abs(decoded - values) <= 0.5001 * scale[:, None, :] + 1e-7).all()


def test_rotating_a_pair_never_leaves_its_range() -> None:
    """The threshold is the pair's norm, so a key turned to any later position still fits."""
    pair = np.array([3.0, 4.0], np.float32)
    scale = kv_cache.scales(np.full((1, 2), np.hypot(*pair), np.float32), "per_channel", dtype="int8")
    for angle in np.linspace(0, 2 * np.pi, 400):
        turned = np.array(
            [pair[0] * np.cos(angle) - pair[1] * np.sin(angle), pair[0] * np.sin(angle) + pair[1] * np.cos(angle)],
            np.float32,
        )
        decoded = kv_cache.dequantize(kv_cache.quantize(turned.reshape(1, 1, 2), scale, "int8"), scale, "int8").reshape(
            2
        )
        assert (np.abs(decoded - turned) <= 0.5001 * scale[0]).all()


def test_values_beyond_the_range_saturate() -> None:
    scale = kv_cache.scales(np.ones((1, 2), np.float32), "per_channel", dtype="int8")
    codes = kv_cache.quantize(np.array([[[1e6, -1e6]]], np.float32), scale, "int8")
    assert codes.tolist() == [[[127, -128]]]


def test_four_bits_reach_little_over_half_the_range_and_saturate_beyond() -> None:
    scale = kv_cache.scales(np.array([[14.0, 7.0]], np.float32) / 0.55, "per_channel", dtype="int4")
    np.testing.assert_allclose(scale, [[2, 1]], rtol=1e-6)
    values = np.array([[[5.1, -3.4], [21.0, -10.5], [14.0, -8.0], [-16.0, 2.5]]], np.float32)
    codes = kv_cache.quantize(values, scale, "int4")
    assert codes.dtype == np.int8 and codes[0].tolist() == [[3, -3], [7, -8], [7, -8], [-8, 2]]


def test_fp8_reaches_the_largest_value_of_e4m3_and_saturates_beyond() -> None:
    """E5M2 would hold 57,344 and round 1.125 down; E4M3 has codes up to 448 and three bits of mantissa."""
    scale = kv_cache.scales(np.array([[448.0, 896.0]], np.float32), "per_channel", dtype="fp8")
    np.testing.assert_array_equal(scale, [[1, 2]])
    values = np.array([[[448.0, -896.0], [1e6, -1e6], [1.125, 2.25], [2.0**-9, 2.0**-11]]], np.float32)
    codes = kv_cache.quantize(values, scale, "fp8")
    assert codes.dtype == np.uint8
    decoded = kv_cache.dequantize(codes, scale, "fp8")
    np.testing.assert_array_equal(decoded, [[[448, -896], [448, -896], [1.125, 2.25], [2.0**-9, 0]]])


def test_a_channel_that_was_always_zero_gets_a_usable_scale() -> None:
    scale = kv_cache.scales(np.array([[0.0, 2.0]], np.float32), "per_channel", dtype="int8")
    assert scale[0, 0] > 0 and scale[0, 1] == np.float32(2) / np.float32(127)


def test_per_tensor_is_the_largest_everywhere() -> None:
    scale = kv_cache.scales(np.array([[1.0, 2.0], [12.7, 4.0]], np.float32), "per_tensor", dtype="int8")
    assert scale.shape == (2, 2)
    np.testing.assert_allclose(scale, 0.1, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.full((2, 2), np.nan), -np.ones((2, 2)), np.ones(4)])
def test_ranges_that_say_nothing_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(QuantizationError, match="the calibrated ranges of layer 3 keys"):
        kv_cache.scales(bad.astype(np.float32), "per_channel", dtype="int8", name="layer 3 keys")
