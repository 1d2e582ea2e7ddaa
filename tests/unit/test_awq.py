from __future__ import annotations

import numpy as np
import pytest

from quantization import input_scale
from quantization.input_scale import InputScale
from quantization.methods import awq
from quantization.output_error import output_error
from quantization.problem import Problem
from quantization.statistics import Statistics
from tapeout.portable_graph import FoldTarget
from tapeout.quantized import round_to_nearest
from tapeout.schemes import Scheme

RANDOM = np.random.default_rng(0)
INT4 = Scheme(bits=4, group_size=32, symmetric=True)


def searched(weight: np.ndarray, gram: np.ndarray, mean_abs: np.ndarray) -> InputScale | None:
    inputs = Statistics(gram[None], gram[None], mean_abs=mean_abs, max_abs=mean_abs)
    return awq.propose(Problem.of([weight], INT4, inputs, FoldTarget(kind="norm", weight="n.weight"), 20))


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    return RANDOM.uniform(0.3, 3, shape).astype(np.float32)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_scale_folded_into_a_norm_is_undone_exactly(offset: float) -> None:
    """Gemma's norms multiply by 1 + weight; a layer norm's bias is scaled too."""
    x, gain, bias, weight, scale = normal(5, 64), normal(64), normal(64), normal(8, 64), positive(64)
    fold_target = FoldTarget(kind="norm", weight="n.weight", bias="n.bias", offset=offset)
    before = (x * (gain + offset) + bias) @ weight.T
    folded = x * (input_scale.absorb(gain, scale, fold_target) + offset) + input_scale.absorb_bias(
        bias, scale, fold_target
    )
    np.testing.assert_allclose(folded @ (weight * scale).T, before, rtol=1e-4, atol=1e-4)


def test_a_scale_folded_into_values_is_tied_over_the_query_heads_that_share_them() -> None:
    """v -> o under grouped queries: 2 value heads, each read by 3 query heads of 4 channels; v lies in a fused qkv."""
    kv_heads, repeat, size, tokens = 2, 3, 4, 7
    fold_target = FoldTarget(kind="linear", weight="qkv", bias="b", rows=(10, 18), repeat=repeat, head_size=size)
    producer, bias = normal(20, 16), normal(20)
    x, consumer = normal(tokens, 16), normal(5, kv_heads * repeat * size)
    candidate = next(awq.candidates(positive(24), positive(24), 4, fold_target)).values

    def output(producer: np.ndarray, bias: np.ndarray, consumer: np.ndarray) -> np.ndarray:
        value = (x @ producer.T + bias)[:, 10:18].reshape(tokens, kv_heads, size)
        return np.repeat(value, repeat, axis=1).reshape(tokens, -1) @ consumer.T

    before = output(producer, bias, consumer)
    folded, folded_bias = (
        input_scale.absorb(producer, candidate, fold_target),
        input_scale.absorb_bias(bias, candidate, fold_target),
    )
    after = output(folded, folded_bias, consumer * candidate)
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(folded[:10], producer[:10])
    np.testing.assert_array_equal(folded[18:], producer[18:])
    assert candidate.std() > 0.05


def test_every_candidate_is_positive_centred_and_there_are_as_many_as_asked_for() -> None:
    found = list(awq.candidates(positive(64), positive(64), 20))
    assert len(found) == 20 and len({c.label for c in found}) == 20
    for candidate in found:
        assert (candidate.values > 0).all()
        np.testing.assert_allclose(candidate.values.max() * candidate.values.min(), 1, rtol=1e-3)
        assert not candidate.is_identity


def test_nothing_is_scaled_where_nothing_is_known_of_the_inputs() -> None:
    assert list(awq.candidates(np.zeros(32, np.float32), positive(32), 20)) == []


def test_a_channel_that_never_fires_does_not_blow_up_the_scale() -> None:
    activations = positive(64)
    activations[5] = 0
    for candidate in awq.candidates(activations, positive(64), 20):
        assert np.isfinite(candidate.values).all()


def test_the_search_finds_a_scale_for_salient_channels_and_it_lowers_the_error() -> None:
    weight = normal(128, 64)
    magnitude = np.ones(64, np.float32)
    magnitude[[3, 40]] = 50
    inputs = normal(2000, 64) * magnitude
    gram = inputs.T @ inputs / 2000
    found = searched(weight, gram, np.abs(inputs).mean(axis=0))
    assert found is not None
    plain = output_error(round_to_nearest(weight, INT4).dequantize() - weight, gram[None])
    scaled = round_to_nearest(weight * found.values, INT4).dequantize() / found.values
    assert output_error(scaled - weight, gram[None]) < 0.5 * plain


def test_the_search_keeps_the_identity_where_every_scale_hurts() -> None:
    """One group of equal inputs whose small weights a scale would only push towards the largest."""
    weight = np.zeros((64, 32), np.float32)
    weight[:, :] = RANDOM.integers(-7, 8, (64, 32))
    weight[:, 0] = -8  # exactly on the grid: rounding errs nowhere
    assert searched(weight, np.eye(32, dtype=np.float32), positive(32)) is None
