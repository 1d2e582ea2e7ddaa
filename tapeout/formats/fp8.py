"""FP8: 8-bit floats (E4M3) with a scale per output channel, and inputs on a static grid of the same floats.

E4M3 has a sign, four bits of exponent and three of mantissa, 448 as its largest number and no infinities (Micikevicius
et al. 2022, arXiv:2209.05433). ``input_scale`` is the scale of the inputs: what lies beyond 448 times it saturates.

Scales are positive and normal numbers of float16: engines that compute with these codes hold scales in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tapeout.formats.fp8_dynamic import Fp8Dynamic
from tapeout.formats.int8 import same
from tapeout.number_format import AnyArray, Coded, FloatArray, Grouping, Tensors

_SMALLEST_SCALE = np.float32(np.finfo(np.float16).smallest_normal)
_LARGEST_SCALE = np.float32(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Fp8(Fp8Dynamic):
    """Codes are those of ``fp8-dynamic``; ``input_scale`` is a part of the checkpoint, float32 ``[1]``."""

    divisible: bool = False  # a scale below the smallest that is stored would make the channel too large

    def storable(self, scales: FloatArray) -> FloatArray:
        limited = np.clip(np.abs(scales), _SMALLEST_SCALE, _LARGEST_SCALE)
        return limited.astype(np.float16).astype(np.float32)

    def encode(self, weight: Coded) -> dict[str, AnyArray]:
        return self.encode_bytes(weight) | {"input_scale": np.array([weight.input_scale], np.float32)}

    def decode(self, tensors: Tensors) -> Coded:
        step = float(tensors["input_scale"].reshape(-1)[0])
        return self.decode_bytes(tensors)._replace(input_scale=step)

    def arguments(self, grouping: Grouping) -> dict[str, Any]:
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
        return {"weights": self.numbers(grouping) | {"strategy": "channel"}, "input_activations": inputs}


FORMAT = Fp8("fp8", 8, same, same, activations="fp8")
