"""Gated delta rules and selective scans become native operators over a pool of state slots.

    GatedDelta(value, query, key, decay, beta, mask, past)
        ->   GatedDelta(value, query, key, decay, beta, state, offsets, starts, slots)
    SelectiveScan(value, query, key, decay, mask, past)
        ->   SelectiveScan(value, query, key, decay, state, offsets, starts, slots)

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
from tapeout.operators.gated_delta import is_gated_delta
from tapeout.operators.selective_scan import is_selective_scan


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if is_gated_delta(n) or is_selective_scan(n)]
    if not nodes:
        return PassResult(0, ("no recurrence in the graph",))
    where = step_inputs(model, OFFSETS, STARTS, SLOTS)
    for node in nodes:
        name = node.op_type
        if reason := lowering.kernels.unsupported(name):
            raise BuildError(
                f"no {name} for layer {layer_of_node(node)}: {reason}",
                expected="a recurrence that a kernel of the target computes (docs/native-kernels.md)",
                remedy="build this model for another target",
            )
        *given, _, past = node.inputs
        assert past is not None and past.shape is not None
        past.shape = ir.Shape(["slots", *list(past.shape)[1:]])
        output = new_value(f"{past.name}.read", node.outputs[0])
        lowered = ir.node(name, [*given, past, *where], domain=DOMAIN, outputs=[output])
        model.graph.insert_before(node, lowered)
        node.outputs[0].replace_all_uses_with(output)
        model.graph.outputs.remove(node.outputs[1])
        remove_dead(model, [node])
        model.functions.pop(("tapeout", name, ""), None)
    drop_mask(model)
    model.opset_imports[DOMAIN] = 1
    return PassResult(len(nodes))
