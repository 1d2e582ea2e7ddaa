"""The norm or gate right before a native linear is fused into it, so its output is never written to memory.

    s = a + b, norm(s, w), BlockLinear                ->   ResidualNormLinear(a, b, w, ...), which returns s, too
    norm(x, w), BlockLinear                           ->   NormLinear(x, w, ...)
    silu(first half of x) * second half, BlockLinear  ->   GatedLinear(x, ...)

Norms are RMSNorm. A norm or gate with other consumers stays a node of its own. Where a gate is multiplied by a constant
first, as by Falcon-H1, that becomes a Scale of both halves, whose factors for the second are 1.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, attribute, initializer, new_value, only_use, producer_of, replace


def run(lowering: Lowering) -> PassResult:
    nodes = [n for n in lowering.model.graph if n.domain == DOMAIN and n.op_type == "BlockLinear"]
    matched, declined = 0, list[str]()
    for node in nodes:
        x = node.inputs[0]
        assert x is not None
        multiplied = producer_of(x, "Mul")
        reason = _norm(lowering, node, x) if multiplied is None else _gate(lowering, node, x, multiplied)
        if reason:
            codes = node.inputs[1]
            assert codes is not None
            declined.append(f"{(codes.name or '').removesuffix('.codes')}: {reason}")
        else:
            matched += 1
    return PassResult(matched, tuple(declined) if nodes else ("no native linear in the graph",))


def _norm(lowering: Lowering, node: ir.Node, x: ir.Value) -> str:
    """Fuse the norm before a linear into it. Returns why not."""
    skip, plain = (producer_of(x, f"{prefix}SimplifiedLayerNormalization") for prefix in ("Skip", ""))
    norm = skip or plain
    if norm is None or x is not norm.outputs[0]:  # its other output is the sum before it
        return "neither a norm nor a gate right before it"
    if only_use(x) is not node:
        return "the norm has other consumers"
    if skip is not None and len(skip.inputs) > 3:
        return "the sum before its norm has a bias"
    weight = norm.inputs[-1]
    if weight is None or weight.shape is None or list(weight.shape) != [attribute(node, "K", 0)]:
        return "its norm has no weight for every input channel"
    epsilon = attribute(norm, "epsilon", 1e-5)
    if skip is None:
        return _fuse(lowering, node, norm, "NormLinear", [norm.inputs[0], norm.inputs[1]], epsilon)
    total = norm.outputs[3] if len(norm.outputs) > 3 else None
    return _fuse(lowering, node, norm, "ResidualNormLinear", list(norm.inputs), epsilon, total)


def _gate(lowering: Lowering, node: ir.Node, x: ir.Value, product: ir.Node) -> str:
    """Fuse the gated activation before a linear into it. Returns why not."""
    if only_use(x) is not node:
        return "the gated activation has other consumers"
    gate, up = product.inputs
    assert gate is not None and up is not None
    activation = producer_of(gate, "QuickGelu")
    if activation is None:
        activation, up = producer_of(up, "QuickGelu"), gate
    if activation is None or attribute(activation, "alpha", 1.702) != 1.0:
        return "its gate is not SiLU"
    source, factor = _without_factor(activation.inputs[0])
    split = producer_of(source, "Split")
    if split is None or len(split.outputs) != 2 or split.outputs[0] is not source or split.outputs[1] is not up:
        return "gate and up are not the halves of one linear"
    halves = split.inputs[0]
    assert halves is not None
    if halves.shape is None or attribute(split, "axis", 0) not in (-1, len(halves.shape) - 1):
        return "gate and up are split along another axis"
    if any(part.shape is None or part.shape[-1] != attribute(node, "K", 0) for part in split.outputs):
        return "gate and up are not the halves of one linear"
    if factor != 1:
        if missing := lowering.kernels.unsupported("Scale") or lowering.kernels.unsupported("GatedLinear"):
            return missing
        scaled = new_value(f"{source.name}.scaled", halves)
        factors = np.repeat(np.array([factor, 1], np.float32), attribute(node, "K", 0))
        inputs = [halves, initializer(lowering.model, f"{source.name}.factors", factors)]
        lowering.model.graph.insert_before(product, ir.node("Scale", inputs, domain=DOMAIN, outputs=[scaled]))
        halves = scaled
    return _fuse(lowering, node, product, "GatedLinear", [halves])


def _without_factor(gate: ir.Value | None) -> tuple[ir.Value, float]:
    """What a gate is a constant times of, and the constant."""
    product = producer_of(gate, "Mul")
    for x, other in (product.inputs, product.inputs[::-1]) if product is not None else ():
        factor = other.const_value if other is not None and other.is_initializer() else None
        if x is not None and only_use(x) is product and factor is not None and factor.size == 1:
            return x, float(factor.numpy().ravel()[0])
    assert gate is not None
    return gate, 1.0


def _fuse(
    lowering: Lowering,
    node: ir.Node,
    before: ir.Node,
    kind: str,
    inputs: list[ir.Value | None],
    epsilon: float | None = None,
    total: ir.Value | None = None,
) -> str:
    """Returns why not. ``total``: the sum before a norm, which may have other consumers."""
    if missing := lowering.kernels.unsupported(kind):
        return missing
    attributes = dict(node.attributes)
    if epsilon is not None:
        attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon)
    product = node.outputs[0]
    name, product.name = product.name or "", f"{product.name}.alone"
    outputs = {product: new_value(name, product)}  # of the name that the bundle's record knows
    if kind == "ResidualNormLinear":
        outputs[total or ir.Value()] = new_value(f"{name}.sum", total or before.inputs[0])
    fused = ir.node(
        kind, [*inputs, *node.inputs[1:]], attributes=attributes, domain=DOMAIN, outputs=list(outputs.values())
    )
    if total is None:
        outputs = {product: fused.outputs[0]}
    replace(lowering.model, [before, node], [fused], outputs)
    fused.outputs[0].name = name  # also where it is an output of the graph
    return ""
