"""The set of kernels for GPUs, as passes see it. It is the same for every architecture, and for fibers on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.kernels.cuda.packing import by_row_pair, chunks_of, packed, tiles_of
from engines.kernels.kernel_set import AttentionPart, half_where_exact
from tapeout.number_format import FloatArray
from tapeout.quantized import QuantizedWeight, format_of, is_e4m3
from tapeout.schemes import Scheme

CODE_BITS = (4, 5, 6, 8)
SMALLEST_BLOCK = SPAN = 32  # input channels: two mma of 16 are summed before they are scaled
CACHES = ("float16", "int8", "fp8")
HEAD_SIZES = (64, 128, 256)
COMPUTED = frozenset(
    (
        *("BlockLinear", "GatedLinear", "NormLinear", "ResidualNormLinear", "HeadLinear"),
        *("BlockGather", "CachedAttention", "NormRows"),
    )
)


@dataclass(frozen=True)
class CudaKernels:
    """See :class:`engines.kernels.kernel_set.KernelSet`."""

    @property
    def exact_signed_products(self) -> bool:
        """No linear here has activations in int8."""
        return True

    def unsupported(self, operator: str) -> str:
        return "" if operator in COMPUTED else f"CUDA kernels have no {operator}"

    def unsupported_weight(self, weight: QuantizedWeight) -> str:
        size, columns = weight.group_size, weight.codes.shape[-1]
        if is_e4m3(weight.scheme):
            return self.unsupported_float(columns)
        if not format_of(weight.scheme).integer_bits or weight.scheme.activations == "int8":
            return f"CUDA kernels take no weights in {weight.scheme.name}"
        if size < SMALLEST_BLOCK or size & (size - 1) or columns % size:
            return (
                f"groups of {size} of {columns} input channels, where CUDA kernels take powers of two "
                f"from {SMALLEST_BLOCK} on"
            )
        return ""

    def unsupported_float(self, columns: int) -> str:
        return "" if columns % SPAN == 0 else f"{columns} input channels, where CUDA kernels take multiples of {SPAN}"

    def unsupported_cache(self, dtype: str, head_size: int) -> str:
        if dtype not in CACHES:
            return f"a KV cache in {dtype}, where there are kernels for {' and '.join(CACHES)}"
        if head_size not in HEAD_SIZES:
            return f"heads of {head_size} channels, where kernels take {', '.join(map(str, HEAD_SIZES))}"
        return ""

    def unsupported_in_attention(self, part: AttentionPart) -> str:
        return "" if part == "head norms" else f"attention of the CUDA kernels has no {part}"

    def code_bits(self, weight: QuantizedWeight) -> int:
        if is_e4m3(weight.scheme):
            return 8
        return min(known for known in CODE_BITS if known >= format_of(weight.scheme).integer_bits)

    def stored_scales(self, scales: FloatArray, scheme: Scheme) -> NDArray[Any]:
        return half_where_exact(scales)

    def codes_shape(self, outputs: int, columns: int, bits: int) -> tuple[int, int]:
        return tiles_of(outputs), chunks_of(columns) * 128 * bits

    def pack_codes(self, codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
        return packed(codes, bits)

    def pack_scales(self, values: NDArray[Any]) -> NDArray[Any]:
        return by_row_pair(values)
