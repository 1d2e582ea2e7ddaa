"""Static scales for a KV cache in int8, int4 or FP8 (E4M3), per channel or per tensor.

H  key/value heads    D  head size

Keys are stored after the rotary embedding, which turns each pair of channels by the position's angle: over positions
a channel reaches the pair's norm, whatever calibration happened to see. So both channels of a pair get the threshold
of their norm (``k_pair_absmax``), and a sequence longer than any calibration sample cannot clip by rotation alone.
Scale 0 cannot occur: a channel that is always zero gets the smallest threshold that is still a normal number.

Integers are symmetric, ``-128 .. 127`` or ``-8 .. 7``. Eight bits reach the threshold. Four reach a little over half
of it and clip what lies beyond, since steps are what they lack (docs/negative-results.md). In FP8 the threshold is the
largest value, 448, and what is beyond saturates.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tapeout import e4m3
from tapeout.errors import QuantizationError
from tapeout.number_format import FloatArray

BITS = {"int8": 8, "int4": 4, "fp8": 8}  # of a recipe's kv_cache.dtype; any other keeps keys and values in float
LARGEST = {
    "int8": 127.0,
    "int4": 7.0,
    "fp8": float(e4m3.LARGEST),
}  # code; the smallest integer is one further from zero
_REACH = {"int4": np.float32(0.55)}  # of the threshold, by the largest code; of others 1
_SMALLEST = np.float32(1e-6)


def scale_name(layer: int, part: str) -> str:
    """Of the scales ``[H, D]`` of a layer's ``key`` or ``value``.

    >>> scale_name(3, "key")
    'layers.3.k_scale'
    """
    return f"layers.{layer}.{part[0]}_scale"


def scales(
    absmax: FloatArray, granularity: Literal["per_tensor", "per_channel"], *, dtype: str, name: str = "the KV cache"
) -> FloatArray:
    """Scales as float32 ``[H, D]`` for codes of ``dtype``; per tensor, the same number everywhere.

    ``absmax [H, D]``: the largest value of each channel. :class:`QuantizationError` if it says nothing.
    """
    if absmax.ndim != 2 or not np.isfinite(absmax).all() or (absmax < 0).any():
        raise QuantizationError(
            f"the calibrated ranges of {name} are {list(absmax.shape)} with "
            f"{int((~np.isfinite(absmax)).sum())} values not finite and a largest of {np.max(absmax, initial=0):g}",
            expected="finite, non-negative ranges [kv heads, head size]",
            remedy="run `dvc repro calibrate`, and check the calibration text",
        )
    threshold = np.full_like(absmax, absmax.max()) if granularity == "per_tensor" else absmax
    reach = _REACH.get(dtype, np.float32(1))
    return np.maximum(threshold, _SMALLEST).astype(np.float32) * reach / np.float32(LARGEST[dtype])


def quantize(values: FloatArray, scale: FloatArray, dtype: str) -> np.ndarray:
    """Codes of keys or values ``[..., H, T, D]`` under scales ``[H, D]``: int8, or bytes of FP8."""
    scaled = values / scale[:, None, :]
    if dtype == "fp8":
        return e4m3.encoded(scaled)
    largest, codes = LARGEST[dtype], np.rint(scaled)
    return np.clip(codes, -largest - 1, largest).astype(np.int8)


def dequantize(codes: np.ndarray, scale: FloatArray, dtype: str) -> FloatArray:
    """The inverse of :func:`quantize`, up to half a step within the range of its codes."""
    return (e4m3.decoded(codes) if dtype == "fp8" else codes.astype(np.float32)) * scale[:, None, :]
