"""8-bit codes: a code is a byte."""

from __future__ import annotations

from tapeout.integers import Integers
from tapeout.number_format import CodeArray


def same(codes: CodeArray) -> CodeArray:
    return codes


FORMAT = Integers("int8", 8, same, same)
