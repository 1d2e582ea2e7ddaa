"""What an export keeps whole: one module or folder for each operator, found by listing this folder.

Everything else of a model is standard operators. An operator of ours is an ONNX function, whose body says in standard
operators what it computes: any runtime runs it, the tests of kernels and passes compare with it, and each target lowers
the one node in its own way. A module sets ``OPERATOR`` (:class:`tapeout.operators.operator.Operator`).
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

    from tapeout.operators.operator import Operator

DOMAIN = "tapeout"  # of their nodes
CONTRACT = "operator"  # the one module here that is none


@cache
def operators() -> dict[str, Operator]:
    """By the name that a node has as its type."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name != CONTRACT]
    found = [import_module(f"{__name__}.{name}").OPERATOR for name in names]
    return {operator.name: operator for operator in found}


def operator_of(node: ir.Node | None) -> Operator | None:
    """The operator that a node of a portable graph is; None for standard ones and for no node."""
    return operators().get(node.op_type) if node is not None and node.domain == DOMAIN else None
