"""How each family of passes computes weights of each kind of scheme. Passes read their row; a new kind is a new row.

A target has a family if it runs its passes. A family decodes what it has no kernel for. A :class:`Refusal` says why a
family cannot take a kind at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.errors import BuildError
from tapeout.schemes import Refusal, Scheme


@dataclass(frozen=True)
class Linears:
    """``passes``: modules of ``engines/passes``; the first that runs here takes a linear.

    For ONNX Runtime, group-quantized codes are ``native_bits`` wide in native kernels (BlockLinear, BlockGather) and
    ``stock_bits`` in ONNX Runtime's own operators. Codes of fewer bits are widened: the same weights, in more bytes. So
    are codes whose groups native kernels do not take in these bits (``block_linears.native_bits``).
    """

    passes: tuple[str, ...]
    native_bits: int = 0
    stock_bits: int = 0
    embedding: Refusal | None = None  # why it cannot be an embedding


def _blocks(native_bits: int, stock_bits: int) -> Linears:
    return Linears(("block_linears", "linear_kernels"), native_bits, stock_bits)


_GATHERED = Refusal("int8-static", "an embedding is gathered; it has no input to round")


def _row(onnxruntime: Linears | Refusal, tensorrt: Linears | Refusal) -> dict[str, Linears | Refusal]:
    return {"onnxruntime": onnxruntime, "tensorrt": tensorrt}


_DECODED = Linears(("float_linears",))
LOWERINGS = {
    "float": _row(Linears(("linear_kernels",)), _DECODED),
    "int4": _row(_blocks(4, 4), Linears(("int4_linears", "float_linears"))),
    "int5": _row(_blocks(5, 8), _DECODED),
    "int6": _row(_blocks(6, 8), _DECODED),
    "int8": _row(_blocks(8, 8), _DECODED),
    "int8-static": _row(
        Linears(("static_int8_linears",), embedding=_GATHERED), Linears(("float_linears",), embedding=_GATHERED)
    ),
}


def lowering_of(scheme: Scheme, family: str) -> Linears:
    """:class:`BuildError` where the passes of this family refuse the kind."""
    found = LOWERINGS[scheme.kind][family]
    if isinstance(found, Refusal):
        raise BuildError(
            f"passes for {family} take no weights in {scheme.name}: {found.reason}",
            expected="a scheme that they have",
            remedy="choose another in plan.schemes, or another target",
        )
    return found
