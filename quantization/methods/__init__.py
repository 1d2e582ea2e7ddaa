"""Quantization methods, one module each, found by listing this folder. ``quantize.candidates`` names them.

A module has ``propose(problem)``. It returns quantized linears, one per weight of the problem, or an input scale for
the others to round under, or None where it has nothing to offer. ``quantization/search.py`` compares proposals on
held-out samples; a method need not be the best, nor know the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from quantization.input_scale import InputScale
    from quantization.problem import Problem
    from tapeout.quantized import QuantizedWeight

    Proposal = list[QuantizedWeight] | InputScale | None


class Method(Protocol):
    def propose(self, problem: Problem) -> Proposal: ...


def method(name: str) -> Method:
    found: Any = import_module(f"{__name__}.{name}")
    return found
