"""Linears of one group (Q/K/V, gate/up) become one linear: the input is read once, and one kernel is launched.

    Linear(x, q), Linear(x, k), Linear(x, v)   ->   Split(Linear(x, [q, k, v]))

A gate comes before what it gates, whichever of them a model computes first: so kernels take them. Attention takes the
merged result whole where it can, so that its Split disappears again (cached_attention).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from engines.passes.base import INTERNAL, Lowering, PassResult, constant, new_value, remove_dead
from engines.passes.graph.linears import OP, biases_of, is_linear, out_features_of, weights_of


def run(lowering: Lowering) -> PassResult:
    matched, declined = 0, list[str]()
    by_weight = {weights_of(n)[0]: n for n in lowering.model.graph if is_linear(n)}
    for group in lowering.graph.groups:
        nodes = [by_weight[m] for m in group.members if m in by_weight]
        if len(nodes) < 2:
            continue
        nodes.sort(key=lambda node: not _is_gate(node.outputs[0]))
        if any(n.inputs[0] is not nodes[0].inputs[0] for n in nodes):
            declined.append(f"{group.name}: its members read different values")
            continue
        biases = [b for n in nodes for b in biases_of(n)]
        if any(biases) and not all(biases):
            declined.append(f"{group.name}: only some members have a bias")
            continue
        _merge(lowering, group.name, nodes)
        matched += 1
    if not matched and not declined:
        declined.append("every linear is the only one of its group; nothing to merge")
    return PassResult(matched, tuple(declined))


def _is_gate(value: ir.Value) -> bool:
    """Whether a sigmoid is taken of a value, or of a constant times it."""
    readers = [use.node for use in value.uses()]
    scaled = [use.node for node in readers if node.op_type == "Mul" for use in node.outputs[0].uses()
              if any(other is not None and other.is_initializer() for other in node.inputs)]  # fmt: skip
    return any(node.op_type == "Sigmoid" for node in (*readers, *scaled))


def _merge(lowering: Lowering, name: str, nodes: list[ir.Node]) -> None:
    model = lowering.model
    sizes = [size for n in nodes for size in out_features_of(n)]
    merged = ir.Node(
        INTERNAL,
        OP,
        [nodes[0].inputs[0]],
        attributes=[
            ir.AttrStrings("weights", [w for n in nodes for w in weights_of(n)]),
            ir.AttrStrings("biases", [b for n in nodes for b in biases_of(n)]),
            ir.AttrInt64s("out_features", sizes),
        ],
        outputs=[new_value(f"{name}.merged")],
    )
    like = nodes[0].outputs[0]
    if like.shape is not None:
        merged.outputs[0].shape = ir.Shape([*like.shape[:-1], sum(sizes)])
    merged.outputs[0].type = like.type
    split = ir.node(
        "Split",
        [merged.outputs[0], constant(model, f"sizes.{'.'.join(map(str, sizes))}", np.array(sizes, np.int64))],
        attributes={"axis": -1},
        outputs=[new_value(f"{name}.part{i}", n.outputs[0]) for i, n in enumerate(nodes)],
    )
    # All members read the same value, so the first may stand where any of them stood.
    model.graph.insert_before(nodes[0], [merged, split])
    for node, part in zip(nodes, split.outputs, strict=True):
        ir.convenience.replace_all_uses_with(node.outputs[0], part)
    remove_dead(model, nodes)
