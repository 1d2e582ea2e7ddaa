from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from quantization.input_scale import InputScale, identity
from quantization.methods import smoothquant
from quantization.problem import Problem, input_step
from quantization.statistics import Statistics
from tapeout.errors import QuantizationError
from tapeout.number_format import FloatArray
from tapeout.portable_graph import FoldTarget
from tapeout.quantized import round_to_nearest
from tapeout.schemes import FP8, STATIC_INT8, Scheme

RANDOM = np.random.default_rng(0)
STATIC = STATIC_INT8
NORM = FoldTarget(kind="norm", weight="n.weight")


def normal(*shape: int) -> FloatArray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def outliers(tokens: int = 4000, factor: float = 80) -> FloatArray:
    magnitude = np.ones(64, np.float32)
    magnitude[[3, 40]] = factor
    return normal(tokens, 64) * magnitude


def gram_of(x: FloatArray) -> FloatArray:
    return (x.T @ x / len(x)).astype(np.float32)[None]


def measured(x: FloatArray, weight: FloatArray, scale: InputScale, scheme: Scheme = STATIC) -> float:
    """The same error, run instead of predicted."""
    step = input_step(np.abs(x).max(axis=0), scale, scheme.activations)
    scaled = x / scale.values / np.float32(step)
    floats = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    rounded = (floats if scheme == FP8 else np.clip(np.rint(scaled), -128, 127)) * step
    decoded = round_to_nearest(weight * scale.values, scheme).dequantize()
    return float(((rounded @ decoded.T - x @ weight.T) ** 2).sum(axis=1).mean())


def predicted(x: FloatArray, weight: FloatArray, scale: InputScale, scheme: Scheme = STATIC) -> float:
    problem = problem_of(x, weight, 1, scheme).under(scale)
    return problem.error(round_to_nearest(weight * scale.values, scheme), weight, gram_of(x))


def problem_of(x: FloatArray, weight: FloatArray, steps: int, scheme: Scheme = STATIC) -> Problem:
    gram, magnitude = gram_of(x), np.abs(x)
    inputs = Statistics(gram, gram, mean_abs=magnitude.mean(axis=0), max_abs=magnitude.max(axis=0))
    return Problem.of([weight], scheme, inputs, NORM, steps)


@pytest.mark.parametrize("scheme", [STATIC, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("factor", [1, 20, 80, 4e5])
def test_the_predicted_error_is_the_measured_one(factor: float, scheme: Scheme) -> None:
    x, weight = outliers(factor=factor), normal(96, 64)
    largest, weight_max = np.abs(x).max(axis=0), np.abs(weight).max(axis=0)
    for scale in (identity(64), *smoothquant.candidates(largest, weight_max, 4)):
        found = predicted(x, weight, scale, scheme)
        assert found == pytest.approx(measured(x, weight, scale, scheme), rel=0.15), scale.label


def test_outliers_move_into_the_weights_and_the_error_falls() -> None:
    x, weight = outliers(), normal(96, 64)
    found = smoothquant.propose(problem_of(x, weight, 20))
    assert found is not None
    assert found.values[3] > 5 * np.median(found.values)
    assert measured(x, weight, found) < 0.1 * measured(x, weight, identity(64))


def test_no_candidate_found_is_worse_than_doing_nothing() -> None:
    weight = normal(32, 64) * RANDOM.uniform(0.01, 10, 64).astype(np.float32)
    x = (normal(500, 64) / np.abs(weight).max(axis=0)).astype(np.float32)
    found = smoothquant.propose(problem_of(x, weight, 10)) or identity(64)
    assert predicted(x, weight, found) <= predicted(x, weight, identity(64))


def test_a_silent_channel_neither_blows_up_nor_hides_the_others() -> None:
    x = outliers()
    x[:, 5] = 0
    for scale in smoothquant.candidates(np.abs(x).max(axis=0), np.abs(normal(8, 64)).max(axis=0), 10):
        assert np.isfinite(scale.values).all() and (scale.values > 0).all()


def test_inputs_that_are_always_zero_have_some_grid_and_no_scale() -> None:
    """Behind linears of zeros."""
    for activations in ("int8", "fp8"):
        assert 0 < input_step(np.zeros(64, np.float32), identity(64), activations) < 1
        with pytest.raises(QuantizationError, match="finite inputs"):
            input_step(np.full(64, np.inf, np.float32), identity(64), activations)
    assert smoothquant.propose(problem_of(np.zeros((8, 64), np.float32), normal(8, 64), 5)) is None
