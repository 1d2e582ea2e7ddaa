"""Scale fit: a least-squares fit of group scales to what a linear's inputs make important.

Ranges narrower than the full one are tried for each group. For each of them codes are rounded, then the scale is the
closed-form weighted least-squares one for these codes, and codes are rounded once more: the importance-weighted search
of llama.cpp (``make_qx_quants`` in ggml/src/ggml-quants.c).

N  output channels    K  input channels    g  group size    G  groups, K / g
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tapeout.number_format import FloatArray, Grid, grouped
from tapeout.quantized import QuantizedWeight, fit_range, format_of, nearest_codes, round_to
from tapeout.schemes import Scheme

if TYPE_CHECKING:
    from quantization.problem import Problem

OUTPUTS_AT_ONCE = 64  # output channels fitted together: what is rounded 20 times stays in the processor's cache
# Ranges tried, as fractions of the full range. llama.cpp tries 0.5 to 1.4 times a step size in 36 steps for two free
# parameters; with integer zero points most of the gain lies in clipping by up to a third.
SHRINKS = tuple(round(1.0 - 0.04 * step, 2) for step in range(10))


def propose(problem: Problem) -> list[QuantizedWeight]:
    fitted = zip(problem.scaled(), problem.once(grids), strict=True)
    return [round_to(weight, grid, problem.scheme) for weight, grid in fitted]


def grids(problem: Problem) -> list[Grid]:
    """Of each weight: scales fitted to what its inputs make important."""
    return [fit_scales(weight, problem.inputs.importance, problem.scheme) for weight in problem.scaled()]


def fit_scales(weight: FloatArray, importance: FloatArray, scheme: Scheme) -> Grid:
    """The grid that minimizes ``Σ importance · (weight - decoded)²`` per group; ``importance`` is ``[K]``, >= 0.

    The full range is among the candidates, so no group gets worse by this measure.
    """
    # A group no input reaches still needs a sane scale: a floor keeps its weights from being ignored.
    floor = max(float(importance.mean()) * 1e-6, np.finfo(np.float32).tiny)
    value = grouped(np.maximum(importance, floor).astype(np.float32)[None], scheme)
    with np.errstate(over="ignore", invalid="ignore"):  # of groups whose errors overflow, the full range is kept
        slices = [
            _fit(weight[start : start + OUTPUTS_AT_ONCE], value, scheme)
            for start in range(0, weight.shape[0], OUTPUTS_AT_ONCE)
        ]
    return Grid(np.concatenate([s.scales for s in slices]), np.concatenate([s.zero_points for s in slices]))


def _fit(weight: FloatArray, value: FloatArray, scheme: Scheme) -> Grid:
    groups = grouped(weight, scheme)
    best: Grid | None = None
    lowest = np.empty(0, np.float32)
    for shrink in SHRINKS:
        start = fit_range(weight, scheme, shrink=shrink)
        for grid in (start, _least_squares(groups, _values(weight, start, scheme), start, value, scheme)):
            error = _weighted_error(groups, _values(weight, grid, scheme), grid, value)
            if best is None:
                best, lowest = grid, error
                continue
            better = error < lowest
            best = Grid(
                np.where(better, grid.scales, best.scales), np.where(better, grid.zero_points, best.zero_points)
            )
            lowest = np.where(better, error, lowest)
    assert best is not None
    return best


def _values(weight: FloatArray, grid: Grid, scheme: Scheme) -> FloatArray:
    """The nearest values on a grid ``[N, G, g]``, before the scale."""
    return format_of(scheme).values(nearest_codes(weight, grid, scheme), grid.zero_points[:, :, None])


def _least_squares(groups: FloatArray, levels: FloatArray, grid: Grid, value: FloatArray, scheme: Scheme) -> Grid:
    weighted = levels * value
    squares = np.einsum("ngk,ngk->ng", weighted, levels)
    scales = np.einsum("ngk,ngk->ng", weighted, groups) / np.where(squares == 0, np.float32(1), squares)
    scales = np.where(np.isfinite(scales) & (scales != 0), scales, grid.scales)
    return Grid(format_of(scheme).storable(scales), grid.zero_points)


def _weighted_error(groups: FloatArray, levels: FloatArray, grid: Grid, value: FloatArray) -> FloatArray:
    residual = levels
    residual *= grid.scales[:, :, None]
    residual -= groups
    return np.einsum("ngk,ngk,xgk->ng", residual, residual, value, optimize=False)
