"""Round to nearest: what every other method is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tapeout.quantized import QuantizedWeight, round_to_nearest

if TYPE_CHECKING:
    from quantization.problem import Problem


def propose(problem: Problem) -> list[QuantizedWeight]:
    return [round_to_nearest(weight, problem.scheme) for weight in problem.scaled()]
