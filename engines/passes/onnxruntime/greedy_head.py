"""A native lm_head finds the likeliest tokens while it computes logits; greedy decoding then writes no logits at all.

    logits = BlockLinear(x, ...)   ->   logits, next_tokens = HeadLinear(x, greedy, ...)

A new input ``greedy`` says which of the two is wanted; the other is empty. Where a soft cap or a scale follows
lm_head, or it is not a native linear, tokens are chosen from logits outside the graph: ONNX Runtime 1.31 would compute
an ArgMax in every run, wanted or not.
"""

from __future__ import annotations

import onnx_ir as ir

from engines.bundle import GREEDY, NEXT_TOKENS
from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult


def run(lowering: Lowering) -> PassResult:
    graph = lowering.model.graph
    logits = next((output for output in graph.outputs if output.name == "logits"), None)
    if logits is None or logits.shape is None or len(logits.shape) != 2:
        return PassResult(0, ("logits are not selected by position; tokens are chosen outside the graph",))
    head = logits.producer()
    if head is None or (head.domain, head.op_type) != (DOMAIN, "BlockLinear"):
        return PassResult(0, ("logits are not the output of a native linear; tokens are chosen outside the graph",))
    if missing := lowering.kernels.unsupported("HeadLinear"):
        return PassResult(0, (f"{missing}; tokens are chosen outside the graph",))
    greedy = ir.Value(name=GREEDY, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
    graph.inputs.append(greedy)
    fused = ir.node(
        "HeadLinear",
        [head.inputs[0], greedy, *head.inputs[1:]],
        attributes=dict(head.attributes),
        domain=DOMAIN,
        num_outputs=2,
    )
    rows, chosen = fused.outputs
    rows.name, logits.name = logits.name, f"{logits.name}.moved"
    rows.type, rows.shape = logits.type, logits.shape
    chosen.name, chosen.type = NEXT_TOKENS, ir.TensorType(ir.DataType.INT64)
    chosen.shape = ir.Shape([logits.shape[0]])
    graph.insert_before(head, fused)
    graph.outputs[graph.outputs.index(logits)] = rows
    graph.outputs.append(chosen)
    graph.remove(head, safe=True)
    return PassResult(1)
