"""Projections that hold a query and a gate on what it attends to, as those of Qwen3.5: each half counts alike.

Gates can be far larger than queries. Then an input scale, or a method, that serves the gates alone would win, and what
attention looks at would be rounded badly. So before such a weight is quantized the gates' rows are multiplied by a
power of two that makes their outputs as large as the queries'. That changes no code: rows are rounded one by one, and
the scales are divided by it afterwards, without rounding.

N  output channels      K  input channels      R  rows of a query that alternate with as many of its gate
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quantization.output_error import output_error
from quantization.statistics import Statistics
from tapeout.number_format import FloatArray
from tapeout.portable_graph import LinearGroup
from tapeout.quantized import QuantizedWeight


def row_factors(weights: Sequence[FloatArray], group: LinearGroup, statistics: Statistics) -> list[FloatArray | None]:
    """What rows ``[N, K]`` of each member are multiplied by, ``[N]``; None for a member without gates."""
    gated = group.gated or (0,) * len(weights)
    return [_factors(weight, rows, statistics) if rows else None for weight, rows in zip(weights, gated, strict=True)]


def _factors(weight: FloatArray, rows: int, statistics: Statistics) -> FloatArray:
    """
    >>> gram = np.ones((1, 1, 1), np.float32)  # of one input that is always 1
    >>> seen = Statistics(gram=gram, holdout=gram, mean_abs=gram[0, 0], max_abs=gram[0, 0])
    >>> _factors(np.array([[1.0], [2.0], [31.0], [64.0]], np.float32), 2, seen).tolist()
    [1.0, 1.0, 0.03125, 0.03125]
    """
    is_gate = np.arange(len(weight)) // rows % 2 == 1
    queries, gates = (output_error(weight[chosen], statistics.gram) for chosen in (~is_gate, is_gate))
    power = round(np.log2(queries / gates) / 2) if queries > 0 and gates > 0 else 0
    return np.where(is_gate, np.float32(2.0**power), np.float32(1))


def multiplied(weights: Sequence[FloatArray], factors: Sequence[FloatArray | None]) -> list[FloatArray]:
    return [w if by is None else w * by[:, None] for w, by in zip(weights, factors, strict=True)]


def restored(linears: Sequence[QuantizedWeight], factors: Sequence[FloatArray | None]) -> list[QuantizedWeight]:
    """The quantized weights of what was multiplied, as those of the weights themselves."""
    return [
        linear if by is None else replace(linear, scales=linear.scales / by[:, None])
        for linear, by in zip(linears, factors, strict=True)
    ]
