"""8-bit weights with one scale per output channel, and inputs on a static int8 grid: a byte per code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quantization.formats import BYTES, AnyArray, Tensors, decode_bytes, encode_bytes, integers
from quantization.rounding import FloatArray, QuantizedLinear, round_to_nearest
from tapeout.schemes import Scheme

SOME_STEP = 1 / 32  # of the inputs, where no calibration tells one


@dataclass(frozen=True)
class StaticInt8:
    """``input_scale`` is the step of the symmetric grid of the inputs, float32 ``[1]``."""

    kind: str = "int8-static"
    layout: str = BYTES

    def nearest(self, weight: FloatArray, scheme: Scheme) -> QuantizedLinear:
        return replace(round_to_nearest(weight, scheme), input_scale=SOME_STEP)

    def encode(self, linear: QuantizedLinear) -> dict[str, AnyArray]:
        return encode_bytes(linear) | {"input_scale": np.array([linear.input_scale], np.float32)}

    def decode(self, tensors: Tensors, scheme: Scheme) -> QuantizedLinear:
        step = float(tensors["input_scale"].reshape(-1)[0])
        return replace(decode_bytes(tensors, scheme), input_scale=step)

    def arguments(self, scheme: Scheme) -> dict[str, Any]:
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
        return {"weights": integers(scheme) | {"strategy": "channel"}, "input_activations": inputs}


FORMAT = StaticInt8()
