"""Linears without a quantized form of their own, as standard operators over the checkpoint's ``[out, in]`` weight.

    Linear(x)   ->   MatMul(x, Transpose(weight)) [+ bias]

The weight is not transposed in the file: a compiler folds the Transpose into the matmul, and a tied output head
stays the same tensor as the embedding.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import Lowering, PassResult, constant, deferred, new_value
from engines.passes.graph.linears import biases_of, is_linear, label_of, put, weights_of


def run(lowering: Lowering) -> PassResult:
    nodes = [n for n in lowering.model.graph if is_linear(n)]
    for node in nodes:
        names = weights_of(node)
        if len(names) == 1:
            weight = lowering.model.graph.initializers.get(names[0]) or _stacked(lowering, names)
        else:
            weight = _stacked(lowering, names)
        transposed = ir.node("Transpose", [weight], attributes={"perm": [1, 0]})
        matmul = ir.node("MatMul", [node.inputs[0], transposed.outputs[0]])
        finish(lowering, node, [transposed, matmul], "MatMul float")
    return PassResult(len(nodes), () if nodes else ("no linear was left to it",))


def _stacked(lowering: Lowering, names: list[str]) -> ir.Value:
    """An initializer of the weights one above the other; its values are read when the graph is bound."""
    name = names[0] if len(names) == 1 else "+".join(names)
    known = lowering.model.graph.initializers.get(name)
    if known is not None:
        return known
    shapes = [lowering.weights.weight(name).shape for name in names]
    shape = (sum(rows for rows, _ in shapes), shapes[0][1])
    return deferred(lowering.model, name, shape, ir.DataType.FLOAT, lambda: stacked_weight(lowering, names))


def stacked_weight(lowering: Lowering, names: list[str]) -> NDArray[np.float32]:
    """``[sum of out, in]``."""
    return np.concatenate([lowering.weights.weight(name) for name in names], axis=0)


def finish(lowering: Lowering, node: ir.Node, nodes: list[ir.Node], kind: str) -> None:
    """Add the biases behind the last of ``nodes``, and let them take the linear's place."""
    label = label_of(lowering, node)
    biases = biases_of(node)
    result = nodes[-1].outputs[0]
    final = new_value(f"{label}.matmul", node.outputs[0])
    result.name, result.shape, result.type = final.name, final.shape, final.type
    if any(biases):
        values = np.concatenate([lowering.weights.tensor(name) for name in biases])
        bias = constant(lowering.model, f"{label}.bias", values)
        nodes = [*nodes, ir.node("Add", [result, bias], outputs=[new_value(f"{label}.biased", node.outputs[0])])]
    put(lowering, node, nodes, kind)
