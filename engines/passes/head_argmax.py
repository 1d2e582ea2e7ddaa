"""The likeliest token is found while the native output head is computed; greedy decoding then writes no logits at all.

    logits = BlockLinear(x, ...), ArgMax(logits)   ->   logits = BlockLinear(x, ...), ArgmaxLinear(x, ...)

A run asks for one of the two and leaves the other out. With a soft cap or a scale between head and logits ArgMax stays.
"""

from __future__ import annotations

import onnx_ir as ir

from engines.bundle import NEXT_TOKENS
from engines.native import DOMAIN
from engines.passes.base import Lowering, Outcome


def run(lowering: Lowering) -> Outcome:
    graph = lowering.model.graph
    chosen = next((output for output in graph.outputs if output.name == NEXT_TOKENS), None)
    argmax = chosen.producer() if chosen is not None else None
    if chosen is None or argmax is None or argmax.inputs[0] is None:
        return Outcome(0, (f"no output {NEXT_TOKENS} in the graph",))
    head = argmax.inputs[0].producer()
    if head is None or (head.domain, head.op_type) != (DOMAIN, "BlockLinear"):
        return Outcome(0, ("logits are not what a native product returns; ArgMax reads them",))
    fused = ir.node("ArgmaxLinear", head.inputs, attributes=dict(head.attributes), domain=DOMAIN)
    result = fused.outputs[0]
    result.type, result.shape = chosen.type, chosen.shape
    chosen.name, result.name = f"{NEXT_TOKENS}.moved", NEXT_TOKENS
    graph.outputs[graph.outputs.index(chosen)] = result
    graph.insert_before(argmax, fused)
    graph.remove(argmax, safe=True)
    return Outcome(1)
