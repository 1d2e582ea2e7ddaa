"""Codes of a few bits in 32-bit words, as compressed-tensors packs them: what most formats have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.errors import QuantizationError
from tapeout.number_format import (
    Activations,
    AnyArray,
    CodeArray,
    Coded,
    FloatArray,
    Grid,
    Grouping,
    ScaleType,
    Tensors,
    storable,
    stored_scales,
)

PACKED, BYTES = "pack-quantized", "int-quantized"  # as config.json calls the two layouts


@dataclass(frozen=True)
class PackedCodes:
    """Unsigned codes in 32-bit words, with scales, the shape and, where there are any, zero points packed along the
    output channels. Formats add what their codes mean.

    ``pack`` makes bytes of 32 codes ``[R, 32 n]``, the first code in the lowest bits; ``unpack`` is its inverse.
    """

    name: str
    bits: int
    pack: Callable[[CodeArray], CodeArray]
    unpack: Callable[[CodeArray], CodeArray]
    number_type: str = "int"
    activations: Activations = "float"
    grouped: bool = True
    group_size: int | None = None
    scale_type: ScaleType = "float"
    affine: bool = False
    divisible: bool = True
    layout: str = PACKED
    midpoint: int = 0

    def fit(self, weight: FloatArray, grouping: Grouping, shrink: float = 1.0) -> Grid:
        raise NotImplementedError(self.name)

    def storable(self, scales: FloatArray) -> FloatArray:
        return storable(scales)

    def rounded(self, scaled: FloatArray, zero_points: FloatArray) -> FloatArray:
        raise NotImplementedError(self.name)

    def words(self, codes: CodeArray) -> NDArray[np.int32]:
        """``[..., R, C]`` codes as ``[..., R, ceil(C * bits / 32)]`` words."""
        columns = codes.shape[-1]
        rows = np.pad(codes.reshape(-1, columns), ((0, 0), (0, -columns % 32)))
        octets = np.ascontiguousarray(self.pack(rows)[:, : 4 * self.words_of(columns)])
        return octets.view("<i4").astype(np.int32, copy=False).reshape(*codes.shape[:-1], -1)

    def words_of(self, columns: int) -> int:
        """How many words hold so many codes."""
        return -(-columns * self.bits // 32)

    def codes(self, words: NDArray[np.int32], columns: int) -> CodeArray:
        """The inverse of ``words``."""
        rows = np.ascontiguousarray(words.reshape(-1, words.shape[-1]))
        octets = rows.astype("<i4", copy=False).view(np.uint8)
        # Whole runs of 32 codes, which end with a byte whatever the bits.
        codes = self.unpack(np.pad(octets, ((0, 0), (0, -octets.shape[1] % (4 * self.bits)))))[:, :columns]
        return codes.reshape(*words.shape[:-1], columns)

    def encode(self, weight: Coded) -> dict[str, AnyArray]:
        return {"weight_packed": self.words(weight.codes), **self.encode_grid(weight)}

    def encode_grid(self, weight: Coded) -> dict[str, AnyArray]:
        """The stored tensors beside the codes."""
        parts: dict[str, AnyArray] = {
            "weight_scale": stored_scales(weight.scales),
            "weight_shape": np.array(weight.codes.shape, np.int64),
        }
        if weight.zero_points is not None:
            parts["weight_zero_point"] = _across(self.words(_across(weight.zero_points)))
        return parts

    def decode(self, tensors: Tensors) -> Coded:
        columns = int(tensors["weight_shape"][-1])
        return self.on_grid(self.codes(tensors["weight_packed"], columns), tensors)

    def on_grid(self, codes: CodeArray, tensors: Tensors) -> Coded:
        """Codes with what lies beside them: the inverse of ``encode_grid``."""
        rows, zero_points = codes.shape[-2], tensors.get("weight_zero_point")
        return Coded(
            codes,
            tensors["weight_scale"].astype(np.float32),
            None if zero_points is None else _across(self.codes(_across(zero_points), rows)),
        )

    def encode_bytes(self, weight: Coded) -> dict[str, AnyArray]:
        """Codes less the midpoint, a byte each however few bits they have."""
        signed = (weight.codes.astype(np.int16) - self.midpoint).astype(np.int8)
        return {"weight": signed, "weight_scale": stored_scales(weight.scales)}

    def decode_bytes(self, tensors: Tensors) -> Coded:
        codes = tensors["weight"].astype(np.int16) + self.midpoint
        if codes.size and (codes.min() < 0 or codes.max() >= 1 << self.bits):
            raise QuantizationError(
                f"codes from {codes.min()} to {codes.max()} in bytes",
                expected=f"codes below {1 << self.bits}, as {self.name} has",
                remedy="restore num_bits in config.json, or run `dvc repro quantize`",
            )
        return Coded(codes.astype(np.uint8), tensors["weight_scale"].astype(np.float32), None)

    def numbers(self, grouping: Grouping) -> dict[str, Any]:
        return {"num_bits": self.bits, "type": self.number_type, "symmetric": grouping.symmetric}

    def arguments(self, grouping: Grouping) -> dict[str, Any]:
        return {"weights": self.numbers(grouping) | {"strategy": "group", "group_size": grouping.group_size}}


def _across(values: AnyArray) -> AnyArray:
    return np.ascontiguousarray(np.swapaxes(values, -1, -2))
