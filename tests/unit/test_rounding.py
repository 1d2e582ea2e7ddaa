from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantization.methods.gptq import gptq, inverse_factor
from quantization.methods.scale_fit import fit_scales
from quantization.output_error import diagonal, output_error
from tapeout.errors import QuantizationError
from tapeout.formats import formats
from tapeout.integers import Integers
from tapeout.quantized import assemble, fit_range, nearest_codes, round_to, round_to_nearest
from tapeout.schemes import Scheme

schemes = st.builds(
    Scheme, bits=st.sampled_from([4, 8]), group_size=st.sampled_from([16, 32, 64]), symmetric=st.booleans()
)


def weights(seed: int, rows: int = 6, columns: int = 128) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.standard_normal((rows, columns)) * random.uniform(0.001, 10)).astype(np.float32)


def correlated_gram(columns: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    inputs = random.standard_normal((512, columns)) @ random.standard_normal((columns, columns))
    inputs[:, ::17] *= 20
    return (inputs.T @ inputs / len(inputs)).astype(np.float32)


@given(seed=st.integers(0, 10_000), fmt=schemes)
@settings(max_examples=60, deadline=None)
def test_rounding_errs_by_half_a_step_at_most(seed: int, fmt: Scheme) -> None:
    weight = weights(seed)
    linear = round_to_nearest(weight, fmt)
    step = np.repeat(np.abs(linear.scales), fmt.group_size, axis=1)
    # One step where the far end of a full-range symmetric grid clips (-8..7), and where a zero point was rounded. There
    # the error of the scale, half of the last of its 11 significant bits, counts once for each step.
    most = 1 + 2.0 ** (fmt.bits - 1 - 11)
    assert (np.abs(linear.dequantize() - weight) <= 1.001 * most * step).all()
    assert np.median(np.abs(linear.dequantize() - weight) / step) < 0.3
    assert linear.scheme == fmt


@given(seed=st.integers(0, 10_000), bits=st.sampled_from([4, 8]))
@settings(max_examples=40, deadline=None)
def test_a_symmetric_grid_holds_the_extreme_of_either_sign_on_its_lowest_code(seed: int, bits: int) -> None:
    weight = weights(seed, rows=4, columns=32)
    linear = round_to_nearest(weight, Scheme(bits=bits, group_size=32, symmetric=True))
    extreme = np.abs(weight).argmax(axis=1)
    rows = np.arange(4)
    assert (linear.codes[rows, extreme] == 0).all()
    np.testing.assert_allclose(linear.dequantize()[rows, extreme], weight[rows, extreme], rtol=1e-3)
    assert (np.sign(linear.scales[:, 0]) == -np.sign(weight[rows, extreme])).all()


@given(seed=st.integers(0, 10_000), bits=st.sampled_from([4, 8]))
@settings(max_examples=40, deadline=None)
def test_positive_scales_clip_nothing_and_widen_steps_by_no_more_than_that_needs(seed: int, bits: int) -> None:
    weight = weights(seed, rows=4, columns=64)
    fmt, half = Scheme(bits=bits, group_size=32, symmetric=True, positive_scales=True), 1 << (bits - 1)
    linear, either = (
        round_to_nearest(weight, fmt),
        round_to_nearest(weight, Scheme(bits=bits, group_size=32, symmetric=True)),
    )
    assert (linear.scales > 0).all() and linear.scheme == fmt
    assert (linear.scales <= np.abs(either.scales) * half / (half - 1) * 1.001).all()
    step = np.repeat(linear.scales, 32, axis=1)
    assert (np.abs(linear.dequantize() - weight) <= 0.6 * step).all()
    importance = np.random.default_rng(seed).random(64, np.float32)
    assert (fit_scales(weight, importance, fmt).scales > 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_groups_and_zero_weights_decode_to_exactly_zero(bits: int, symmetric: bool) -> None:
    weight = weights(3, columns=64)
    weight[:, :32] = 0
    weight[:, 40] = 0
    decoded = round_to_nearest(weight, Scheme(bits=bits, group_size=32, symmetric=symmetric)).dequantize()
    assert (decoded[:, :32] == 0).all() and (decoded[:, 40] == 0).all()
    assert np.isfinite(decoded).all()


def test_one_sided_groups_keep_zero_on_the_grid() -> None:
    weight = np.abs(weights(5, columns=32)) + 1
    linear = round_to_nearest(weight, Scheme(bits=4, group_size=32, symmetric=False))
    assert linear.zero_points is not None and (linear.zero_points == 0).all()


def test_scales_too_small_for_float16_are_not_flushed_to_zero() -> None:
    weight = weights(1) * np.float32(1e-9)
    linear = round_to_nearest(weight, Scheme(bits=4, group_size=32, symmetric=True))
    assert (linear.scales != 0).all()
    assert output_error(linear.dequantize() - weight, np.eye(128, dtype=np.float32)[None]) < 0.02 * float(
        (weight**2).sum()
    )


def test_weights_that_are_not_finite_are_refused() -> None:
    weight = weights(0)
    weight[1, 2] = np.nan
    with pytest.raises(QuantizationError, match="1 weights are NaN"):
        round_to_nearest(weight, Scheme(bits=4, group_size=32, symmetric=True))


def test_a_group_size_that_does_not_divide_falls_back_to_one_that_does() -> None:
    assert Scheme(bits=4, group_size=128).fitted(576).group_size == 64
    assert Scheme(bits=4, group_size=256).fitted(1536).group_size == 256
    with pytest.raises(QuantizationError, match="bits: 32"):
        Scheme(bits=4, group_size=64).fitted(100)
    with pytest.raises(QuantizationError):
        round_to_nearest(weights(0, columns=48), Scheme(bits=4, group_size=32, symmetric=True))


@given(
    seed=st.integers(0, 1000), bits=st.sampled_from([4, 5, 6, 8]), rows=st.integers(1, 5), columns=st.integers(1, 70)
)
@settings(max_examples=120, deadline=None)
def test_packing_is_that_of_compressed_tensors_and_reverses(seed: int, bits: int, rows: int, columns: int) -> None:
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    fmt = formats()[f"int{bits}"]
    assert isinstance(fmt, Integers)
    packed = fmt.words(codes)
    signed = torch.from_numpy(codes.astype(np.int16) - (1 << (bits - 1))).to(torch.int8)
    np.testing.assert_array_equal(packed, pack_to_int32(signed, bits).numpy())
    np.testing.assert_array_equal(fmt.codes(packed, columns), codes)


@given(seed=st.integers(0, 1000), fmt=schemes)
@settings(max_examples=20, deadline=None)
def test_fitted_scales_are_never_worse_by_the_importance_they_were_fitted_to(seed: int, fmt: Scheme) -> None:
    weight = weights(seed)
    importance = np.random.default_rng(seed).exponential(1, 128).astype(np.float32) ** 3
    metric = np.diag(importance)[None]
    fitted = output_error(round_to(weight, fit_scales(weight, importance, fmt), fmt).dequantize() - weight, metric)
    plain = output_error(round_to_nearest(weight, fmt).dequantize() - weight, metric)
    assert fitted <= plain * (1 + 1e-5)
    if fmt.bits == 4:
        assert fitted < 0.97 * plain


def test_fitted_scales_survive_inputs_that_never_fire() -> None:
    importance = np.ones(128, np.float32)
    importance[:64] = 0
    grid = fit_scales(weights(2), importance, Scheme(bits=4, group_size=32, symmetric=True))
    assert np.isfinite(grid.scales).all() and (grid.scales != 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_lowers_the_output_error_on_correlated_inputs(symmetric: bool) -> None:
    fmt = Scheme(bits=4, group_size=32, symmetric=symmetric)
    weight, gram = weights(4, rows=32, columns=192), correlated_gram(192)
    grid = fit_range(weight, fmt)
    plain = output_error(round_to(weight, grid, fmt).dequantize() - weight, gram[None])
    compensated = output_error(gptq(weight, [inverse_factor(gram)], grid, fmt).dequantize() - weight, gram[None])
    assert compensated < 0.5 * plain


def test_blocks_of_a_gram_matrix_are_rounded_and_judged_one_by_one() -> None:
    fmt = Scheme(bits=4, group_size=32, symmetric=True)
    weight, blocks = weights(4, rows=32, columns=192), np.stack([correlated_gram(96, seed) for seed in (1, 2)])
    factors = [inverse_factor(block) for block in blocks]
    found = gptq(weight, factors, fit_range(weight, fmt), fmt)
    halves = [
        gptq(half, [factor], fit_range(half, fmt), fmt)
        for half, factor in zip(np.split(weight, 2, axis=1), factors, strict=True)
    ]
    np.testing.assert_array_equal(found.codes, np.concatenate([half.codes for half in halves], axis=1))
    whole = np.zeros((1, 192, 192), np.float32)
    whole[0, :96, :96], whole[0, 96:, 96:] = blocks
    delta = found.dequantize() - weight
    assert output_error(delta, blocks) == pytest.approx(output_error(delta, whole), rel=1e-6)
    np.testing.assert_array_equal(diagonal(blocks), diagonal(whole))


def test_gptq_on_uncorrelated_inputs_is_rounding_to_nearest() -> None:
    fmt = Scheme(bits=4, group_size=32, symmetric=False)
    weight = weights(6, columns=160)
    grid = fit_range(weight, fmt)
    result = gptq(weight, [inverse_factor(np.diag(np.linspace(1, 9, 160)).astype(np.float32))], grid, fmt)
    expected = assemble(nearest_codes(weight, grid, fmt).reshape(weight.shape), grid, fmt)
    np.testing.assert_array_equal(result.codes, expected.codes)


def test_the_inverse_factor_is_the_upper_cholesky_factor_of_the_damped_inverse() -> None:
    gram = correlated_gram(48, seed=1)
    upper, order = inverse_factor(gram, damping=0.1)
    damped = (gram + 0.1 * np.diag(gram).mean() * np.eye(48))[np.ix_(order, order)].astype(np.float64)
    np.testing.assert_allclose(upper, np.triu(upper))
    np.testing.assert_allclose(upper.T @ upper @ damped, np.eye(48), atol=1e-3)


def test_gptq_copes_with_inputs_that_never_fire() -> None:
    gram = correlated_gram(64)
    gram[10:20] = 0
    gram[:, 10:20] = 0
    fmt = Scheme(bits=4, group_size=32, symmetric=True)
    weight = weights(7, columns=64)
    result = gptq(weight, [inverse_factor(gram)], fit_range(weight, fmt), fmt)
    assert np.isfinite(result.dequantize()).all()
