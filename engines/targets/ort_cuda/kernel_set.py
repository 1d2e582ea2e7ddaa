"""What the passes that ``ort-cuda`` shares with ``ort-cpu`` may use: attention, and no kernel of our own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.kernels.kernel_set import AttentionPart
from tapeout.number_format import FloatArray
from tapeout.quantized import QuantizedWeight
from tapeout.schemes import Scheme

CACHES = ("float16", "int8")
NONE = "ONNX Runtime's CUDA provider has operators of its own"


class ProviderOperators:
    """See :class:`engines.kernels.kernel_set.KernelSet`.

    ``CachedAttention`` stands for the provider's PagedAttention, which takes its place (``paged_attention``).
    """

    @property
    def exact_signed_products(self) -> bool:
        """No linear here has activations in int8."""
        return True

    def unsupported(self, operator: str) -> str:
        return "" if operator == "CachedAttention" else NONE

    def unsupported_weight(self, weight: QuantizedWeight) -> str:
        return NONE

    def unsupported_float(self, columns: int) -> str:
        return "it is not quantized"

    def unsupported_cache(self, dtype: str, head_size: int) -> str:
        if dtype not in CACHES:
            return f"a KV cache in {dtype}, where ort-cuda has float16 and int8"
        if head_size % 8 or head_size > 256:
            return f"heads of {head_size} channels, where PagedAttention takes multiples of 8 up to 256"
        return ""

    def unsupported_in_attention(self, part: AttentionPart) -> str:
        return "" if part == "head norms" else f"PagedAttention is given no {part}"

    def code_bits(self, weight: QuantizedWeight) -> int:
        raise NotImplementedError(NONE)

    def stored_scales(self, scales: FloatArray, scheme: Scheme) -> NDArray[Any]:
        raise NotImplementedError(NONE)

    def codes_shape(self, outputs: int, columns: int, bits: int) -> tuple[int, ...]:
        raise NotImplementedError(NONE)

    def pack_codes(self, codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
        raise NotImplementedError(NONE)

    def pack_scales(self, values: NDArray[Any]) -> NDArray[Any]:
        raise NotImplementedError(NONE)
