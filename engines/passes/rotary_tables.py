"""Rotary cosines and sines become constant tables over positions, computed by the graph's own subgraph.

    RotaryEmbedding(x, Cos(position · frequency), Sin(…))   ->   RotaryEmbedding(x, cos_table, sin_table) {table}

The subgraph that makes them is evaluated once for every position, so any scaling rule (linear, llama3, yarn) is
taken over exactly, with no code per rule.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import Lowering, PassResult, constant, remove_dead

POSITIONS = "position_ids"


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if n.op_type == "RotaryEmbedding"]
    tables: dict[tuple[int, int], tuple[ir.Value, ir.Value]] = {}
    declined: list[str] = []
    matched = 0
    for node in nodes:
        cos, sin = node.inputs[1], node.inputs[2]
        assert cos is not None and sin is not None
        if id(cos) not in {k[0] for k in tables}:
            arrays = _evaluate(model, [cos, sin], lowering.max_tokens)
            if arrays is None:
                declined.append(f"{_label(node)}: its angles depend on more than positions; computed in every step")
                continue
            index = len(tables)
            tables[(id(cos), id(sin))] = (
                constant(model, f"rotary.cos.{index}", arrays[0]),
                constant(model, f"rotary.sin.{index}", arrays[1]),
            )
        table = tables.get((id(cos), id(sin)))
        if table is None:
            declined.append(f"{_label(node)}: its cosines and sines are paired differently elsewhere")
            continue
        node.replace_input_with(1, table[0])
        node.replace_input_with(2, table[1])
        positions = next((i for i in model.graph.inputs if i.name == POSITIONS), None)
        node.resize_inputs(4)
        node.replace_input_with(3, positions)
        matched += 1
        remove_dead(model, [p for p in (cos.producer(), sin.producer()) if p is not None])
    return PassResult(matched, tuple(declined) if nodes else ("no RotaryEmbedding in the graph",))


def _label(node: ir.Node) -> str:
    return f"{node.op_type} {node.outputs[0].name}"


def _evaluate(model: ir.Model, values: list[ir.Value], positions: int) -> list[NDArray[np.float32]] | None:
    """The values at positions ``0 .. positions-1``, ``[positions, width]``; None if they need another input."""
    import onnxruntime as ort

    needed: set[int] = set()
    stack = list(values)
    constants: set[ir.Value] = set()
    while stack:
        value = stack.pop()
        if value.is_initializer():
            if value.const_value is None:
                return None
            constants.add(value)
            continue
        node = value.producer()
        if node is None:
            if value.name != POSITIONS:
                return None
            continue
        if id(node) not in needed:
            needed.add(id(node))
            stack.extend(i for i in node.inputs if i is not None)
    proto = ir.to_proto(model)
    names = {v.name for v in values}
    kept = [n for n, node in zip(proto.graph.node, model.graph, strict=True) if id(node) in needed]
    inputs = [i for i in proto.graph.input if i.name == POSITIONS]
    keep_initializers = {c.name for c in constants}
    initializers = [i for i in proto.graph.initializer if i.name in keep_initializers]
    import onnx

    outputs = [onnx.helper.make_empty_tensor_value_info(str(name)) for name in names]
    small = onnx.helper.make_model(
        onnx.helper.make_graph(kept, "rotary", inputs, outputs, initializers),
        opset_imports=list(proto.opset_import),
        ir_version=min(proto.ir_version, 11),
    )
    session = ort.InferenceSession(small.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {POSITIONS: np.arange(positions, dtype=np.int64)[None]}
    results = session.run([v.name for v in values], feed)
    return [np.ascontiguousarray(np.asarray(r, np.float32).reshape(positions, -1)) for r in results]
