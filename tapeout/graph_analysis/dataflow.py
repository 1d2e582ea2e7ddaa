"""Where the values of a graph come from, and what reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

from tapeout.graph_analysis.linears import Linear
from tapeout.operators import operator_of

NORMS = ("RMSNormalization", "LayerNormalization")


def is_operator(node: ir.Node | None) -> bool:
    """Whether a node is an operator of ours (``tapeout/operators``)."""
    return operator_of(node) is not None


def first_reached(value: ir.Value, found: Callable[[ir.Node], bool], dependent: Dependent) -> ir.Node | None:
    """A node for which ``found`` holds and that follows ``value`` with no matmul, operator or residual sum between."""
    return next((node for node, _ in ahead_of(value, dependent) if found(node)), None)


def ahead_of(value: ir.Value, dependent: Dependent) -> Iterator[tuple[ir.Node, int]]:
    """What reads ``value``, and what is computed from it up to the next matmul, operator or residual sum; and as which
    input.
    """
    seen: set[int] = set()
    stack = [value]
    while stack:
        for node, number in stack.pop().uses():
            yield node, number
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node.op_type in ("MatMul", "Gemm") or is_operator(node) or dependent.is_residual_sum(node):
                continue
            stack.extend(node.outputs)


class Dependent:
    """Which values of a graph depend on the tokens, and which on their positions alone."""

    def __init__(self, graph: ir.Graph) -> None:
        inputs = {value.name: value for value in graph.inputs}
        self.on_tokens = _dependent(inputs.get("input_ids"))
        self.on_positions = _dependent(inputs.get("position_ids")) - self.on_tokens

    def is_residual_sum(self, node: ir.Node) -> bool:
        """A sum of two values that depend on the tokens, but not the ``x·cos + rotate(x)·sin`` of a rotary embedding.

        Only a rotary embedding multiplies both sides by values of the positions alone. A bias, an epsilon or a table
        of positions does not depend on the tokens. A scaled residual does, whatever it is multiplied by.
        """
        return (
            node.op_type == "Add"
            and all(id(value) in self.on_tokens for value in node.inputs)
            and not all(self._is_turned(value) for value in node.inputs)
        )

    def _is_turned(self, value: ir.Value | None) -> bool:
        producer = value.producer() if value is not None else None
        return (
            producer is not None
            and producer.op_type == "Mul"
            and any(id(factor) in self.on_positions for factor in producer.inputs)
        )


def _dependent(value: ir.Value | None) -> set[int]:
    """The ids of ``value`` and of all that is computed from it."""
    seen: set[int] = set()
    stack = [value] if value is not None else []
    while stack:
        current = stack.pop()
        if id(current) not in seen:
            seen.add(id(current))
            stack.extend(output for node, _ in current.uses() for output in node.outputs)
    return seen


def input_sources(value: ir.Value, by_output: dict[int, Linear]) -> Iterator[Linear | ir.Node | None]:
    """Where a linear's input comes from: linears, operators, or None for the embedding or the residual stream."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        linear = by_output.get(id(current))
        if linear is not None:
            yield linear
            continue
        node = current.producer()
        if is_operator(node):
            assert node is not None
            yield node
        elif node is None or node.op_type == "Gather":
            if not current.is_initializer():
                yield None
        else:
            stack.extend(i for i in data_inputs(node) if not i.is_initializer())


def data_inputs(node: ir.Node) -> Iterable[ir.Value]:
    """The inputs that carry activations: not shapes, axes or rotary tables."""
    first_only = ("Reshape", "Transpose", "Slice", "Split", "RotaryEmbedding", "Unsqueeze", "Squeeze", *NORMS)
    inputs = node.inputs[:1] if node.op_type in first_only else node.inputs
    return [value for value in inputs if value is not None]


def along_channels(split: ir.Node) -> bool:
    """Whether a Split cuts the last axis, which is that of channels between linears."""
    axis, value = split.attributes.get("axis"), split.inputs[0]
    rank = len(value.shape) if value is not None and value.shape is not None else 0
    return axis is not None and axis.as_int() in (-1, rank - 1)
