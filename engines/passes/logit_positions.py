"""Logits only for the rows that are asked for: a new input ``logit_positions`` selects tokens before the output head.

The head is a fifth of the arithmetic of a small model, and prefill needs one row of it.
    Linear(hidden [B, S, H], head)   ->   Linear(Gather(Reshape(hidden, [-1, H]), logit_positions), head)  [rows, V]
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from engines.passes.base import Lowering, PassResult, constant
from engines.passes.linears import is_linear, weights_of


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    heads = {m for g in lowering.graph.groups if g.name == "lm_head" for m in g.members}
    # A tied head is named after the embedding in the record and after itself in the graph.
    node = next((n for n in reversed(list(model.graph)) if is_linear(n)), None)
    if node is None or (weights_of(node)[0] not in heads and not lowering.graph.tied_embeddings):
        return PassResult(0, ("the last product is not the output head; logits are computed for every row",))
    hidden = node.inputs[0]
    assert hidden is not None
    rows = ir.Value(name="logit_positions", shape=ir.Shape(["rows"]), type=ir.TensorType(ir.DataType.INT64))
    model.graph.inputs.append(rows)
    width = lowering.graph.hidden_size
    shape = constant(model, f"shape.-1.{width}", np.array([-1, width], np.int64))
    flat = ir.node("Reshape", [hidden, shape])
    picked = ir.node("Gather", [flat.outputs[0], rows], attributes={"axis": 0})
    model.graph.insert_before(node, [flat, picked])
    node.replace_input_with(0, picked.outputs[0])
    _drop_token_axis(model, node)
    return PassResult(1)


def _drop_token_axis(model: ir.Model, node: ir.Node) -> None:
    """What follows the head (soft caps, scales) is elementwise: its shapes lose the token axis with it."""
    stack = [node]
    while stack:
        current = stack.pop()
        for output in current.outputs:
            if output.shape is not None:
                output.shape = ir.Shape(["rows", output.shape[-1]])
            stack.extend(use.node for use in output.uses())
