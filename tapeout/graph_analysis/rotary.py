"""How a graph's rotary embedding pairs channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import onnx_ir as ir

from tapeout.graph_analysis.dataflow import data_inputs
from tapeout.graph_analysis.linears import find_linears
from tapeout.operators.attention import is_attention


def find_rotary(model: ir.Model) -> Literal["half", "interleaved", "none"]:
    """How the rotary embedding pairs key channels, or ``none`` if the model has no rotary embedding.

    A RotaryEmbedding node has it as an attribute. Where the exporter left the arithmetic, ``x·cos + rotate(x)·sin``,
    the negated part of the key shows it: every other channel, or one half of the channels. Where it is written as a
    complex product, the difference and the sum are concatenated as halves, or stacked as pairs.
    """
    for node in model.graph:
        if node.op_type == "RotaryEmbedding":
            attribute = node.attributes.get("interleaved")
            return "interleaved" if attribute is not None and attribute.as_int() else "half"
    projected = {id(linear.output) for linear in find_linears(model.graph)}
    for node in model.graph:
        if not is_attention(node) or node.inputs[1] is None:
            continue
        for step in _before(node.inputs[1], projected):
            part = step.inputs[0].producer() if step.op_type == "Neg" and step.inputs[0] is not None else None
            if part is not None and part.op_type in ("Slice", "Split"):
                return "interleaved" if _stride(part) == 2 else "half"
            if step.op_type == "Concat":
                parts = [value.producer() for value in step.inputs if value is not None]
                stacked = all(p is not None and p.op_type == "Unsqueeze" for p in parts)
                before = [p.inputs[0].producer() if stacked and p and p.inputs[0] else p for p in parts]
                if [p.op_type for p in before if p is not None] == ["Sub", "Add"]:
                    return "interleaved" if stacked else "half"
    return "none"


def _before(value: ir.Value, projected: set[int]) -> Iterator[ir.Node]:
    """The nodes between the outputs of linears (``projected``) and ``value``, nearest first."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        node = current.producer()
        if id(current) in projected or node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        stack.extend(data_inputs(node))


def _stride(node: ir.Node) -> int:
    """The step of a Slice along one axis; 1 for a Split."""
    steps = node.inputs[4] if node.op_type == "Slice" and len(node.inputs) > 4 else None
    return 1 if steps is None or steps.const_value is None else int(steps.const_value.numpy().reshape(-1)[0])
