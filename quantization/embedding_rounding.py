"""The token embedding and the output head, rounded: most of a small model's bytes, and its last product.

A head, and an embedding tied to it, is rounded as any linear is, on the statistics of the head's inputs. An embedding
of its own has no inputs but one channel at a time, so every channel counts alike. Tables have no input scale: a tied
one would need its inverse where rows are looked up. On the default model a tied table of 6 bits costs a KL of 0.0041
this way, in groups of 64 as of 32; to nearest 0.0109 and 0.0067 (docs/negative-results.md).

N  vocabulary size      K  hidden size
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quantization import awq
from quantization.checkpoint import Method
from quantization.group_search import Rounded, Solver, judge
from quantization.rounding import FloatArray, Format, QuantizedLinear, round_to_nearest
from quantization.scale_fit import output_error
from quantization.statistics import Statistics
from tapeout.recipe import Quantize

ROWS = 8192  # rounded at once: a vocabulary of 128k times 4,096 channels is 2 GB in float


@dataclass(frozen=True)
class RoundedTable:
    linear: QuantizedLinear
    method: Method
    error_rtn: float  # mean squared output error on held-out rows, of that of the output; to nearest
    error: float  # the same as rounded


def round_table(weight: FloatArray, fmt: Format, head: Statistics | None, settings: Quantize) -> RoundedTable:
    """``weight`` ``[N, K]``, in slices of rows; all of them get the method that is best for the whole.

    ``head``: of the head's inputs; None for an embedding that is not the head.
    """
    identity = awq.identity(weight.shape[1])
    seen = _every_channel_alike(weight.shape[1]) if head is None else head
    solver = Solver(seen, identity) if settings.method == "awq" else None
    slices: dict[Method, list[Rounded]] = {}
    energy = 0.0
    for start in range(0, weight.shape[0], ROWS):
        rows = weight[start : start + ROWS]
        energy += output_error(rows, seen.holdout)
        found = [judge("rtn", rows, round_to_nearest(rows, fmt), identity, seen)]
        for rounded in found + (solver.candidates(rows, fmt) if solver else []):
            slices.setdefault(rounded.method, []).append(rounded)
    energy = max(energy, 1e-30)
    errors: list[tuple[float, Method]] = [
        (sum(part.error for part in parts) / energy, method) for method, parts in slices.items()
    ]
    error, method = min(errors)
    linears = [part.linear for part in slices[method]]
    codes = np.concatenate([linear.codes for linear in linears])
    scales = np.concatenate([linear.scales for linear in linears])
    zero_points = [linear.zero_points for linear in linears if linear.zero_points is not None]
    stacked = np.concatenate(zero_points) if zero_points else None
    linear = QuantizedLinear(codes, scales, stacked, fmt.bits, fmt.group_size)
    return RoundedTable(linear, method, errors[0][0], error)


def _every_channel_alike(columns: int) -> Statistics:
    alike = np.eye(columns, dtype=np.float32)
    return Statistics(alike, alike, np.ones(columns, np.float32), np.ones(columns, np.float32))
