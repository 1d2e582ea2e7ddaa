"""Norms become ONNX Runtime's kernels, each with the residual sum before it where there is one.

s = Add(a, b); RMSNormalization(s, w)   ->   SkipSimplifiedLayerNormalization(a, b, w), which also returns s
RMSNormalization(x, w)                  ->   SimplifiedLayerNormalization(x, w)
s = Add(a, b); LayerNormalization(s, …) ->   SkipLayerNormalization(a, b, …), which also returns s
"""

from __future__ import annotations

import onnx_ir as ir

from engines.passes.base import (
    CONTRIB,
    Lowering,
    PassResult,
    attribute,
    new_value,
    parameter_behind,
    producer_of,
    remove_dead,
    replace,
)

_SKIP = {"RMSNormalization": "SkipSimplifiedLayerNormalization", "LayerNormalization": "SkipLayerNormalization"}


def run(lowering: Lowering) -> PassResult:
    model, matched, declined = lowering.model, 0, list[str]()
    for node in [n for n in model.graph if n.op_type in _SKIP]:
        x, weight, *bias = node.inputs
        assert x is not None and weight is not None
        label = parameter_behind(weight)
        if attribute(node, "axis", -1) not in (-1, len(x.shape or ()) - 1):
            declined.append(f"{label}: it normalizes more than the last axis; kept as it is")
            continue
        reason = _fuse_sum(model, node, x, weight, bias)
        if not reason:
            matched += 1
            continue
        declined.append(f"{label}: {reason}; it stays a node of its own")
        if node.op_type == "RMSNormalization":
            plain = ir.node(
                "SimplifiedLayerNormalization",
                [x, weight],
                attributes={"axis": -1, "epsilon": attribute(node, "epsilon", 1e-5), "stash_type": 1},
                outputs=[new_value(f"{node.outputs[0].name}.norm", node.outputs[0])],
            )
            replace(model, [node], [plain], {node.outputs[0]: plain.outputs[0]})
            matched += 1
    return PassResult(matched, tuple(declined) if matched or declined else ("no norm in the graph",))


def _fuse_sum(model: ir.Model, node: ir.Node, x: ir.Value, weight: ir.Value, bias: list[ir.Value | None]) -> str:
    """Fuse the sum that feeds a norm. Returns why not."""
    add = producer_of(x, "Add")
    if add is None:
        return "no residual sum before it"
    left, right = add.inputs
    if left is None or right is None or left.is_initializer() or right.is_initializer():
        return "the sum before it adds a constant"
    shapes = [v.shape for v in (left, right, x)]
    if any(s is None or len(s) not in (2, 3) for s in shapes) or shapes[0] != shapes[2] or shapes[1] != shapes[2]:
        return "the sum before it broadcasts"
    inputs = [left, right, weight]
    if node.op_type == "LayerNormalization":
        inputs += [b for b in bias if b is not None]
    fused = ir.node(
        _SKIP[node.op_type],
        inputs,
        attributes={"epsilon": attribute(node, "epsilon", 1e-5)},
        domain=CONTRIB,
        outputs=[
            new_value(f"{node.outputs[0].name}.norm", node.outputs[0]),
            new_value(""),
            new_value(""),
            new_value(f"{x.name}.sum", x),
        ],
    )
    model.graph.insert_before(node, fused)
    ir.convenience.replace_all_uses_with(node.outputs[0], fused.outputs[0])
    # A consumer of the sum that comes before the norm in the graph would now precede its producer.
    ir.convenience.replace_all_uses_with(x, fused.outputs[3])
    remove_dead(model, [node, add])
    model.opset_imports[CONTRIB] = 1
    return ""
