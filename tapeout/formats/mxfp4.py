"""MXFP4: 4-bit floats in blocks of 32 input channels, with a power of two in a byte as the scale of each block.

OCP Microscaling Formats (MX) Specification 1.0. An element is E2M1 (5.3.3): a sign, two bits of exponent with bias 1
and one of mantissa. A scale is E8M0 (5.4.1): ``2^(code - 127)``, where code 255 is NaN. A checkpoint holds both as
compressed-tensors does in ``mxfp4-pack-quantized``: two codes a byte, the first in the low bits, and scales as bytes.

Of the scales that clip no weight of a block, a fit takes the smallest. The rule of section 6.3 takes half of it where
the largest magnitude is more than 6/8 of a power of two, and clips there; the scale fit tries both.

Twice an element is an integer from -12 to 12, so integers of 5 bits hold the same weights under half the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tapeout.errors import QuantizationError
from tapeout.formats.int4 import pack, unpack
from tapeout.number_format import (
    AnyArray,
    CodeArray,
    Coded,
    FloatArray,
    Grid,
    Grouping,
    ScaleType,
    Tensors,
    grouped,
    require_finite,
)
from tapeout.packed_codes import PackedCodes

BLOCK = 32  # input channels
LAYOUT = "mxfp4-pack-quantized"
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])  # by code; 8 is a zero with a sign
SIGN = 8
BIAS, NAN = 127, 255
# Exponents that are written. Values of larger scales would be infinite. A group that asks for a smaller scale counts as
# zero, as those of integers do: see tapeout/integers.py.
LARGEST_EXPONENT, SMALLEST_EXPONENT = 125, -109
AT_ONCE = 1 << 20  # codes that are looked up together: numpy takes 8 bytes for each

# Halfway between two magnitudes the one of the even code counts as nearest, as in IEEE 754: 1 for 0.75.
_BETWEEN = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
_BETWEEN[1::2] = np.nextafter(_BETWEEN[1::2], np.float32(0))


def decode_scales(stored: CodeArray) -> FloatArray:
    """
    >>> decode_scales(np.array([0, 127, 254], np.uint8)).tolist() == [2.0**-127, 1.0, 2.0**127]
    True
    """
    number = np.where(stored == NAN, np.float32(np.nan), np.float32(1))
    return np.ldexp(number, stored.astype(np.int32) - BIAS)


def encode_scales(scales: FloatArray) -> CodeArray:
    """:class:`QuantizationError` for numbers that are no power of two from 2^-127 to 2^127."""
    fraction, exponent = np.frexp(scales)
    stored = exponent + (BIAS - 1)
    if not np.all((fraction == 0.5) & (stored >= 0) & (stored < NAN)):
        raise QuantizationError("scales that are no powers of two", expected="scales that a byte of E8M0 holds")
    return stored.astype(np.uint8)


@dataclass(frozen=True)
class Mxfp4(PackedCodes):
    number_type: str = "float"
    layout: str = LAYOUT
    scale_type: ScaleType = "e8m0"
    group_size: int | None = BLOCK
    divisible: bool = False
    integer_bits: int = 5

    def fit(self, weight: FloatArray, grouping: Grouping, shrink: float = 1.0) -> Grid:
        """Groups that are too small to have a scale decode to zero, too."""
        require_finite(weight)
        largest = np.abs(grouped(weight, grouping)).max(axis=-1) * np.float32(shrink)
        fraction, exponent = np.frexp(largest)  # fraction * 2^exponent, from 1/2 on; 6 is 3/4 * 2^3
        exponent = np.minimum(exponent - 3 + (fraction > 0.75), LARGEST_EXPONENT)
        exponent[(largest == 0) | (exponent < SMALLEST_EXPONENT)] = 0
        return Grid(np.ldexp(np.float32(1), exponent), np.zeros_like(largest))

    def storable(self, scales: FloatArray) -> FloatArray:
        """The nearest power of two, by ratio."""
        fraction, exponent = np.frexp(np.abs(scales))
        exponent = exponent - 1 + (fraction > np.float32(np.sqrt(0.5)))
        return np.ldexp(np.float32(1), np.clip(exponent, SMALLEST_EXPONENT, LARGEST_EXPONENT))

    def rounded(self, scaled: FloatArray, zero_points: FloatArray) -> FloatArray:
        negative = scaled < 0
        magnitude = np.abs(scaled, out=scaled)
        codes = np.zeros_like(magnitude)
        for bound in _BETWEEN:
            codes += magnitude > bound
        codes[negative & (codes > 0)] += SIGN
        return codes

    def values(self, codes: AnyArray, zero_points: AnyArray | float) -> FloatArray:
        return _looked_up(VALUES, codes)

    def widened(self, weight: Coded, bits: int) -> Coded | None:
        """Both zeros become the integer 0."""
        if bits < self.integer_bits:
            return None
        integers = (2 * VALUES + (1 << (bits - 1))).astype(np.uint8)
        return weight._replace(codes=_looked_up(integers, weight.codes), scales=weight.scales * np.float32(0.5))

    def encode(self, weight: Coded) -> dict[str, AnyArray]:
        rows, lead = weight.codes.reshape(-1, weight.codes.shape[-1]), weight.codes.shape[:-1]
        return {"weight_packed": pack(rows).reshape(*lead, -1), "weight_scale": encode_scales(weight.scales)}

    def decode(self, tensors: Tensors) -> Coded:
        packed: CodeArray = tensors["weight_packed"]
        codes = unpack(packed.reshape(-1, packed.shape[-1])).reshape(*packed.shape[:-1], -1)
        return Coded(codes, decode_scales(tensors["weight_scale"]), None)

    def encode_bytes(self, weight: Coded) -> dict[str, AnyArray]:
        return super().encode_bytes(weight) | {"weight_scale": encode_scales(weight.scales)}

    def decode_bytes(self, tensors: Tensors) -> Coded:
        return super().decode_bytes(tensors)._replace(scales=decode_scales(tensors["weight_scale"]))

    def numbers(self, grouping: Grouping) -> dict[str, Any]:
        return super().numbers(grouping) | {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}


def _looked_up(table: AnyArray, codes: AnyArray) -> AnyArray:
    """``table[codes]`` of codes in any type and shape."""
    flat, found = codes.reshape(-1), np.empty(codes.size, table.dtype)
    for start in range(0, len(flat), AT_ONCE):
        found[start : start + AT_ONCE] = table[flat[start : start + AT_ONCE].astype(np.intp)]
    return found.reshape(codes.shape)


FORMAT = Mxfp4("mxfp4", 4, pack, unpack)
