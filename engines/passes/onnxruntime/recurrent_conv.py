"""Short convolutions become a native operator over a pool of state slots.

    CausalConv(x, weight, bias, mask, past)   ->   CausalConv(x, weightᵀ, bias, state, offsets, starts, slots)

The graph inputs change as for attention (``cached_attention.py``): tokens are packed, and ``slots [B]`` (int32) says
which row of the state ``[slots, K-1, C]`` is a sequence's. It is written in place. A sequence at position 0 begins from
zeros, whatever its slot holds. The output of a token is the same to the bit however a prompt was cut and whatever else
is in the step.

:class:`BuildError` where the kernels have no such operator: the target has no other.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.bundle import OFFSETS, SLOTS, STARTS
from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, deferred, new_value, parameter_behind, remove_dead
from engines.passes.onnxruntime.step_inputs import drop_mask, step_inputs
from tapeout.errors import BuildError
from tapeout.operators import layer_of_node
from tapeout.operators.causal_conv import NAME, CausalConvNode, is_causal_conv


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if is_causal_conv(n)]
    if not nodes:
        return PassResult(0, ("no short convolution in the graph",))
    if reason := lowering.kernels.unsupported(NAME):
        raise BuildError(
            f"no short convolution for layer {layer_of_node(nodes[0])}: {reason}",
            expected="one that a kernel of the target computes (docs/native-kernels.md)",
            remedy="build this model for another target",
        )
    where = step_inputs(model, OFFSETS, STARTS, SLOTS)
    for node in nodes:
        x, weight, bias, _, past = node.inputs
        assert past is not None and weight is not None
        fixed = CausalConvNode.of(node)
        past.shape = ir.Shape(["slots", fixed.taps - 1, fixed.channels])
        output = new_value(f"{past.name}.convolved", node.outputs[0])
        inputs = [x, _by_tap(lowering, weight, fixed), bias, past, *where]
        lowered = ir.node(NAME, inputs, domain=DOMAIN, outputs=[output])
        model.graph.insert_before(node, lowered)
        node.outputs[0].replace_all_uses_with(output)
        model.graph.outputs.remove(node.outputs[1])
        remove_dead(model, [node])
    drop_mask(model)
    del model.functions[("tapeout", NAME, "")]
    model.opset_imports[DOMAIN] = 1
    return PassResult(len(nodes))


def _by_tap(lowering: Lowering, weight: ir.Value, fixed: CausalConvNode) -> ir.Value:
    """The weight ``[C, K]`` as ``[K, C]``; the checkpoint's is ``[C, 1, K]``."""
    name = parameter_behind(weight)

    def transposed() -> NDArray[np.float32]:
        stored = lowering.weights.weight(name).reshape(fixed.channels, fixed.taps)
        return np.ascontiguousarray(stored.T)

    return deferred(lowering.model, f"{name}.by_tap", (fixed.taps, fixed.channels), ir.DataType.FLOAT, transposed)
