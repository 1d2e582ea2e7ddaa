"""Static int8 scales for the KV cache, per channel or per tensor.

H  key/value heads    D  head size

Keys are stored after the rotary embedding, which turns each pair of channels by the position's angle: over positions
a channel reaches the pair's norm, whatever calibration happened to see. So both channels of a pair get the threshold
of their norm (``k_pair_absmax``), and a sequence longer than any calibration row cannot clip by rotation alone.
Scale 0 cannot occur: a channel that is always zero gets the smallest threshold that is still a normal number.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from pipeline.errors import QuantizationError
from quantization.rounding import FloatArray

LARGEST_CODE = 127
_SMALLEST = np.float32(1e-6)


def scales(
    absmax: FloatArray, granularity: Literal["per_tensor", "per_channel"], *, name: str = "the KV cache"
) -> FloatArray:
    """``threshold / 127`` as float32 ``[H, D]``; per tensor, the same number everywhere."""
    if absmax.ndim != 2 or not np.isfinite(absmax).all() or (absmax < 0).any() or not absmax.any():
        raise QuantizationError(
            f"the calibrated ranges of {name} are {list(absmax.shape)} with "
            f"{int((~np.isfinite(absmax)).sum())} values not finite and a largest of {np.max(absmax, initial=0):g}",
            expected="finite, non-negative ranges [kv heads, head size], not all zero",
            remedy="run `dvc repro calibrate`, and check the calibration text",
        )
    threshold = np.full_like(absmax, absmax.max()) if granularity == "per_tensor" else absmax
    return np.maximum(threshold, _SMALLEST).astype(np.float32) / np.float32(LARGEST_CODE)


def quantize(values: FloatArray, scale: FloatArray) -> np.ndarray:
    """int8 codes of keys or values ``[..., H, T, D]`` under scales ``[H, D]``."""
    codes = np.rint(values / scale[:, None, :])
    return np.clip(codes, -LARGEST_CODE - 1, LARGEST_CODE).astype(np.int8)


def dequantize(codes: np.ndarray, scale: FloatArray) -> FloatArray:
    """The inverse of :func:`quantize`, up to half a scale within the range."""
    return codes.astype(np.float32) * scale[:, None, :]
