"""Short convolutions become a native operator over a pool of state slots.

    CausalConv(x, weight, bias, mask, past)   ->   CausalConv(x, weightᵀ, bias, state, offsets, starts, slots)

The graph inputs change as for attention (``cached_attention.py``): tokens are packed, and ``slots [B]`` (int32) says
which row of the state ``[slots, K-1, C]`` is a sequence's. It is written in place. A sequence at position 0 begins from
zeros, whatever its slot holds. The output of a token is the same to the bit however a prompt was cut and whatever else
is in the step. x is read where it lies, as columns of a linear's output that a model splits. What multiplies what is
convolved and its result, and SiLU of the result, is computed with it:

    b, c, x = Split(all), c * CausalConv(b * x)   ->   CausalConv(all), ``gated``
    SiLU(CausalConv(x))                           ->   CausalConv(x), ``silu``

:class:`BuildError` where the kernels have no such operator: the target has no other.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.bundle import OFFSETS, SLOTS, STARTS
from engines.kernels.operators import DOMAIN
from engines.passes.base import (
    Lowering,
    PassResult,
    attribute,
    deferred,
    new_value,
    only_use,
    parameter_behind,
    producer_of,
    remove_dead,
)
from engines.passes.onnxruntime.columns import columns_of
from engines.passes.onnxruntime.step_inputs import drop_mask, step_inputs
from tapeout.errors import BuildError
from tapeout.operators import layer_of_node
from tapeout.operators.causal_conv import NAME, CausalConvNode, is_causal_conv

PARTS = 3  # of a linear's output: a factor of what is convolved, one of the result, and what is convolved


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
        assert x is not None and past is not None and weight is not None
        fixed = CausalConvNode.of(node)
        past.shape = ir.Shape(["slots", fixed.taps - 1, fixed.channels])
        attributes, replaced = dict[str, int](), node.outputs[0]
        if gates := _gates(x, replaced, fixed.channels):
            x, replaced = gates
            attributes["gated"] = 1
        else:
            x, attributes["first"] = columns_of(x)
            following = only_use(replaced)
            if following is not None and following.op_type == "QuickGelu" and attribute(following, "alpha", 0) == 1.0:
                replaced = following.outputs[0]
                attributes["silu"] = 1
        output = new_value(f"{past.name}.convolved", node.outputs[0])
        inputs = [x, _by_tap(lowering, weight, fixed), bias, past, *where]
        lowered = ir.node(NAME, inputs, attributes=attributes, domain=DOMAIN, outputs=[output])
        model.graph.insert_before(node, lowered)
        last = replaced.producer()
        assert last is not None
        replaced.replace_all_uses_with(output)
        model.graph.outputs.remove(node.outputs[1])
        remove_dead(model, [last, node])
    drop_mask(model)
    del model.functions[("tapeout", NAME, "")]
    model.opset_imports[DOMAIN] = 1
    return PassResult(len(nodes))


def _gates(x: ir.Value, y: ir.Value, channels: int) -> tuple[ir.Value, ir.Value] | None:
    """Where x and y are multiplied by parts of what x is a part of: all of it, and the product with y."""
    before, after = producer_of(x, "Mul"), only_use(y)
    if before is None or after is None or after.op_type != "Mul" or only_use(x) is None:
        return None
    split = producer_of(before.inputs[0], "Split")
    other = after.inputs[1] if after.inputs[0] is y else after.inputs[0]
    if split is None or len(split.outputs) != PARTS or {*before.inputs} != {split.outputs[0], split.outputs[2]}:
        return None
    whole, first = columns_of(split.outputs[0])
    if other is not split.outputs[1] or first or whole.shape is None or whole.shape[-1] != PARTS * channels:
        return None
    return whole, after.outputs[0]


def _by_tap(lowering: Lowering, weight: ir.Value, fixed: CausalConvNode) -> ir.Value:
    """The weight ``[C, K]`` as ``[K, C]``; the checkpoint's is ``[C, 1, K]``."""
    name = parameter_behind(weight)

    def transposed() -> NDArray[np.float32]:
        stored = lowering.weights.weight(name).reshape(fixed.channels, fixed.taps)
        return np.ascontiguousarray(stored.T)

    return deferred(lowering.model, f"{name}.by_tap", (fixed.taps, fixed.channels), ir.DataType.FLOAT, transposed)
