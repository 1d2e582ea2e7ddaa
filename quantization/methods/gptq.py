"""GPTQ: round one input channel at a time and let the channels not yet rounded make up for the error.

Static groups with activation order (``--static-groups --act-order`` of IST-DASLab/gptq): scales come from the
unpermuted weight, so the result is an ordinary grouped scheme. Source: Frantar et al. 2022, arXiv:2210.17323,
algorithm 1. The grid is that of the scale fit.

N  output channels    K  input channels    g  group size
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from quantization.methods.scale_fit import grids
from quantization.rounding import FloatArray, Grid, QuantizedLinear, assemble
from tapeout.schemes import Scheme

if TYPE_CHECKING:
    from quantization.problem import Inputs, Problem

BLOCK = 128  # input channels whose errors are carried on one by one; beyond it, in one matmul
DAMPING = 0.01  # of the mean diagonal, as in the reference implementation

Factor = tuple[FloatArray, np.ndarray]


def propose(problem: Problem) -> list[QuantizedLinear] | None:
    factor = problem.inputs.once(factor_of)
    if factor is None:
        return None
    fitted = zip(problem.scaled(), problem.once(grids), strict=True)
    return [gptq(weight, factor, grid, problem.scheme) for weight, grid in fitted]


def factor_of(inputs: Inputs) -> Factor | None:
    """None for inputs that are not correlated, or of too few dimensions."""
    if np.count_nonzero(inputs.gram) > np.count_nonzero(inputs.importance):
        with suppress(np.linalg.LinAlgError):
            return inverse_factor(inputs.gram)
    return None


def inverse_factor(gram: FloatArray, damping: float = DAMPING) -> Factor:
    """The upper Cholesky factor ``U`` of the inverse damped Gram matrix (``inv = Uᵀ U``), in the returned order.

    The order puts the channels with the largest activations first. ``numpy.linalg.LinAlgError`` if the matrix is
    not positive definite even when damped.
    """
    from scipy.linalg import get_lapack_funcs

    order = np.argsort(-np.diag(gram), kind="stable")
    backwards = order[::-1]
    hessian = np.empty(gram.shape, np.float64, order="F")  # factorized and inverted in place: K may be 14,336
    for start in range(0, len(gram), BLOCK):
        rows = backwards[start : start + BLOCK]
        hessian[:, start : start + BLOCK] = gram[rows][:, backwards].T  # the matrix is symmetric
    np.einsum("kk->k", hessian)[:] += damping * (float(np.diag(gram).mean()) or 1.0)
    # H = A Aᵀ with A upper triangular is a Cholesky factorization read backwards; then inv(H) = Uᵀ U with U = inv(A).
    potrf, trtri = get_lapack_funcs(("potrf", "trtri"), (hessian,))
    lower, info = potrf(hessian, lower=1, clean=1, overwrite_a=1)
    if info == 0:
        inverse, info = trtri(lower, lower=1, overwrite_c=1)
        if info == 0:
            return np.ascontiguousarray(inverse[::-1, ::-1], np.float32), order
    raise np.linalg.LinAlgError(f"the damped Gram matrix is not positive definite (LAPACK info {info})")


def gptq(weight: FloatArray, factor: Factor, grid: Grid, scheme: Scheme) -> QuantizedLinear:
    """Codes for ``weight`` ``[N, K]`` on ``grid``, given :func:`inverse_factor` of its inputs' Gram matrix."""
    upper, order = factor
    columns = weight.shape[1]
    remaining = np.ascontiguousarray(weight.T[order])  # [K, N]: a channel is a contiguous row
    group = order // (columns // grid.scales.shape[1])
    scales, zero_points = grid.scales.T, grid.zero_points.T  # [G, N]
    codes = np.empty_like(remaining)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = np.empty((end - start, weight.shape[0]), np.float32)
        for channel in range(start, end):
            scale, zero_point = scales[group[channel]], zero_points[group[channel]]
            code = np.clip(np.rint(remaining[channel] / scale) + zero_point, 0, scheme.levels - 1)
            codes[channel] = code
            error = (remaining[channel] - (code - zero_point) * scale) / upper[channel, channel]
            remaining[channel + 1 : end] -= np.outer(upper[channel, channel + 1 : end], error)
            errors[channel - start] = error
        remaining[end:] -= upper[start:end, end:].T @ errors
    unordered = np.empty_like(codes)
    unordered[order] = codes
    return assemble(np.ascontiguousarray(unordered.T), grid, scheme)
