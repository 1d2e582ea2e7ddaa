"""8-bit codes: a code is a byte."""

from __future__ import annotations

from quantization.formats import Packed
from quantization.rounding import CodeArray


def _same(codes: CodeArray) -> CodeArray:
    return codes


FORMAT = Packed("int8", 8, _same, _same)
