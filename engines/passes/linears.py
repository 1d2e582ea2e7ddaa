"""Products with a parameter become one ``tapeout::Linear`` node each: what merging and kernels work on.

MatMul(x, Transpose(weight)) [+ bias]   ->   Linear(x) {weights: [name], biases: [name or ""]}

``MatMul(x, weight)`` over an ``[in, out]`` parameter is the same: from here on every weight is ``[out, in]``.
"""

from __future__ import annotations

import onnx_ir as ir

from engines.passes.base import INTERNAL, Lowering, PassResult, new_value, replace
from tapeout.graph_analysis import find_linears

OP = "Linear"


def run(lowering: Lowering) -> PassResult:
    linears = find_linears(lowering.model.graph)
    for linear in linears:
        node = ir.Node(
            INTERNAL,
            OP,
            [linear.input],
            attributes=[
                ir.AttrStrings("weights", [linear.name]),
                ir.AttrStrings("biases", [linear.bias.name or "" if linear.bias is not None else ""]),
                ir.AttrInt64s("out_features", [linear.shape[0]]),
            ],
            outputs=[new_value(f"{linear.name}.product", linear.output)],
        )
        last = linear.output.producer()
        assert last is not None
        replace(lowering.model, [last], [node], {linear.output: node.outputs[0]})
        if linear.transposed and not linear.weight.uses():
            del lowering.model.graph.initializers[linear.name]  # its shape is the other way round
    others = [n for n in lowering.model.graph if n.op_type in ("MatMul", "Gemm")]
    declined = tuple(f"{n.op_type} {n.outputs[0].name}: its weight is no parameter; kept in float" for n in others)
    return PassResult(len(linears), declined if linears or declined else ("no product in the graph",))


def is_linear(node: ir.Node | None) -> bool:
    return node is not None and (node.domain, node.op_type) == (INTERNAL, OP)


def weights_of(node: ir.Node) -> list[str]:
    return list(node.attributes["weights"].as_strings())


def biases_of(node: ir.Node) -> list[str]:
    return list(node.attributes["biases"].as_strings())


def out_features_of(node: ir.Node) -> list[int]:
    return list(node.attributes["out_features"].as_ints())
