"""FP8: 8-bit floats (E4M3) with a scale per output channel, and inputs on a static grid of the same floats.

E4M3 has a sign, four bits of exponent and three of mantissa, 448 as its largest number and no infinities (Micikevicius
et al. 2022, arXiv:2209.05433). ``input_scale`` is the scale of the inputs: what lies beyond 448 times it saturates.

Scales are positive and normal numbers of float16: engines that compute with these codes hold scales in 16 bits.
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
_SMALLEST_SCALE = np.float32(np.finfo(np.float16).smallest_normal)
_LARGEST_SCALE = np.float32(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Fp8(PackedCodes):
    """A code is the byte of its float, and a checkpoint holds these bytes as such: numpy has no type for them."""

    number_type: str = "float"
    layout: str = LAYOUT

    @property
    def integer_bits(self) -> int:
        return 0  # integers of so many bits hold no such floats

    def fit(self, weight: FloatArray, grouping: Grouping, shrink: float = 1.0) -> Grid:
        require_finite(weight)
        largest = np.abs(grouped(weight, grouping)).max(axis=-1)
        scales = np.where(largest == 0, np.float32(1), largest * np.float32(shrink) / e4m3.LARGEST)
        return Grid(self.storable(scales), np.zeros_like(scales))

    def storable(self, scales: FloatArray) -> FloatArray:
        limited = np.clip(np.abs(scales), _SMALLEST_SCALE, _LARGEST_SCALE)
        return limited.astype(np.float16).astype(np.float32)

    def rounded(self, scaled: FloatArray, zero_points: FloatArray) -> FloatArray:
        return e4m3.encoded(scaled).astype(np.float32)

    def values(self, codes: AnyArray, zero_points: AnyArray | float) -> FloatArray:
        return e4m3.decoded(codes)

    def widened(self, weight: Coded, bits: int) -> Coded | None:
        return None

    def encode(self, weight: Coded) -> dict[str, AnyArray]:
        return self.encode_bytes(weight) | {"input_scale": np.array([weight.input_scale], np.float32)}

    def decode(self, tensors: Tensors) -> Coded:
        step = float(tensors["input_scale"].reshape(-1)[0])
        return self.decode_bytes(tensors)._replace(input_scale=step)

    def encode_bytes(self, weight: Coded) -> dict[str, AnyArray]:
        return {"weight": weight.codes, "weight_scale": stored_scales(weight.scales)}

    def decode_bytes(self, tensors: Tensors) -> Coded:
        return Coded(tensors["weight"], tensors["weight_scale"].astype(np.float32), None)

    def arguments(self, grouping: Grouping) -> dict[str, Any]:
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
        return {"weights": self.numbers(grouping) | {"strategy": "channel"}, "input_activations": inputs}


FORMAT = Fp8("fp8", 8, same, same, activations="fp8", grouped=False)
