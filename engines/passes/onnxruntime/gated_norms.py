"""Products with a gate or with constants become native operators, with the RMSNorm before or after a gate.

    norm(x, w) * SiLU(gate)          ->   GatedNorm(x, gate, w), ``norm_first``: the gated delta rule's
    norm(x * SiLU(gate), w)          ->   GatedNorm(x, gate, w): Mamba2's, of groups of channels
    x * SiLU(gate)                   ->   GatedNorm(x, gate)
    x * Sigmoid(gate)                ->   GatedNorm(x, gate), ``sigmoid``
    x * constant                     ->   Scale(x, constant): one number, or one for each channel

Gates that linears compute with their input (``linear_inputs.py``) are gone by then. A gate is read where it lies, as
columns of the linear's output that a model splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, attribute, new_value, only_use, producer_of, replace
from engines.passes.onnxruntime.columns import columns_of

NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")


@dataclass
class _GateNorm:
    """``end``: what it gives, ``[B, S, C]``. ``weight``: ``[C]`` or ``[group]``."""

    end: ir.Value
    weight: ir.Value
    group: int
    epsilon: float


def run(lowering: Lowering) -> PassResult:
    model, matched, declined = lowering.model, 0, list[str]()
    for kind in ("GatedNorm", "Scale"):  # what reads a product with a constant is known once gates are operators
        for node in [n for n in model.graph if n.domain == "" and n.op_type == "Mul"]:
            if node.graph is None:  # gone with a gate
                continue
            a, b = node.inputs
            assert a is not None and b is not None
            factors = next((value for value in (a, b) if value.is_initializer()), None)
            if kind == "GatedNorm" and (factors is not None or (_gate_of(a) is None and _gate_of(b) is None)):
                continue
            if kind == "Scale" and (factors is None or not _is_between_operators(node)):
                continue
            reason = lowering.kernels.unsupported(kind)
            reason = reason or (_gate(model, node) if factors is None else _scale(model, node, factors))
            if reason:
                declined.append(f"Mul {node.outputs[0].name}: {reason}")
            else:
                matched += 1
    return PassResult(matched, tuple(declined) if matched or declined else ("no gate or constant factor in the graph",))


def _is_between_operators(product: ir.Node) -> bool:
    """Whether all that reads a product is native, or a norm. ONNX Runtime makes GELU, say, of others."""
    y = product.outputs[0]
    if y.is_graph_output():
        return any(value is not None and _is_native(value.producer()) for value in product.inputs)
    return bool(y.uses()) and all(_is_native(use.node) or use.node.op_type in NORMS for use in y.uses())


def _is_native(node: ir.Node | None) -> bool:
    return node is not None and node.domain == DOMAIN


def _scale(model: ir.Model, node: ir.Node, factors: ir.Value) -> str:
    """Returns why not."""
    x = node.inputs[1] if node.inputs[0] is factors else node.inputs[0]
    y = node.outputs[0]
    assert x is not None
    if x.is_initializer() or x.dtype != ir.DataType.FLOAT or factors.dtype != ir.DataType.FLOAT:
        return "what it multiplies are not floats"
    if x.shape is None or y.shape is None or len(x.shape) < 2 or x.shape != y.shape or factors.shape is None:
        return "its constant is not a factor of each channel"
    elements = int(np.prod([size for size in factors.shape if isinstance(size, int)]))
    if elements != 1 and (elements != x.shape[-1] or factors.shape[-1] != elements):
        return "its constant is not a factor of each channel"
    scaled = ir.node("Scale", [x, factors], domain=DOMAIN, outputs=[new_value(f"{y.name}.scaled", y)])
    replace(model, [node], [scaled], {y: scaled.outputs[0]})
    return ""


def _gate_of(value: ir.Value) -> tuple[ir.Value, bool] | None:
    """The gate whose SiLU or sigmoid a value is; true for the sigmoid."""
    for kind, alpha in (("QuickGelu", 1.0), ("Sigmoid", 0.0)):
        node = producer_of(value, kind)
        if node is not None and attribute(node, "alpha", 0.0) == alpha and node.inputs[0] is not None:
            return node.inputs[0], kind == "Sigmoid"
    return None


def _gate(model: ir.Model, node: ir.Node) -> str:
    """Returns why not."""
    a, b = node.inputs
    assert a is not None and b is not None
    x, found = (a, _gate_of(b)) if _gate_of(b) else (b, _gate_of(a))
    assert found is not None
    gate, sigmoid = found
    y = node.outputs[0]
    attributes: dict[str, int | float] = {"sigmoid": int(sigmoid)}
    weight: ir.Value | None = None
    norm = _norm_before(x, gate, y)
    if norm is not None:
        x, gate, after = *norm[:2], norm[2]
        attributes |= {"norm_first": 1, "group": after.group, "epsilon": after.epsilon}
    else:
        after = _norm_after(y)
        if after is not None:
            attributes |= {"group": after.group, "epsilon": after.epsilon}
    if x.shape is None or gate.shape is None or len(x.shape) < 2 or x.shape != gate.shape:
        return "its gate has another shape than what it multiplies"
    channels = x.shape[-1]
    if not isinstance(channels, int):
        return "the number of channels is not fixed"
    if after is not None:
        y, weight = after.end, after.weight
    like = y
    x, x_first = columns_of(x)
    gate, first = columns_of(gate)
    attributes |= {"channels": channels, "x_first": x_first, "first": first}
    gated = ir.node(
        "GatedNorm",
        [x, gate, weight],
        attributes=attributes,
        domain=DOMAIN,
        outputs=[new_value(f"{y.name}.gated", like)],
    )
    last = y.producer()
    assert last is not None
    replace(model, [last], [gated], {y: gated.outputs[0]})
    return ""


def _norm_before(x: ir.Value, gate: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value, _GateNorm] | None:
    """Where y is the norm of ``[B·S·H, V]`` times a gate's activation: x and gate as ``[B, S, H·V]``, and the norm."""
    norm = producer_of(x, "SimplifiedLayerNormalization")
    if norm is None or only_use(x) is None or norm.inputs[0] is None or norm.inputs[1] is None:
        return None
    weight, epsilon = norm.inputs[1], attribute(norm, "epsilon", 1e-5)
    if weight.shape is None or len(weight.shape) != 1:
        return None
    group = _size(weight)
    if len(x.shape or ()) == 3:
        return norm.inputs[0], gate, _GateNorm(y, weight, group, epsilon)
    parts = [producer_of(norm.inputs[0], "Reshape"), producer_of(gate, "Reshape")]
    sources = [part.inputs[0] for part in parts if part is not None]
    joined = only_use(y)
    if joined is None or joined.op_type != "Reshape" or len(sources) < 2:
        return None
    end, flat = joined.outputs[0], list[ir.Value]()
    for source in sources:
        source = _unreshaped(source, end)
        if source is None:
            return None
        flat.append(source)
    return flat[0], flat[1], _GateNorm(end, weight, group, epsilon)


def _unreshaped(value: ir.Value | None, like: ir.Value) -> ir.Value | None:
    """The value of the shape ``[B, S, C]`` of ``like`` that a value is, or was reshaped from."""
    while value is not None and value.shape != like.shape:
        node = producer_of(value, "Reshape")
        value = node.inputs[0] if node is not None else None
    return value


def _norm_after(product: ir.Value) -> _GateNorm | None:
    """Mamba2's norm of a product ``[B, S, C]``, written in single operators, of groups of channels or of all."""
    grouped = product
    reshape = only_use(product)
    if reshape is not None and reshape.op_type == "Reshape":
        grouped = reshape.outputs[0]
    if reshape is not None and reshape.op_type == "SimplifiedLayerNormalization":
        weight = reshape.inputs[1]
        if weight is None or weight.shape is None or list(weight.shape) != list(product.shape or ())[-1:]:
            return None
        return _GateNorm(reshape.outputs[0], weight, _size(product), attribute(reshape, "epsilon", 1e-5))
    users = {use.node.op_type: use.node for use in grouped.uses()}
    power, scaled = users.get("Pow"), users.get("Mul")
    if len(users) != 2 or power is None or scaled is None or _number(power.inputs[1]) != 2:
        return None
    mean = only_use(power.outputs[0])
    total = only_use(mean.outputs[0]) if mean is not None and mean.op_type == "ReduceMean" else None
    root = only_use(total.outputs[0]) if total is not None and total.op_type == "Add" else None
    inverse = only_use(root.outputs[0]) if root is not None and root.op_type == "Sqrt" else None
    if mean is None or total is None or inverse is None or inverse.op_type != "Reciprocal":
        return None
    if inverse.outputs[0] not in scaled.inputs or _number(mean.inputs[1]) not in (-1, len(grouped.shape or ()) - 1):
        return None
    epsilon = next((found for value in total.inputs if (found := _number(value)) is not None), None)
    end = scaled.outputs[0]
    joined = only_use(end)
    if joined is not None and joined.op_type == "Reshape" and joined.outputs[0].shape == product.shape:
        end = joined.outputs[0]
    weighted = only_use(end)
    if epsilon is None or end.shape != product.shape or weighted is None or weighted.op_type != "Mul":
        return None
    weight = weighted.inputs[1] if weighted.inputs[0] is end else weighted.inputs[0]
    if weight is None or not weight.is_initializer() or list(weight.shape or ()) != list(product.shape or ())[-1:]:
        return None
    return _GateNorm(weighted.outputs[0], weight, _size(grouped), epsilon)


def _size(value: ir.Value) -> int:
    size = value.shape[-1] if value.shape is not None else None
    assert isinstance(size, int)
    return size


def _number(value: ir.Value | None) -> float | None:
    tensor = value.const_value if value is not None else None
    return float(tensor.numpy().ravel()[0]) if tensor is not None and tensor.size == 1 else None
