"""FP8 with dynamic inputs: weights in E4M3 with one scale per output channel, inputs in E4M3 with one scale per token.

What llm-compressor calls FP8_DYNAMIC. A kernel rounds the inputs, each token by its own largest number, so nothing of
them is in the checkpoint; engines without such kernels decode the weights and leave inputs in float.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tapeout import e4m3
from tapeout.formats.int8 import same
from tapeout.number_format import (
    AnyArray,
    Coded,
    FloatArray,
    Grid,
    Grouping,
    Tensors,
    grouped,
    require_finite,
    stored_scales,
)
from tapeout.packed_codes import PackedCodes

LAYOUT = "fp8-quantized"
_SMALLEST_SCALE = np.float32(1e-33)  # see tapeout/integers.py


@dataclass(frozen=True)
class Fp8Dynamic(PackedCodes):
    """A code is the byte of its float, and a checkpoint holds these bytes as such: numpy has no type for them."""

    number_type: str = "float"
    grouped: bool = False
    layout: str = LAYOUT
    integer_bits: int = 0  # integers of 8 bits hold no such floats

    def fit(self, weight: FloatArray, grouping: Grouping, shrink: float = 1.0) -> Grid:
        """Channels that are too small to have a scale decode to zero, too."""
        require_finite(weight)
        scales = np.abs(grouped(weight, grouping)).max(axis=-1) * np.float32(shrink) / e4m3.LARGEST
        scales = np.where(scales < _SMALLEST_SCALE, np.float32(1), scales)
        return Grid(self.storable(scales), np.zeros_like(scales))

    def rounded(self, scaled: FloatArray, zero_points: FloatArray) -> FloatArray:
        return e4m3.encoded(scaled).astype(np.float32)

    def values(self, codes: AnyArray, zero_points: AnyArray | float) -> FloatArray:
        return e4m3.decoded(codes)

    def widened(self, weight: Coded, bits: int) -> Coded | None:
        return None

    def encode(self, weight: Coded) -> dict[str, AnyArray]:
        return self.encode_bytes(weight)

    def decode(self, tensors: Tensors) -> Coded:
        return self.decode_bytes(tensors)

    def encode_bytes(self, weight: Coded) -> dict[str, AnyArray]:
        return {"weight": weight.codes, "weight_scale": stored_scales(weight.scales)}

    def decode_bytes(self, tensors: Tensors) -> Coded:
        return Coded(tensors["weight"], tensors["weight_scale"].astype(np.float32), None)

    def arguments(self, grouping: Grouping) -> dict[str, Any]:
        return {"weights": self.numbers(grouping) | {"strategy": "channel"}}


FORMAT = Fp8Dynamic("fp8-dynamic", 8, same, same)
