"""How each target computes weights of each kind of scheme. Passes read their part of it; a new kind is a new row.

A target decodes what it has no kernel for, and says so. A :class:`Refusal` says why a target cannot take a kind at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.errors import BuildError
from tapeout.schemes import Refusal, Scheme


@dataclass(frozen=True)
class Linears:
    """``passes``: modules of ``engines/passes``; the first that runs here takes a linear.

    On ort-cpu, group-quantized codes are ``native_bits`` wide in kernels of our own (BlockLinear, BlockGather) and
    ``stock_bits`` in ONNX Runtime's own operators. Codes of fewer bits are widened: the same weights, in more bytes.
    """

    passes: tuple[str, ...]
    native_bits: int = 0
    stock_bits: int = 0
    embedding: Refusal | None = None  # why it cannot be an embedding


def _blocks(native_bits: int, stock_bits: int) -> Linears:
    return Linears(("block_linears", "linear_kernels"), native_bits, stock_bits)


_GATHERED = Refusal("int8-static", "an embedding is gathered; it has no input to round")


def _row(ort_cpu: Linears | Refusal, tensorrt: Linears | Refusal) -> dict[str, Linears | Refusal]:
    return {"ort-cpu": ort_cpu, "tensorrt": tensorrt, "tensorrt-rtx": tensorrt}


_DECODED = Linears(("float_linears",))
LOWERINGS = {
    "float": _row(Linears(("linear_kernels",)), _DECODED),
    "int4": _row(_blocks(4, 4), Linears(("int4_linears", "float_linears"))),
    "int6": _row(_blocks(6, 8), _DECODED),
    "int8": _row(_blocks(8, 8), _DECODED),
    "int8-static": _row(
        Linears(("static_int8_linears",), embedding=_GATHERED), Linears(("float_linears",), embedding=_GATHERED)
    ),
}


def lowering_of(scheme: Scheme, target: str) -> Linears:
    """:class:`BuildError` where the target refuses the kind."""
    found = LOWERINGS[scheme.kind][target]
    if isinstance(found, Refusal):
        raise BuildError(
            f"{target} takes no weights in {scheme.name}: {found.reason}",
            expected="a scheme that the target has",
            remedy="choose another in plan.schemes, or another target",
        )
    return found
