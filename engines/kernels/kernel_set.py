"""What a target's passes may use beside the operators of its runtime: the kernels that Tapeout brings for it.

A pass asks the set of its target (``lowering.kernels``), never the machine that it runs on: the set knows which
processors it is for. Linears and embeddings that it cannot take stay with the operators of the runtime, and the pass
says why; attention that it cannot take is refused.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tapeout.number_format import FloatArray
from tapeout.quantized import QuantizedWeight
from tapeout.schemes import Scheme

# Norms of the heads of queries and keys, rotary that turns only the first channels of a head, and queries that lie
# between gates, of each head a query and a gate of what it attends to.
AttentionPart = Literal["head norms", "partial rotary", "gates between queries"]


class KernelSet(Protocol):
    """Reasons are clauses for users, empty where there is none."""

    @property
    def exact_signed_products(self) -> bool:
        """Whether the runtime sums uint8 · int8 exactly where the kernels run; uint8 · uint8 always is."""
        ...

    def unsupported(self, operator: str) -> str:
        """Why the set has no such operator of :data:`engines.kernels.operators.OPERATORS`."""
        ...

    def unsupported_weight(self, weight: QuantizedWeight) -> str:
        """Why no linear or embedding of the set reads this weight."""
        ...

    def unsupported_float(self, columns: int) -> str:
        """Why no linear or embedding of the set reads a weight in float with so many input channels, as float16."""
        ...

    def unsupported_cache(self, dtype: str, head_size: int) -> str:
        """Why no attention of the set reads a KV cache of this dtype (:mod:`tapeout.state`) and channels a head."""
        ...

    def unsupported_in_attention(self, part: AttentionPart) -> str:
        """Why no attention of the set computes this as well; it then stays with the operators of the runtime."""
        ...

    def code_bits(self, weight: QuantizedWeight) -> int:
        """Bits in which the set stores the codes of a weight that it reads: integers, or as many as its format has."""
        ...

    def stored_scales(self, scales: FloatArray, scheme: Scheme) -> NDArray[Any]:
        """Scales ``[.., blocks]`` of codes of a scheme in the type that the set reads, without loss."""
        ...

    def codes_shape(self, outputs: int, columns: int, bits: int) -> tuple[int, ...]:
        """Of :meth:`pack_codes`."""
        ...

    def pack_codes(self, codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
        """Codes ``[N, K]`` as the kernels read them; 16 bits: values, where the set reads weights in float."""
        ...

    def pack_scales(self, values: NDArray[Any]) -> NDArray[Any]:
        """Scales or zero points ``[N, blocks]`` as the kernels read them, in their own type."""
        ...


def half_where_exact(scales: FloatArray) -> NDArray[Any]:
    """In float16 where that loses nothing, else in float32."""
    half = scales.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), scales) else scales.astype(np.float32)
