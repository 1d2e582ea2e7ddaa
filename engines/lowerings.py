"""How each backend's passes compute weights of each number format. Passes read their entry.

A target has a backend if it runs its passes. A backend decodes what it has no kernel for, so it takes every format: a
new one needs no entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.formats import formats
from tapeout.number_format import NumberFormat
from tapeout.schemes import Scheme

STOCK_BITS = (4, 8)  # of integers in ONNX Runtime's own operators
GATHERED = "an embedding is gathered; it has no input to round"


@dataclass(frozen=True)
class Linears:
    """``passes``: modules of the backend in ``engines/passes``; the first that runs here takes a linear.

    Group-quantized codes are ``stock_bits`` wide in ONNX Runtime's own operators; 0: decoded. Codes that are no
    integers of so many bits are widened: the same weights, in more bytes. The target's kernels have bits of their own
    (``engines/kernels/kernel_set.py``).
    """

    passes: tuple[str, ...]
    stock_bits: int = 0
    embedding: str = ""  # why it cannot be an embedding


def lowering_of(scheme: Scheme, backend: str) -> Linears:
    """``backend``: cuda, onnxruntime, onnxruntime-cuda or tensorrt."""
    found = formats()[scheme.format]
    static = GATHERED if scheme.activations != "float" else ""
    if backend == "tensorrt":
        own = (f"{scheme.format}_linears",) if scheme.format in ("int4", "fp8") else ()
        return Linears((*own, "float_linears"), embedding=static)
    if backend == "cuda":
        return Linears(("block_linears",), embedding=static)
    if scheme.activations == "int8" and backend == "onnxruntime":
        return Linears(("static_int8_linears",), embedding=static)
    least = found.integer_bits if isinstance(found, NumberFormat) else 0
    stock = min((bits for bits in STOCK_BITS if bits >= least), default=0) if least else 0
    if backend == "onnxruntime-cuda":
        return Linears(("nbits_linears",), stock, embedding=static)
    if not stock:
        return Linears(("linear_kernels",))
    return Linears(("block_linears", "linear_kernels"), stock)
