"""What an export keeps whole: one module or folder for each operator, found by listing this folder.

Everything else of a model is standard operators. An operator of ours is an ONNX function, whose body says in standard
operators what it computes: any runtime runs it, the tests of kernels and passes compare with it, and each target lowers
the one node in its own way. A module sets ``OPERATOR`` (:class:`tapeout.operators.operator.Operator`).

The state of a node are inputs and outputs of the graph, named after its decoder layer: ``past_key_values.LAYER.NAME``
and ``present.LAYER.NAME``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from tapeout.state import Recurrent

if TYPE_CHECKING:
    import onnx_ir as ir

    from tapeout.operators.operator import Operator, StateBefore, StateChange, StateKept, StateLeft
    from tapeout.state import LayerState

DOMAIN = "tapeout"  # of their nodes
PAST, PRESENT = "past_key_values", "present"  # before the layer, in the name of an input and an output of the graph
HELPERS = ("operator", "hub_functions", "recurrent")  # modules here that are none


class OperatorNode(NamedTuple):
    operator: Operator
    node: ir.Node
    layer: int

    def state(self, dtype: str, recurrences: str = "float32") -> LayerState | None:
        """``recurrences``: how the state of those is kept that have rates: that of others is small, and stays float."""
        state = self.operator.state(self.node, self.layer, dtype)
        return state.kept_in(recurrences) if isinstance(state, Recurrent) and self.operator.rates else state


@cache
def operators() -> dict[str, Operator]:
    """By the name that a node has as its type."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name not in HELPERS]
    found = [import_module(f"{__name__}.{name}").OPERATOR for name in names]
    return {operator.name: operator for operator in found}


def operator_of(node: ir.Node | None) -> Operator | None:
    """The operator that a node of a portable graph is; None for standard ones and for no node."""
    return operators().get(node.op_type) if node is not None and node.domain == DOMAIN else None


def rate_in(name: str) -> str:
    """What rates are called, where a group's name or a pattern of names says it; else empty.

    Groups of rates are linears that only say how fast a recurrence decays and takes in tokens.

    >>> rate_in("layers.0.delta_rates"), rate_in("layers.0.delta_rates.f_b_proj"), rate_in("layers.0.qkv")
    ('delta_rates', 'delta_rates', '')
    """
    return next((each.rates for each in operators().values() if each.rates and each.rates in name), "")


def operator_nodes(nodes: Iterable[ir.Node]) -> list[OperatorNode]:
    """Of a portable graph, in its order."""
    found = ((operator, node) for node in nodes if (operator := operator_of(node)))
    return [OperatorNode(operator, node, layer_of_node(node)) for operator, node in found]


def layer_of_node(node: ir.Node) -> int:
    """The decoder layer of a node that keeps state, by the names of its inputs; -1 for one that keeps none."""
    names = [value.name or "" for value in node.inputs if value is not None]
    return next((int(name.split(".")[1]) for name in names if name.startswith(f"{PAST}.")), -1)


def graph_state(nodes: Iterable[ir.Node], dtype: str, recurrences: str = "float32") -> tuple[LayerState, ...]:
    """What the operators of a portable graph keep, in its order. ``dtype``: of a cache of keys and values;
    ``recurrences``: see :meth:`OperatorNode.state`.
    """
    found = (each.state(dtype, recurrences) for each in operator_nodes(nodes))
    return tuple(state for state in found if state is not None)


@contextmanager
def state_changed(model: Any, change: StateChange) -> Generator[None]:
    """See :meth:`tapeout.operators.operator.Operator.changed`, of all operators."""
    with ExitStack() as stack:
        for operator in operators().values():
            stack.enter_context(operator.changed(model, change))
        yield


@contextmanager
def state_resumed(model: Any, before: StateBefore) -> Generator[None]:
    """See :meth:`tapeout.operators.operator.Operator.resumed`, of all operators."""
    with ExitStack() as stack:
        for operator in operators().values():
            stack.enter_context(operator.resumed(model, before))
        yield


@contextmanager
def state_left(model: Any, left: StateLeft) -> Generator[None]:
    """See :meth:`tapeout.operators.operator.Operator.leaving`, of all operators."""
    with ExitStack() as stack:
        for operator in operators().values():
            stack.enter_context(operator.leaving(model, left))
        yield


@contextmanager
def computed_by_token(model: Any, kept: StateKept | None = None) -> Generator[None]:
    """See :meth:`tapeout.operators.operator.Operator.by_token`, of all operators."""
    with ExitStack() as stack:
        for operator in operators().values():
            stack.enter_context(operator.by_token(model, kept))
        yield
