"""Attention with sinks: a learned score of each head that takes a share of the softmax, and has no value.

It is :mod:`tapeout.operators.attention` with one more input, and lies there.
"""

from __future__ import annotations

from tapeout.operators.attention import WITH_SINKS as OPERATOR

__all__ = ["OPERATOR"]
