"""Output error of a quantized linear, and a least-squares fit of group scales to what its inputs make important.

N  output channels    K  input channels    g  group size    G  groups, K / g
gram  [K, K], mean of x xᵀ over calibration tokens: the mean squared output error is tr(Δ · gram · Δᵀ), exactly,
with no forward pass.
"""

from __future__ import annotations

import numpy as np

from quantization.rounding import FloatArray, Format, Grid, fit_range, grouped, nearest_codes, storable

# Ranges tried, as fractions of the full range. Reference A6: llama.cpp tries 0.5 to 1.4 times a step size in 36
# steps for two free parameters; with integer zero points most of the gain lies in clipping by up to a third.
_ROWS_AT_ONCE = 64  # rows fitted together, so that what is rounded 20 times stays in the processor's cache
SHRINKS = tuple(round(1.0 - 0.04 * step, 2) for step in range(10))


def output_error(delta: FloatArray, gram: FloatArray) -> float:
    """Mean over tokens of the squared norm of ``delta @ x``; ``delta`` is ``[N, K]``."""
    return float(np.einsum("nk,nk->", delta @ gram, delta, dtype=np.float64))


def fit_scales(weight: FloatArray, importance: FloatArray, fmt: Format) -> Grid:
    """The grid that minimizes ``Σ importance · (weight - decoded)²`` per group; ``importance`` is ``[K]``, >= 0.

    For each range tried, codes are rounded, then the scale is the closed-form weighted least-squares one for these
    codes, and codes are rounded once more (reference A6, importance-weighted scale fit). The plain range is among
    the candidates, so no group gets worse by this measure.
    """
    # A group no input reaches still needs a sane scale: a floor keeps its weights from being ignored.
    floor = max(float(importance.mean()) * 1e-6, np.finfo(np.float32).tiny)
    value = np.maximum(importance, floor).astype(np.float32).reshape(1, -1, fmt.group_size)
    slices = [
        _fit_rows(weight[start : start + _ROWS_AT_ONCE], value, fmt)
        for start in range(0, weight.shape[0], _ROWS_AT_ONCE)
    ]
    return Grid(np.concatenate([s.scales for s in slices]), np.concatenate([s.zero_points for s in slices]))


def _fit_rows(weight: FloatArray, value: FloatArray, fmt: Format) -> Grid:
    groups = grouped(weight, fmt.group_size)
    best: Grid | None = None
    lowest = np.empty(0, np.float32)
    for shrink in SHRINKS:
        start = fit_range(weight, fmt, shrink=shrink)
        for grid in (start, _least_squares(groups, nearest_codes(weight, start, fmt), start, value)):
            error = _weighted_error(groups, nearest_codes(weight, grid, fmt), grid, value)
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


def _least_squares(groups: FloatArray, codes: FloatArray, grid: Grid, value: FloatArray) -> Grid:
    levels = codes - grid.zero_points[:, :, None]
    weighted = levels * value
    squares = np.einsum("ngk,ngk->ng", weighted, levels)
    scales = np.einsum("ngk,ngk->ng", weighted, groups) / np.where(squares == 0, np.float32(1), squares)
    return Grid(storable(np.where(scales == 0, grid.scales, scales)), grid.zero_points)


def _weighted_error(groups: FloatArray, codes: FloatArray, grid: Grid, value: FloatArray) -> FloatArray:
    residual = codes
    residual -= grid.zero_points[:, :, None]
    residual *= grid.scales[:, :, None]
    residual -= groups
    return np.einsum("ngk,ngk,xgk->ng", residual, residual, value, optimize=False)
