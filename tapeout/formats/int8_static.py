"""8-bit weights with one scale per output channel, and inputs on a static int8 grid: a byte per code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tapeout.formats.int8 import same
from tapeout.integers import Integers
from tapeout.number_format import AnyArray, Coded, Grouping, Tensors
from tapeout.packed_codes import BYTES


@dataclass(frozen=True)
class StaticInt8(Integers):
    """``input_scale`` is the step of the symmetric grid of the inputs, float32 ``[1]``."""

    @property
    def integer_bits(self) -> int:
        return 0  # the grid of its inputs is a part of it

    def widened(self, weight: Coded, bits: int) -> Coded | None:
        return None

    def encode(self, weight: Coded) -> dict[str, AnyArray]:
        return self.encode_bytes(weight) | {"input_scale": np.array([weight.input_scale], np.float32)}

    def decode(self, tensors: Tensors) -> Coded:
        step = float(tensors["input_scale"].reshape(-1)[0])
        return self.decode_bytes(tensors)._replace(input_scale=step)

    def arguments(self, grouping: Grouping) -> dict[str, Any]:
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
        return {"weights": self.numbers(grouping) | {"strategy": "channel"}, "input_activations": inputs}


FORMAT = StaticInt8("int8-static", 8, same, same, activations="int8", grouped=False, layout=BYTES)
