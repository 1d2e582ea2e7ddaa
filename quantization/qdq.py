"""Arithmetic of graphs with QuantizeLinear and DequantizeLinear: FP8 (E4M3) weights and inputs, positive int4 blocks.

Such graphs are made while an engine is lowered, for a compiler that takes 16-bit floats
(engines/passes/tensorrt/fp8_linears.py, int4_linears.py). No checkpoint holds these tensors.

N  output channels      K  input channels
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tapeout.number_format import FloatArray
from tapeout.quantized import QuantizedWeight

LARGEST_FP8 = np.float32(448.0)  # of E4M3 without infinities (arXiv:2209.05433)
LARGEST_INT4, SMALLEST_INT4 = 7, -8


def half_scales(scales: FloatArray) -> FloatArray:
    """Scales that a 16-bit float holds exactly, and never zero: rounded to float16 before codes are chosen for them.

    A block of zeros would ask for zero, and a quotient by zero is NaN.
    """
    tiny = np.float32(np.finfo(np.float16).smallest_normal)
    return np.maximum(scales.astype(np.float16).astype(np.float32), tiny)


def fp8_weight(weight: FloatArray) -> tuple[NDArray[Any], FloatArray]:
    """``weight [N, K]`` as FP8 codes ``[N, K]`` and a positive scale per output channel ``[N]``.

    >>> codes, scales = fp8_weight(np.array([[448.0, -1.5]], np.float32))
    >>> (codes.astype(np.float32) * scales[:, None]).tolist()
    [[448.0, -1.5]]
    """
    scales = half_scales(np.abs(weight).max(axis=1) / LARGEST_FP8)
    scaled = np.clip(weight / scales[:, None], -LARGEST_FP8, LARGEST_FP8)
    return scaled.astype(ml_dtypes.float8_e4m3fn), scales


def fp8_input_scale(largest: float) -> FloatArray:
    """A scalar: the largest calibrated ``|x|`` falls on the largest FP8 value, and what is larger saturates."""
    return half_scales(np.array(largest / float(LARGEST_FP8), np.float32))


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
