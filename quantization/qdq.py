"""Arithmetic of graphs with DequantizeLinear over 4-bit blocks, whose scales a compiler wants positive and in 16 bits.

Such graphs are made while an engine is lowered (engines/passes/tensorrt/int4_linears.py). No checkpoint holds these
tensors.

N  output channels      K  input channels
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tapeout.number_format import FloatArray
from tapeout.quantized import QuantizedWeight

LARGEST_INT4, SMALLEST_INT4 = 7, -8


def half_scales(scales: FloatArray) -> FloatArray:
    """Scales that a 16-bit float holds exactly, and never zero: rounded to float16 before codes are chosen for them.

    A block of zeros would ask for zero, and a quotient by zero is NaN.
    """
    tiny = np.float32(np.finfo(np.float16).smallest_normal)
    return np.maximum(scales.astype(np.float16).astype(np.float32), tiny)


def positive_int4(parts: Sequence[QuantizedWeight]) -> tuple[NDArray[np.int8], FloatArray, int]:
    """Signed codes ``[N, K]`` and positive scales ``[N, K / block]`` of symmetric 4-bit linears, stacked.

    A block whose scale is negative is negated; the one code without an opposite (-8) loses a step. The last value
    counts these codes.
    """
    codes = np.concatenate([part.codes for part in parts]).astype(np.int8) + SMALLEST_INT4
    scales = np.concatenate([part.scales for part in parts]).astype(np.float32)
    blocks = codes.reshape(*scales.shape, -1)
    negative = (scales < 0)[:, :, None]
    flipped = np.where(negative, np.minimum(-blocks, LARGEST_INT4), blocks).astype(np.int8)
    lost = int(((blocks == SMALLEST_INT4) & negative).sum())
    return flipped.reshape(codes.shape), half_scales(np.abs(scales)), lost
