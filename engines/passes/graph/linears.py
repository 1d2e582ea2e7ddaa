"""Matmuls with a parameter become one ``tapeout::Linear`` node each: what merging and kernel passes work on.

MatMul(x, Transpose(weight)) [+ bias]   ->   Linear(x) {weights: [name], biases: [name or ""]}

``MatMul(x, weight)`` over an ``[in, out]`` parameter is the same: from here on every weight is ``[out, in]``. Routers
of experts stay as they are. What all kernel passes share stands here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from engines.bundle import LinearOutput
from engines.passes.base import INTERNAL, Lowering, PassResult, initializer, new_value, replace
from tapeout.errors import BuildError
from tapeout.graph_analysis.groups import find_quantizable
from tapeout.graph_analysis.linears import is_parameter
from tapeout.quantized import QuantizedWeight

OP = "Linear"


def run(lowering: Lowering) -> PassResult:
    linears = find_quantizable(lowering.model.graph)
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
            outputs=[new_value(f"{linear.name}.linear", linear.output)],
        )
        last = linear.output.producer()
        assert last is not None
        replace(lowering.model, [last], [node], {linear.output: node.outputs[0]})
        if linear.transposed and not linear.weight.uses():
            del lowering.model.graph.initializers[linear.name]  # its shape is the other way round
    others = [n for n in lowering.model.graph if n.op_type in ("MatMul", "Gemm")]
    declined = tuple(f"{n.op_type} {n.outputs[0].name}: {_unlike(n)}; kept in float" for n in others)
    return PassResult(len(linears), declined if linears or declined else ("no matmul in the graph",))


def _unlike(matmul: ir.Node) -> str:
    weight = matmul.inputs[1]
    producer = weight.producer() if weight is not None else None
    known = weight if producer is None or producer.op_type != "Transpose" else producer.inputs[0]
    return "a router of experts" if is_parameter(known) else "its weight is not a parameter"


def is_linear(node: ir.Node | None) -> bool:
    return node is not None and (node.domain, node.op_type) == (INTERNAL, OP)


def weights_of(node: ir.Node) -> list[str]:
    return list(node.attributes["weights"].as_strings())


def biases_of(node: ir.Node) -> list[str]:
    return list(node.attributes["biases"].as_strings())


def out_features_of(node: ir.Node) -> list[int]:
    return list(node.attributes["out_features"].as_ints())


def parts_of(node: ir.Node) -> list[int]:
    """Columns of the parts of a head, where the output has one part of all heads after the other; empty elsewhere."""
    found = node.attributes.get("parts")
    return [] if found is None else list(found.as_ints())


def quantized(lowering: Lowering, node: ir.Node) -> list[QuantizedWeight]:
    """The weights of a linear; empty where one of them is in float."""
    parts = [lowering.weights.linear(name) for name in weights_of(node)]
    found = [part for part in parts if isinstance(part, QuantizedWeight)]
    return found if len(found) == len(parts) else []


def group_name(lowering: Lowering, node: ir.Node) -> str:
    """The group a linear belongs to, or its weight where it belongs to none."""
    name = weights_of(node)[0]
    group = lowering.group_of(name)
    return name if group is None else group.name


def label_of(lowering: Lowering, node: ir.Node) -> str:
    """What a linear is called: its group where it is all of it, else the weight."""
    names = weights_of(node)
    group = lowering.group_of(names[0])
    return group.name if group is not None and len(group.members) == len(names) else names[0]


def is_head(lowering: Lowering, node: ir.Node) -> bool:
    """Whether a linear is lm_head, or anything else outside the layers."""
    return not group_name(lowering, node).startswith("layers.")


def described(weight: QuantizedWeight) -> str:
    """Of codes, for a bundle's record."""
    scheme = weight.scheme
    mean = f", mean {scheme.mean_bits:.2f}" if scheme.expert_bits else ""
    return f"{scheme.codes} g{weight.group_size} {'sym' if scheme.symmetric else 'asym'}{mean}"


def one_scheme(label: str, weights: Sequence[Any]) -> None:
    """:class:`BuildError` for members of a merged linear that are stored differently."""
    found = {weight.scheme.name if isinstance(weight, QuantizedWeight) else "float" for weight in weights}
    if len(found) > 1:
        raise BuildError(
            f"{label} mixes {' and '.join(sorted(found))} in one merged linear",
            expected="one scheme for linears that read the same input",
            remedy="let one rule of plan.schemes match the whole group",
        )


def stacked_bias(lowering: Lowering, node: ir.Node) -> ir.Value | None:
    """The biases of a linear as one initializer ``[N]``; None where there are none."""
    names = biases_of(node)
    if not any(names):
        return None
    values = np.concatenate([lowering.weights.tensor(name) for name in names])
    # Not ".bias": an untied head's parameter is called so, and is still an initializer here.
    return initializer(lowering.model, f"{label_of(lowering, node)}.biases", values)


def put(lowering: Lowering, node: ir.Node, nodes: list[ir.Node], kind: str) -> None:
    """Let ``nodes``, of which the last has the result, take a linear's place, and record it for the bundle."""
    output = nodes[-1].outputs[0]
    lowering.plan[label_of(lowering, node)] = kind
    replace(lowering.model, [node], nodes, {node.outputs[0]: output})
    lowering.linear_outputs.append(
        LinearOutput(
            value=output.name or "",
            weights=tuple(weights_of(node)),
            rows=tuple(out_features_of(node)),
            parts=tuple(parts_of(node)),
        )
    )


def trimmed(inputs: list[ir.Value | None]) -> list[ir.Value | None]:
    """Without the missing optional inputs at the end."""
    while inputs[-1] is None:
        inputs = inputs[:-1]
    return inputs
