"""AWQ: scale up the input channels that matter before rounding, and divide the scale out again upstream.

Columns of W with large activations are rounded more finely (Lin et al. 2023, arXiv:2306.00978). Searched on the Gram
matrix instead of samples, so the error of a candidate is exact over every calibration token.

K  input channels    s  [K], positive
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from quantization.input_scale import InputScale, normalize, tie
from tapeout.number_format import FloatArray, grouped
from tapeout.portable_graph import FoldTarget
from tapeout.schemes import Scheme

if TYPE_CHECKING:
    from quantization.problem import Problem

_FLOOR = 1e-4  # smallest scale before normalization, as in AutoAWQ's quantizer


def propose(problem: Problem) -> InputScale | None:
    """The scale of the lowest output error of RTN over all weights; None if none is lower than without."""
    if problem.fold_target is None or problem.scheme.activations != "float":
        return None
    magnitude = relative_magnitude(np.concatenate(list(problem.weights)), problem.scheme)
    found = candidates(problem.statistics.mean_abs, magnitude, problem.steps, problem.fold_target)
    return problem.best_scale(found)


def candidates(
    mean_abs: FloatArray, weight_mean: FloatArray, steps: int, fold_target: FoldTarget | None = None
) -> Iterator[InputScale]:
    """Scales to try besides the identity: ``steps`` of them, half by activations alone, half by both ("duo").

    ``mean_abs``: mean |x| per channel; ``weight_mean``: mean over outputs of |W| relative to its group's largest.
    Duo at ratio 0 is not the identity, so it is a candidate too (``duo_scaling`` in AutoAWQ's quantizer).
    """
    if not np.isfinite(mean_abs).all() or float(mean_abs.max()) <= 0:
        return  # nothing is known of these inputs: only the identity is left
    activations = tie(np.maximum(mean_abs, float(mean_abs.max()) * _FLOOR).astype(np.float64), fold_target)
    weights = tie(np.maximum(weight_mean, _FLOOR).astype(np.float64), fold_target)
    for step in range(1, steps - steps // 2 + 1):
        ratio = step / (steps - steps // 2)
        yield InputScale(normalize(activations**ratio), f"r={ratio:.2f}")
    for step in range(steps // 2):
        ratio = step / max(1, steps // 2 - 1)
        yield InputScale(normalize(activations**ratio / weights ** (1 - ratio)), f"duo r={ratio:.2f}")


def relative_magnitude(weight: FloatArray, scheme: Scheme) -> FloatArray:
    """Per input channel, the mean over outputs of |W| relative to the largest in its group; ``[K]``."""
    groups = grouped(np.abs(weight), scheme)
    return (groups / (groups.max(axis=2, keepdims=True) + 1e-6)).mean(axis=0).reshape(-1)
