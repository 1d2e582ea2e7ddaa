"""The set of kernels for processors, as passes see it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.kernels.cpu import Level, unsupported
from engines.kernels.cpu.packing import STEP, TILE, by_tile, joined_steps, packed, tiles_of
from engines.kernels.kernel_set import AttentionPart, half_where_exact
from engines.kernels.operators import OPERATORS
from tapeout.fingerprint import cpu_features
from tapeout.formats.mxfp4 import FORMAT, encode_scales
from tapeout.number_format import FloatArray
from tapeout.quantized import QuantizedWeight, format_of
from tapeout.schemes import Scheme

CODE_BITS = (4, 5, 6, 8)
E2M1 = FORMAT.name  # whose codes the kernels read as they are
SMALLEST_BLOCK = 16  # input channels
HEAD_SIZES, LARGEST_HEAD = 16, 512  # a head is a multiple of the first: the lanes of a vector
CACHES = ("float32", "int8", "int4")
EXACT_FEATURES = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


@dataclass(frozen=True)
class CpuKernels:
    """See :class:`engines.kernels.kernel_set.KernelSet`. ``level``: for these processors only; None: this machine's."""

    level: Level | None = None

    @property
    def exact_signed_products(self) -> bool:
        """False on x86 without VNNI, where uint8 · int8 adds pairs in saturating 16 bits.

        ONNX Runtime computes these products, so it is this machine's processor that counts, whatever the level.
        """
        return platform.machine() not in ("x86_64", "AMD64") or bool(EXACT_FEATURES.intersection(cpu_features()))

    def unsupported(self, operator: str) -> str:
        if operator not in OPERATORS:
            return f"native kernels have no {operator}"
        return "" if self.level else unsupported()

    def unsupported_weight(self, weight: QuantizedWeight) -> str:
        size, columns = weight.group_size, weight.codes.shape[-1]
        if not format_of(weight.scheme).integer_bits or weight.scheme.activations == "int8":
            return f"native kernels take no weights in {weight.scheme.name}"
        if size % SMALLEST_BLOCK or columns % size:
            return (
                f"groups of {size} of {columns} input channels, where native kernels take multiples of {SMALLEST_BLOCK}"
            )
        return ""

    def unsupported_float(self, columns: int) -> str:
        return "it is not quantized"

    def unsupported_cache(self, dtype: str, head_size: int) -> str:
        if dtype not in CACHES:
            return f"a KV cache in {dtype}, where there are kernels for {' and '.join(CACHES)}"
        if head_size % HEAD_SIZES or head_size > LARGEST_HEAD:
            return f"heads of {head_size} channels, where kernels take multiples of {HEAD_SIZES} up to {LARGEST_HEAD}"
        return ""

    def unsupported_in_attention(self, part: AttentionPart) -> str:
        return ""

    def code_bits(self, weight: QuantizedWeight) -> int:
        """5-bit codes lie together in eight steps: in groups without whole ones they are stored in 6 bits."""
        if weight.scheme.format == E2M1:
            return weight.scheme.bits
        bits = min(known for known in CODE_BITS if known >= format_of(weight.scheme).integer_bits)
        return bits if weight.group_size % (STEP * joined_steps(bits)) == 0 else 6

    def stored_scales(self, scales: FloatArray, scheme: Scheme) -> NDArray[Any]:
        """Kernels multiply twice the elements of E2M1, which are integers, with half the scale."""
        return encode_scales(scales * np.float32(0.5)) if scheme.format == E2M1 else half_where_exact(scales)

    def codes_shape(self, outputs: int, columns: int, bits: int) -> tuple[int, int]:
        return tiles_of(outputs), TILE * columns * bits // 8

    def pack_codes(self, codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
        return packed(codes, bits)

    def pack_scales(self, values: NDArray[Any]) -> NDArray[Any]:
        return by_tile(values)
