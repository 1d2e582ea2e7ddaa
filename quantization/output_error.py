"""How far a linear's output is off, from the second moments of its inputs alone.

N  output channels      K  input channels
"""

from __future__ import annotations

import numpy as np

from tapeout.number_format import FloatArray

_LARGEST_SQUARED = 1e15  # squares of larger numbers and their sums overflow float32


def output_error(delta: FloatArray, gram: FloatArray) -> float:
    """Mean over tokens of the squared norm of ``delta @ x``, exactly, with no forward pass.

    ``delta`` is ``[N, K]``; ``gram`` is ``[B, k, k]``, diagonal blocks of the mean of x xᵀ: the error is
    tr(Δ · gram · Δᵀ). Errors of channels in different blocks count as independent.
    """
    largest = max(float(delta.max(initial=0)), -float(delta.min(initial=0)))
    if largest > _LARGEST_SQUARED and np.isfinite(largest):
        return output_error(delta / np.float32(largest), gram) * largest**2
    parts = np.split(delta, len(gram), axis=1)
    return sum(
        float(np.einsum("nk,nk->", part @ block, part, dtype=np.float64))
        for part, block in zip(parts, gram, strict=True)
    )


def diagonal(gram: FloatArray) -> FloatArray:
    """``[K]``, the mean of x²: a view of ``gram [B, k, k]`` where that is one block."""
    return np.einsum("bkk->bk", gram).reshape(-1)
