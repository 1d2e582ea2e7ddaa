"""Experts of a portable graph as several nodes of some experts each, so that memory holds a part of a layer's weights.

    Experts(x, index, ..)   ->   Experts(x, index - first, ..) of each part, and their sum

A node counts its experts from 0 and finds no token for numbers that it does not have. Parts of weights are values of
the graph of their own. Sums over the experts of a token are added in another order.

E  experts
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tapeout.operators import DOMAIN
from tapeout.operators.experts import DOWN_INPUT, NAME, UP_INPUT, is_experts
from tapeout.portable_model import read_float32

INDEX_INPUT = 1


@dataclass(frozen=True)
class StoredRows:
    """A parameter in its file, or what it has from ``begin`` up to ``end`` along its first axis: some experts."""

    tensor: ir.ExternalTensor
    begin: int = 0
    end: int | None = None

    @property
    def size(self) -> int:
        """Elements."""
        first = self.tensor.shape.numpy()[0] if self.end is not None else 1
        return self.tensor.size // first * ((self.end or first) - self.begin)

    def read(self) -> NDArray[np.float32]:
        return read_float32(self.tensor, None if self.end is None else slice(self.begin, self.end))


def cut_experts(model: ir.Model, limit: int) -> dict[ir.Value, StoredRows]:
    """Cut each node of experts whose weights take more than ``limit`` bytes in float32. The parts of their weights.

    What is no parameter, or a transposed one, is left as it is.
    """
    parts: dict[ir.Value, StoredRows] = {}
    for node in [node for node in model.graph if is_experts(node)]:
        weights = [_parameter(node.inputs[number]) for number in (UP_INPUT, DOWN_INPUT)]
        values = [weight.const_value for weight in weights if weight is not None]
        tensors = [tensor for tensor in values if isinstance(tensor, ir.ExternalTensor)]
        if len(tensors) < len(weights):
            continue
        experts, size = tensors[0].shape.numpy()[0], sum(4 * tensor.size for tensor in tensors)
        count = min(experts, -(-size // limit))
        if count > 1:
            _cut(model.graph, node, [experts * part // count for part in range(count + 1)], parts)
    return parts


def _cut(graph: ir.Graph, node: ir.Node, bounds: list[int], parts: dict[ir.Value, StoredRows]) -> None:
    output, added = node.outputs[0], list[ir.Node]()
    total: ir.Value | None = None

    def add(op_type: str, inputs: list[ir.Value | None], like: ir.Value, **more: object) -> ir.Value:
        made = ir.node(op_type, inputs, **more)  # pyright: ignore[reportArgumentType]
        made.outputs[0].name = f"{output.name}.{len(added)}"
        made.outputs[0].type, made.outputs[0].shape = like.type, like.shape
        added.append(made)
        return made.outputs[0]

    def part_of(value: ir.Value | None, begin: int, end: int) -> ir.Value | None:
        if value is None or value.shape is None or value.shape[0] != bounds[-1]:
            return value  # no bias: one zero for all experts
        shape = ir.Shape([end - begin, *value.shape[1:]])
        if (producer := value.producer()) is not None:
            whole = part_of(producer.inputs[0], begin, end)
            like = ir.Value(shape=shape, type=value.type)
            return add(producer.op_type, [whole], like, attributes=dict(producer.attributes))
        found = ir.Value(name=f"{value.name}[{begin}:{end}]", shape=shape, type=value.type)
        assert isinstance(value.const_value, ir.ExternalTensor)
        parts[found] = StoredRows(value.const_value, begin, end)
        return found

    index = node.inputs[INDEX_INPUT]
    assert index is not None
    for begin, end in pairwise(bounds):
        name = f"{output.name}.first.{begin}"
        first = ir.Value(name=name, const_value=ir.tensor(np.array(begin, np.int64), name=name))
        first.shape, first.type = ir.Shape([]), ir.TensorType(ir.DataType.INT64)
        graph.initializers[name] = first
        inputs: list[ir.Value | None] = [*node.inputs[:UP_INPUT]]
        inputs[INDEX_INPUT] = add("Sub", [index, first], index)
        inputs += [part_of(value, begin, end) for value in node.inputs[UP_INPUT:]]
        here = add(NAME, inputs, output, attributes=dict(node.attributes), domain=DOMAIN)
        total = here if total is None else add("Add", [total, here], output)
    graph.insert_before(node, added)
    assert total is not None
    behind = [value.producer() for value in node.inputs[UP_INPUT:] if value is not None]
    output.name, total.name = f"{output.name}.whole", output.name
    ir.convenience.replace_all_uses_with(output, total, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    for producer in behind:
        if producer is not None and not producer.outputs[0].uses():
            graph.remove(producer, safe=True)


def _parameter(value: ir.Value | None) -> ir.Value | None:
    """The parameter that a value is, or is the transpose of."""
    producer = None if value is None else value.producer()
    if producer is None:
        return value
    keeps_experts = producer.op_type == "Transpose" and producer.attributes["perm"].as_ints()[0] == 0
    return producer.inputs[0] if keeps_experts else None
