"""Reshapes between native operators go where these take tokens of any leading axes.

    FloatLinear(Reshape(x, [-1, H])), ChooseExperts          ->   FloatLinear(x), ChooseExperts
    Reshape(Experts(Reshape(x, [-1, H]), ..), [B, S, H])     ->   Experts(x, ..), of the shape of x

A Reshape between two of them would end a step (docs/native-kernels.md).
"""

from __future__ import annotations

import onnx_ir as ir

from engines.kernels.operators import DOMAIN, EXPERTS
from engines.passes.base import Lowering, PassResult, producer_of, remove_dead

ROUTER = ("FloatLinear", "ChooseExperts")


def run(lowering: Lowering) -> PassResult:
    model, matched = lowering.model, 0
    for node in [n for n in model.graph if n.domain == DOMAIN and n.op_type in (*EXPERTS, ROUTER[0])]:
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        source = _unflattened(x)
        if source is x or y.is_graph_output():
            continue
        readers = [use.node for use in y.uses()]
        if node.op_type == ROUTER[0]:
            if any((reader.domain, reader.op_type) != (DOMAIN, ROUTER[1]) for reader in readers):
                continue
        elif any(reader.op_type != "Reshape" or reader.outputs[0].shape != source.shape for reader in readers):
            continue
        else:
            for reader in readers:
                reader.outputs[0].replace_all_uses_with(y, replace_graph_outputs=True)
        assert source.shape is not None and y.shape is not None
        y.shape = ir.Shape([*list(source.shape)[:-1], y.shape[-1]])
        node.replace_input_with(0, source)
        flattened = x.producer()
        assert flattened is not None
        remove_dead(model, [flattened, *(reader for reader in readers if reader.op_type == "Reshape")])
        matched += 1
    return PassResult(matched, () if matched else ("no tokens are reshaped before experts or a router",))


def _unflattened(value: ir.Value) -> ir.Value:
    """What was reshaped to a value, as long as only leading axes were."""
    while (reshape := producer_of(value, "Reshape")) is not None:
        source = reshape.inputs[0]
        if source is None or source.shape is None or value.shape is None or len(source.shape) < 2:
            break
        if not isinstance(value.shape[-1], int) or source.shape[-1] != value.shape[-1]:
            break
        value = source
    return value
