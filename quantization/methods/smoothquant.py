"""SmoothQuant: move the outliers of a linear's inputs into its weights, so that one static int8 grid holds them all.

``s = max|x|^a / max|W|^(1 - a)`` per channel (Xiao et al. 2023, arXiv:2211.10438, equation 4). The exponent is searched
by output error, with the rounding of the inputs simulated from calibration's statistics. Not for FP8: its steps grow
with the number, so that outliers cost nothing, and inputs that all reach the end of the grid saturate on other text
(docs/negative-results.md).

K  input channels    s  [K], positive
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from quantization.input_scale import InputScale, normalize, tie
from tapeout.number_format import FloatArray
from tapeout.portable_graph import FoldTarget

if TYPE_CHECKING:
    from quantization.problem import Problem

_FLOOR = 1e-4  # of the largest, so that a silent channel does not blow up its weights


def propose(problem: Problem) -> InputScale | None:
    """The scale of the lowest output error of RTN over all weights; None if none is lower than without."""
    if problem.fold_target is None or problem.scheme.activations != "int8":
        return None
    weight_max = np.maximum.reduce([np.abs(weight).max(axis=0) for weight in problem.weights])
    max_abs = problem.statistics.max_abs
    if not weight_max.any() or not max_abs.any():
        return None
    return problem.best_scale(candidates(max_abs, weight_max, problem.steps, problem.fold_target))


def candidates(
    max_abs: FloatArray, weight_max: FloatArray, steps: int, fold_target: FoldTarget | None = None
) -> Iterator[InputScale]:
    """``steps`` scales, of exponents evenly from 1 / steps to 1; ``weight_max`` is the largest |W| of each channel."""
    inputs = tie(np.maximum(max_abs, float(max_abs.max()) * _FLOOR).astype(np.float64), fold_target)
    weights = tie(np.maximum(weight_max, float(weight_max.max()) * _FLOOR).astype(np.float64), fold_target)
    for number in range(1, steps + 1):
        exponent = number / steps
        yield InputScale(normalize(inputs**exponent / weights ** (1 - exponent)), f"smooth a={exponent:.2f}")
