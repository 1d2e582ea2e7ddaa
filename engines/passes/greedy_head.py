"""A native output head finds the likeliest tokens while it is computed; greedy decoding then writes no logits at all.

    logits = BlockLinear(x, ...), ArgMax(logits)   ->   HeadLinear(x, greedy, ...), which returns logits or tokens

A new input ``greedy`` says which; the other has no rows. With a soft cap or a scale behind the head ArgMax stays, which
every run computes: ONNX Runtime 1.31 runs nodes whose results nobody asks for.
"""

from __future__ import annotations

import onnx_ir as ir

from engines.bundle import GREEDY, NEXT_TOKENS
from engines.native import DOMAIN
from engines.passes.base import Lowering, Outcome


def run(lowering: Lowering) -> Outcome:
    graph = lowering.model.graph
    outputs = {output.name: output for output in graph.outputs}
    if NEXT_TOKENS not in outputs:
        return Outcome(0, (f"no output {NEXT_TOKENS} in the graph",))
    logits, chosen = outputs["logits"], outputs[NEXT_TOKENS]
    head, argmax = logits.producer(), chosen.producer()
    if head is None or argmax is None or (head.domain, head.op_type) != (DOMAIN, "BlockLinear"):
        return Outcome(0, ("logits are not what a native product returns; ArgMax reads them",))
    greedy = ir.Value(name=GREEDY, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
    graph.inputs.append(greedy)
    fused = ir.node(
        "HeadLinear",
        [head.inputs[0], greedy, *head.inputs[1:]],
        attributes=dict(head.attributes),
        domain=DOMAIN,
        num_outputs=2,
    )
    graph.insert_before(head, fused)
    for before, after in ((logits, fused.outputs[0]), (chosen, fused.outputs[1])):
        after.name, before.name = before.name, f"{before.name}.moved"
        after.type, after.shape = before.type, before.shape
        graph.outputs[graph.outputs.index(before)] = after
    graph.remove([argmax, head], safe=True)
    return Outcome(1)
