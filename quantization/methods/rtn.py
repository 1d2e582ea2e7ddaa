"""Round to nearest: what every other method is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantization.rounding import QuantizedLinear, round_to_nearest

if TYPE_CHECKING:
    from quantization.problem import Problem


def propose(problem: Problem) -> list[QuantizedLinear]:
    return [round_to_nearest(weight, problem.scheme) for weight in problem.scaled()]
