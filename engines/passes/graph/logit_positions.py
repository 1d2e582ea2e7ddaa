"""Logits only where they are wanted: a new input ``logit_positions`` selects tokens before lm_head.

lm_head is a fifth of the arithmetic of a small model, and prefill needs one token's logits.
    Linear(hidden [B, S, H], head)   ->   Linear(Gather(Reshape(hidden, [-1, H]), logit_positions), head)  [rows, V]
"""

from __future__ import annotations

import onnx_ir as ir

from engines.passes.base import Lowering, PassResult, sizes
from engines.passes.graph.linears import is_linear, weights_of


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    heads = {m for g in lowering.graph.groups if g.name == "lm_head" for m in g.members}
    # A tied head is named after the embedding in the record and after itself in the graph.
    node = next((n for n in reversed(list(model.graph)) if is_linear(n)), None)
    if node is None or (weights_of(node)[0] not in heads and not lowering.graph.tied_embeddings):
        return PassResult(0, ("the last linear is not lm_head; logits are computed for every token",))
    hidden = node.inputs[0]
    assert hidden is not None
    rows = ir.Value(name="logit_positions", shape=ir.Shape(["rows"]), type=ir.TensorType(ir.DataType.INT64))
    model.graph.inputs.append(rows)
    flat = ir.node("Reshape", [hidden, sizes(model, -1, lowering.graph.hidden_size)])
    picked = ir.node("Gather", [flat.outputs[0], rows], attributes={"axis": 0})
    model.graph.insert_before(node, [flat, picked])
    node.replace_input_with(0, picked.outputs[0])
    _drop_token_axis(model, node)
    return PassResult(1)


def _drop_token_axis(model: ir.Model, node: ir.Node) -> None:
    """What follows lm_head (soft caps, scales) is elementwise: its shapes lose the token axis, too."""
    stack = [node]
    while stack:
        current = stack.pop()
        for output in current.outputs:
            if output.shape is not None:
                output.shape = ir.Shape(["rows", output.shape[-1]])
            stack.extend(use.node for use in output.uses())
