"""GPTQ: round one input channel at a time and let the channels not yet rounded make up for the error.

Static groups with activation order (``--static-groups --act-order`` of IST-DASLab/gptq): scales come from the
unpermuted weight, so the result is an ordinary grouped scheme. Source: Frantar et al. 2022, arXiv:2210.17323,
algorithm 1. The grid is that of the scale fit. Errors are made up for within a diagonal block of the Gram matrix.

N  output channels    K  input channels    k  input channels of a block    g  group size
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from quantization.methods.scale_fit import grids
from tapeout.number_format import FloatArray, Grid
from tapeout.quantized import QuantizedWeight, assemble, format_of
from tapeout.schemes import Scheme

if TYPE_CHECKING:
    from quantization.problem import Inputs, Problem

AT_ONCE = 128  # input channels whose errors are carried on one by one; beyond them, in one matmul
LARGE = 1e15  # weights
DAMPING = 0.01  # of the mean diagonal, as in the reference implementation

Factor = tuple[FloatArray, np.ndarray]  # [k, k], and the order of its channels, [k]


def propose(problem: Problem) -> list[QuantizedWeight] | None:
    factors = problem.inputs.once(factors_of)
    if factors is None:
        return None
    fitted = zip(problem.scaled(), problem.once(grids), strict=True)
    return [gptq(weight, factors, grid, problem.scheme) for weight, grid in fitted]


def factors_of(inputs: Inputs) -> list[Factor] | None:
    """Of each block; None for inputs that are not correlated, or of too few dimensions."""
    if np.count_nonzero(inputs.gram) > np.count_nonzero(inputs.importance):
        with suppress(np.linalg.LinAlgError):
            return [inverse_factor(block) for block in inputs.gram]
    return None


def inverse_factor(gram: FloatArray, damping: float = DAMPING) -> Factor:
    """The upper Cholesky factor ``U`` of the inverse damped Gram matrix (``inv = Uᵀ U``), in the returned order.

    The order puts the channels with the largest activations first. ``numpy.linalg.LinAlgError`` if the matrix is
    not positive definite even when damped.
    """
    from scipy.linalg import get_lapack_funcs

    order = np.argsort(-np.diag(gram), kind="stable")
    backwards = order[::-1]
    hessian = np.empty(gram.shape, np.float64, order="F")  # factorized and inverted in place
    for start in range(0, len(gram), AT_ONCE):
        rows = backwards[start : start + AT_ONCE]
        hessian[:, start : start + AT_ONCE] = gram[rows][:, backwards].T  # the matrix is symmetric
    np.einsum("kk->k", hessian)[:] += damping * (float(np.diag(gram).mean()) or 1.0)
    # H = A Aᵀ with A upper triangular is a Cholesky factorization read backwards; then inv(H) = Uᵀ U with U = inv(A).
    potrf, trtri = get_lapack_funcs(("potrf", "trtri"), (hessian,))
    lower, info = potrf(hessian, lower=1, clean=1, overwrite_a=1)
    if info == 0:
        inverse, info = trtri(lower, lower=1, overwrite_c=1)
        if info == 0:
            return np.ascontiguousarray(inverse[::-1, ::-1], np.float32), order
    raise np.linalg.LinAlgError(f"the damped Gram matrix is not positive definite (LAPACK info {info})")


def gptq(weight: FloatArray, factors: Sequence[Factor], grid: Grid, scheme: Scheme) -> QuantizedWeight:
    """Codes for ``weight`` ``[N, K]`` on ``grid``, given :func:`inverse_factor` of each block of its inputs' Gram."""
    size, number_format = weight.shape[1] // grid.scales.shape[1], format_of(scheme)
    # Errors that are carried on through large weights could overflow. A power of two changes no code.
    largest = np.maximum(weight.max(axis=1, keepdims=True), -weight.min(axis=1, keepdims=True))
    shrunk = np.where(largest > LARGE, np.float32(2.0**-100), np.float32(1))  # [N, 1]
    weight = weight * shrunk if (shrunk != 1).any() else weight
    scales, zero_points = (grid.scales * shrunk).T, grid.zero_points.T  # [G, N]
    codes = np.empty(weight.shape[::-1], np.float32)
    first = 0
    for upper, order in factors:
        channels = first + order
        remaining = np.ascontiguousarray(weight.T[channels])  # [k, N]: a channel is a contiguous row
        group = channels // size
        for start in range(0, len(channels), AT_ONCE):
            end = min(start + AT_ONCE, len(channels))
            errors = np.empty((end - start, weight.shape[0]), np.float32)
            for channel in range(start, end):
                scale, zero_point = scales[group[channel]], zero_points[group[channel]]
                code = number_format.rounded(remaining[channel] / scale, zero_point)
                codes[channels[channel]] = code
                error = (remaining[channel] - number_format.values(code, zero_point) * scale) / upper[channel, channel]
                remaining[channel + 1 : end] -= np.outer(upper[channel, channel + 1 : end], error)
                errors[channel - start] = error
            remaining[end:] -= upper[start:end, end:].T @ errors
        first += len(order)
    return assemble(np.ascontiguousarray(codes.T), grid, scheme)
