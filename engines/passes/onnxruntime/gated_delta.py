"""Gated delta rules become a native operator over a pool of state slots.

    GatedDelta(value, query, key, decay, beta, mask, past)
        ->   GatedDelta(value, query, key, decay, beta, state, offsets, starts, slots)

The graph inputs change as for short convolutions (``recurrent_conv.py``); the state is ``[slots, H, K, V]``.

:class:`BuildError` where the kernels have no such operator: the target has no other.
"""

from __future__ import annotations

import onnx_ir as ir

from engines.bundle import OFFSETS, SLOTS, STARTS
from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, new_value, remove_dead
from engines.passes.onnxruntime.step_inputs import drop_mask, step_inputs
from tapeout.errors import BuildError
from tapeout.operators import layer_of_node
from tapeout.operators.gated_delta import NAME, PAST_INPUT, is_gated_delta


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if is_gated_delta(n)]
    if not nodes:
        return PassResult(0, ("no gated delta rule in the graph",))
    if reason := lowering.kernels.unsupported(NAME):
        raise BuildError(
            f"no gated delta rule for layer {layer_of_node(nodes[0])}: {reason}",
            expected="one that a kernel of the target computes (docs/native-kernels.md)",
            remedy="build this model for another target",
        )
    where = step_inputs(model, OFFSETS, STARTS, SLOTS)
    for node in nodes:
        past = node.inputs[PAST_INPUT]
        assert past is not None and past.shape is not None
        past.shape = ir.Shape(["slots", *list(past.shape)[1:]])
        output = new_value(f"{past.name}.read", node.outputs[0])
        inputs = [*node.inputs[: PAST_INPUT - 1], past, *where]
        model.graph.insert_before(node, ir.node(NAME, inputs, domain=DOMAIN, outputs=[output]))
        node.outputs[0].replace_all_uses_with(output)
        model.graph.outputs.remove(node.outputs[1])
        remove_dead(model, [node])
    drop_mask(model)
    del model.functions[("tapeout", NAME, "")]
    model.opset_imports[DOMAIN] = 1
    return PassResult(len(nodes))
