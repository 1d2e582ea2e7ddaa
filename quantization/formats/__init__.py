"""How a checkpoint holds the weights of each kind of scheme: one module per kind, found by listing this folder.

A module sets ``FORMAT``. Two layouts of compressed-tensors are enough for integers: :class:`Packed` words
(``pack-quantized``) and a :class:`Bytes` per code (``int-quantized``); a module adds what is its own.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantization.rounding import CodeArray, FloatArray, QuantizedLinear, fits_half, round_to_nearest
from tapeout.errors import QuantizationError
from tapeout.schemes import FLOAT, Refusal, Scheme

AnyArray = NDArray[Any]
Tensors = Mapping[str, AnyArray]  # of one module, by the part of the name that follows the module's
PACKED, BYTES = "pack-quantized", "int-quantized"  # as config.json calls the two layouts


class Format(Protocol):
    @property
    def kind(self) -> str: ...

    @property
    def layout(self) -> str:
        """Of linears. Embeddings take a byte per code."""
        ...

    def nearest(self, weight: FloatArray, scheme: Scheme) -> QuantizedLinear:
        """A weight ``[N, K]`` by RTN."""
        ...

    def encode(self, linear: QuantizedLinear) -> dict[str, AnyArray]:
        """The stored tensors of a linear."""
        ...

    def decode(self, tensors: Tensors, scheme: Scheme) -> QuantizedLinear:
        """The inverse of ``encode``, for a scheme that was read from the tensors' shapes and ``config.json``."""
        ...

    def arguments(self, scheme: Scheme) -> dict[str, Any]:
        """What ``config_groups`` of ``config.json`` say of the scheme."""
        ...


@cache
def formats() -> dict[str, Format | Refusal]:
    """By kind."""
    found = (import_module(f"{__name__}.{module.name}").FORMAT for module in pkgutil.iter_modules(__path__))
    return {fmt.kind: fmt for fmt in found}


def format_of(scheme: Scheme) -> Format:
    """:class:`QuantizationError` for a kind whose module refuses."""
    found = formats()[scheme.kind]
    if isinstance(found, Refusal):
        raise QuantizationError(f"a quantized weight in {scheme.name}: {found.reason}", expected="a scheme with codes")
    return found


def stored_by_rtn(scheme: Scheme, weight: FloatArray) -> QuantizedLinear | FloatArray:
    """A weight ``[N, K]`` as a checkpoint holds it for a fitted scheme: right in size and speed, not in quality."""
    return weight if scheme == FLOAT else format_of(scheme).nearest(weight, scheme)


@dataclass(frozen=True)
class Packed:
    """Unsigned codes in 32-bit words, with scales, the shape and, where a scheme has them, zero points packed along the
    output channels.

    ``pack`` makes bytes of 32 codes ``[R, 32 n]``, the first code in the lowest bits; ``unpack`` is its inverse.
    """

    kind: str
    bits: int
    pack: Callable[[CodeArray], CodeArray]
    unpack: Callable[[CodeArray], CodeArray]
    layout: str = PACKED

    def nearest(self, weight: FloatArray, scheme: Scheme) -> QuantizedLinear:
        return round_to_nearest(weight, scheme)

    def words(self, codes: CodeArray) -> NDArray[np.int32]:
        """``[R, C]`` codes as ``[R, ceil(C * bits / 32)]`` words."""
        columns = codes.shape[1]
        octets = self.pack(np.pad(codes, ((0, 0), (0, -columns % 32))))[:, : 4 * self.words_of(columns)]
        return np.ascontiguousarray(octets).view("<i4").astype(np.int32, copy=False)

    def words_of(self, columns: int) -> int:
        """How many words hold so many codes."""
        return -(-columns * self.bits // 32)

    def codes(self, words: NDArray[np.int32], columns: int) -> CodeArray:
        """The inverse of ``words``."""
        octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
        # Whole runs of 32 codes, which end with a byte whatever the bits.
        return self.unpack(np.pad(octets, ((0, 0), (0, -octets.shape[1] % (4 * self.bits)))))[:, :columns]

    def encode(self, linear: QuantizedLinear) -> dict[str, AnyArray]:
        parts: dict[str, AnyArray] = {
            "weight_packed": self.words(linear.codes),
            "weight_scale": stored_scales(linear.scales),
            "weight_shape": np.array(linear.codes.shape, np.int64),
        }
        if linear.zero_points is not None:
            parts["weight_zero_point"] = np.ascontiguousarray(self.words(_across(linear.zero_points)).T)
        return parts

    def decode(self, tensors: Tensors, scheme: Scheme) -> QuantizedLinear:
        rows, columns = (int(n) for n in tensors["weight_shape"])
        zero_points = tensors.get("weight_zero_point")
        return QuantizedLinear(
            self.codes(tensors["weight_packed"], columns),
            tensors["weight_scale"].astype(np.float32),
            None if zero_points is None else _across(self.codes(_across(zero_points), rows)),
            scheme,
        )

    def arguments(self, scheme: Scheme) -> dict[str, Any]:
        return {"weights": integers(scheme) | {"strategy": "group", "group_size": scheme.group_size}}


def encode_bytes(linear: QuantizedLinear) -> dict[str, AnyArray]:
    """Symmetric codes less the midpoint, a byte each however few bits they have."""
    signed = (linear.codes.astype(np.int16) - linear.scheme.midpoint).astype(np.int8)
    return {"weight": signed, "weight_scale": stored_scales(linear.scales)}


def decode_bytes(tensors: Tensors, scheme: Scheme) -> QuantizedLinear:
    codes = tensors["weight"].astype(np.int16) + scheme.midpoint
    if codes.size and (codes.min() < 0 or codes.max() >= scheme.levels):
        raise QuantizationError(
            f"codes from {codes.min()} to {codes.max()} in bytes",
            expected=f"codes below {scheme.levels}, as {scheme.name} has",
            remedy="restore num_bits in config.json, or run `dvc repro quantize`",
        )
    codes = codes.astype(np.uint8)
    return QuantizedLinear(codes, tensors["weight_scale"].astype(np.float32), None, scheme)


def integers(scheme: Scheme) -> dict[str, Any]:
    return {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric}


def stored_scales(scales: FloatArray) -> AnyArray:
    """In float16 where that loses nothing."""
    return scales.astype(np.float16) if fits_half(scales) else scales


def _across(values: AnyArray) -> AnyArray:
    return np.ascontiguousarray(values.T)
