"""A linear whose output has several parts for each head gives one part of all heads after the other instead.

    Split(Reshape(Linear(x), [B, S, G, W]), of w columns)   ->   Split(Linear(x), of G·w columns)

So are queries, keys, values and gates of Qwen3-Next computed by one linear, and both rates by another. Rows of weight
and bias are read in the new order, which costs nothing, and native operators read each part where it lies. The bundle's
record has the parts, so that the parity check compares each row with that of the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import (
    Lowering,
    PassResult,
    Weights,
    attribute,
    dimension,
    new_value,
    only_use,
    remove_dead,
    sizes,
)
from engines.passes.graph.linears import biases_of, is_linear, label_of, weights_of
from tapeout.quantized import QuantizedWeight


@dataclass(frozen=True)
class _ByPart:
    """A checkpoint whose parameters of ``orders`` have their rows in these orders."""

    stored: Weights
    orders: dict[str, NDArray[np.int64]]

    def linear(self, name: str) -> QuantizedWeight | NDArray[np.float32]:
        found, order = self.stored.linear(name), self.orders.get(name)
        if order is None:
            return found
        return found.rows(order) if isinstance(found, QuantizedWeight) else found[order]

    def weight(self, name: str) -> NDArray[np.float32]:
        return self._rows(name, self.stored.weight(name))

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._rows(name, self.stored.tensor(name))

    def _rows(self, name: str, found: NDArray[np.float32]) -> NDArray[np.float32]:
        order = self.orders.get(name)
        return found if order is None else found[order]


def run(lowering: Lowering) -> PassResult:
    linears = [node for node in lowering.model.graph if is_linear(node)]
    readers = Counter(name for node in linears for name in weights_of(node))
    matched, orders, declined = 0, dict[str, NDArray[np.int64]](), list[str]()
    for node in linears:
        split = _split_of(node)
        if split is None:
            continue
        if len(weights_of(node)) > 1 or readers[weights_of(node)[0]] > 1:
            declined.append(f"{label_of(lowering, node)}: its rows cannot be put in another order")
            continue
        order = _lower(lowering.model, node, split)
        orders |= {name: order for name in (*weights_of(node), *biases_of(node)) if name}
        matched += 1
    if orders:
        lowering.weights = _ByPart(lowering.weights, orders)
    elif not declined:
        declined = ["no linear whose output has parts for each head"]
    return PassResult(matched, tuple(declined))


def _split_of(node: ir.Node) -> ir.Node | None:
    """The split of each head ``[B, S, G, W]`` into parts that are all read, if that is all that reads a linear."""
    apart = only_use(node.outputs[0])
    split = only_use(apart.outputs[0]) if apart is not None and apart.op_type == "Reshape" else None
    if apart is None or split is None or split.op_type != "Split" or len(apart.outputs[0].shape or ()) != 4:
        return None
    flat = node.outputs[0].shape
    width = dimension(apart.outputs[0], 2) * dimension(apart.outputs[0], 3)
    if flat is None or len(flat) != 3 or flat[2] != width or attribute(split, "axis", 0) not in (-1, 3):
        return None
    return split if all(part.uses() for part in split.outputs) else None


def _lower(model: ir.Model, node: ir.Node, split: ir.Node) -> NDArray[np.int64]:
    """Split the linear's output itself. Returns the order of its rows."""
    whole, groups = node.outputs[0], dimension(split.inputs[0], 2)
    widths = [dimension(part, 3) for part in split.outputs]
    node.attributes["parts"] = ir.AttrInt64s("parts", widths)
    parts = [new_value(f"{whole.name}.part{number}", part) for number, part in enumerate(split.outputs)]
    leading = list(whole.shape or ())[:2]
    for part, width in zip(parts, widths, strict=True):
        part.shape = ir.Shape([*leading, groups * width])
    columns = sizes(model, *(groups * width for width in widths))
    flat = ir.node("Split", [whole, columns], attributes={"axis": -1}, outputs=parts)
    model.graph.insert_before(split, flat)
    for part, old, width in zip(parts, list(split.outputs), widths, strict=True):
        _join(model, old, part)
        if old.uses():
            heads = new_value(f"{part.name}.heads", old)
            apart = ir.node("Reshape", [part, sizes(model, 0, 0, groups, width)], outputs=[heads])
            model.graph.insert_after(flat, apart)
            old.replace_all_uses_with(heads)
    remove_dead(model, [split])
    rows = np.arange(groups * sum(widths)).reshape(groups, -1)
    return np.concatenate([part.ravel() for part in np.split(rows, np.cumsum(widths)[:-1], axis=1)])


def _join(model: ir.Model, value: ir.Value, flat: ir.Value) -> None:
    """Give ``flat [B, S, G·w]`` to those that reshape a value to it, also in several turns."""
    for use in list(value.uses()):
        if use.node.op_type != "Reshape":
            continue
        joined = use.node.outputs[0]
        if joined.shape == flat.shape and not joined.is_graph_output():
            joined.replace_all_uses_with(flat)
        else:
            _join(model, joined, flat)
        remove_dead(model, [use.node])
