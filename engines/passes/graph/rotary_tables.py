"""Rotary cosines and sines become constant caches over positions, computed by the graph's own subgraph.

    RotaryEmbedding(x, Cos(position · frequency), Sin(…))   ->   RotaryEmbedding(x, cos_table, sin_table) {table}

The subgraph is evaluated once for every position, so any RoPE scaling (linear, llama3, yarn) is kept exactly, with no
code for any of them. It must give a position the same values alone as among all others: angles that depend on the
largest position of a call, say, have no table.
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
        node.resize_inputs(4)
        for place, value in enumerate((*table, next((i for i in model.graph.inputs if i.name == POSITIONS), None)), 1):
            node.replace_input_with(place, value)
        matched += 1
        remove_dead(model, [p for p in (cos.producer(), sin.producer()) if p is not None])
    return PassResult(matched, tuple(declined) if nodes else ("no RotaryEmbedding in the graph",))


def _label(node: ir.Node) -> str:
    return f"{node.op_type} {node.outputs[0].name}"


def _evaluate(model: ir.Model, values: list[ir.Value], positions: int) -> list[NDArray[np.float32]] | None:
    """The values at positions ``0 .. positions-1``, ``[positions, width]``; None if they depend on anything else."""
    import onnxruntime as ort

    ids = [value for value in model.graph.inputs if value.name == POSITIONS]
    try:
        angles = ir.Model(ir.convenience.extract(model.graph, ids, values), ir_version=min(model.ir_version, 11))
    except ValueError:
        return None
    options = ort.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it runs only four times
    session = ort.InferenceSession(ir.to_proto(angles).SerializeToString(), options, providers=["CPUExecutionProvider"])

    def at(places: NDArray[np.int64]) -> list[NDArray[np.float32]]:
        results = session.run([value.name for value in values], {POSITIONS: places[None]})
        return [np.ascontiguousarray(np.asarray(r, np.float32).reshape(len(places), -1)) for r in results]

    tables = at(np.arange(positions, dtype=np.int64))
    for place in {0, positions // 2, positions - 1}:
        alone = at(np.array([place], np.int64))
        if not all(np.allclose(one[0], table[place], atol=1e-6) for one, table in zip(alone, tables, strict=True)):
            return None
    return tables
