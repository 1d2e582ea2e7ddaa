"""Products with a gate or with constants, and sums, become native operators, with the RMSNorm before or after a gate.

    norm(x, w) * SiLU(gate)          ->   GatedNorm(x, gate, w), ``norm_first``: the gated delta rule's
    norm(x * SiLU(gate), w)          ->   GatedNorm(x, gate, w): Mamba2's, of groups of channels
    x * SiLU(gate)                   ->   GatedNorm(x, gate)
    x * Sigmoid(gate)                ->   GatedNorm(x, gate), ``sigmoid``; ``[.., 1]`` gates all channels
    x * Unsqueeze(Sigmoid(gate))     ->   GatedNorm(x, Reshape(gate)), ``sigmoid``: of heads, all channels of each
    x * constant                     ->   Scale(x, constant): one number, or one for each channel
    x [* constant] + y               ->   Scale(x, constant or 1, y)

Gates that linears compute with their input (``linear_inputs.py``), and sums before a norm (``norms.py``), are gone by
then. A gate is read where it lies, as columns of the linear's output that a model splits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from engines.kernels.operators import DOMAIN
from engines.passes.base import (
    Lowering,
    PassResult,
    attribute,
    constant,
    dimension,
    new_value,
    only_use,
    producer_of,
    replace,
    sizes,
)
from engines.passes.onnxruntime.columns import columns_of, runs_of

NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")


@dataclass
class _GateNorm:
    """``end``: what it gives, ``[B, S, C]``. ``weight``: ``[C]`` or ``[group]``."""

    end: ir.Value
    weight: ir.Value
    group: int
    epsilon: float


def run(lowering: Lowering) -> PassResult:
    model, declined = lowering.model, list[str]()
    # What reads a sum is known once gates are operators; what reads a product with a constant, once sums are.
    found = [
        _replaced(lowering, "Mul", "GatedNorm", _is_gated, _gate, declined),
        _replaced(lowering, "Add", "Scale", _is_sum, _sum, declined),
        _replaced(lowering, "Mul", "Scale", _is_scaled, _scale, declined),
    ]
    if not sum(found) and not declined:
        declined = ["no gate, constant factor or sum in the graph"]
    if sum(found):
        model.opset_imports[DOMAIN] = 1
    return PassResult(sum(found), tuple(declined))


def _replaced(
    lowering: Lowering,
    op_type: str,
    operator: str,
    is_one: Callable[[ir.Node], bool],
    replaced: Callable[[ir.Model, ir.Node], str],
    declined: list[str],
) -> int:
    """How many nodes became this operator. ``replaced``: says why one does not."""
    matched = 0
    # From the end, as what reads a sum may be another one.
    for node in reversed([n for n in lowering.model.graph if n.domain == "" and n.op_type == op_type]):
        if node.graph is None or not is_one(node):  # gone with another one
            continue
        if reason := lowering.kernels.unsupported(operator) or replaced(lowering.model, node):
            declined.append(f"{op_type} {node.outputs[0].name}: {reason}")
        else:
            matched += 1
    return matched


def _is_gated(product: ir.Node) -> bool:
    return _factors(product) is None and any(_gate_of(value) for value in product.inputs if value is not None)


def _is_scaled(product: ir.Node) -> bool:
    return _factors(product) is not None and _is_between_operators(product)


def _is_sum(node: ir.Node) -> bool:
    return not any(value is None or value.is_initializer() for value in node.inputs) and _is_between_operators(node)


def _factors(product: ir.Node) -> ir.Value | None:
    """The constants of a product."""
    return next((value for value in product.inputs if value is not None and value.is_initializer()), None)


def _is_between_operators(node: ir.Node) -> bool:
    """Whether all that reads a product or sum is native, or a norm. ONNX Runtime makes GELU, say, of others."""
    y = node.outputs[0]
    if y.is_graph_output():
        return any(value is not None and is_native(value.producer()) for value in node.inputs)
    readers = list(readers_of(y))
    return bool(readers) and all(
        is_native(reader) or reader.op_type in NORMS or (node.op_type == "Add" and _is_scale(reader))
        for reader in readers
    )


def _is_scale(node: ir.Node) -> bool:
    """Whether it is a product that becomes a Scale after the sums."""
    return node.op_type == "Mul" and _is_scaled(node) and not isinstance(_scaled(node), str)


def readers_of(value: ir.Value) -> Iterator[ir.Node]:
    """What reads a value, also by other shapes of it."""
    for use in value.uses():
        if use.node.op_type == "Reshape" and not use.node.outputs[0].is_graph_output():
            yield from readers_of(use.node.outputs[0])
        else:
            yield use.node


def is_native(node: ir.Node | None) -> bool:
    return node is not None and node.domain == DOMAIN


def _scale(model: ir.Model, node: ir.Node) -> str:
    """Returns why not."""
    found = _scaled(node)
    if isinstance(found, str):
        return found
    y = node.outputs[0]
    scaled = ir.node("Scale", found, domain=DOMAIN, outputs=[new_value(f"{y.name}.scaled", y)])
    replace(model, [node], [scaled], {y: scaled.outputs[0]})
    return ""


def _scaled(product: ir.Node) -> list[ir.Value] | str:
    """What is scaled, and the factors; or why these are not one number, or one for each channel."""
    factors, y = _factors(product), product.outputs[0]
    x = product.inputs[1] if product.inputs[0] is factors else product.inputs[0]
    assert x is not None and factors is not None
    if x.is_initializer() or x.dtype != ir.DataType.FLOAT or factors.dtype != ir.DataType.FLOAT:
        return "what it multiplies are not floats"
    if x.shape is None or y.shape is None or len(x.shape) < 2 or x.shape != y.shape or factors.shape is None:
        return "its constant is not a factor of each channel"
    elements = int(np.prod([size for size in factors.shape if isinstance(size, int)]))
    if elements != 1 and (elements != x.shape[-1] or factors.shape[-1] != elements):
        return "its constant is not a factor of each channel"
    return [x, factors]


def _sum(model: ir.Model, node: ir.Node) -> str:
    """Returns why not."""
    a, b = node.inputs
    y = node.outputs[0]
    assert a is not None and b is not None
    if a.dtype != ir.DataType.FLOAT or a.shape is None or len(a.shape) < 2 or not a.shape == b.shape == y.shape:
        return "it adds no floats of one shape"
    inputs, added = [a, constant(model, "one", np.ones(1, np.float32))], b
    for x, other in ((a, b), (b, a)):
        product = producer_of(x, "Mul")
        found = _scaled(product) if product is not None and _factors(product) and only_use(x) is node else ""
        if not isinstance(found, str):
            inputs, added = found, other
            break
    total = ir.node("Scale", [*inputs, added], domain=DOMAIN, outputs=[new_value(f"{y.name}.total", y)])
    replace(model, [node], [total], {y: total.outputs[0]})
    return ""


def _gate_of(value: ir.Value) -> tuple[ir.Value, bool] | None:
    """The gate whose SiLU or sigmoid a value is; true for the sigmoid."""
    for kind, alpha in (("QuickGelu", 1.0), ("Sigmoid", 0.0)):
        node = producer_of(_of_heads(value) or value, kind)
        if node is not None and attribute(node, "alpha", 0.0) == alpha and node.inputs[0] is not None:
            return node.inputs[0], kind == "Sigmoid"
    return None


def _of_heads(value: ir.Value | None) -> ir.Value | None:
    """What ``[B, S, H, 1]`` is of ``[B, S, H]``."""
    apart = producer_of(value, "Unsqueeze")
    flat = apart.inputs[0] if apart is not None else None
    if value is None or flat is None or len(flat.shape or ()) != 3:
        return None
    return flat if value.shape == ir.Shape([*list(flat.shape or ()), 1]) else None


def _gate(model: ir.Model, node: ir.Node) -> str:
    """Returns why not."""
    a, b = node.inputs
    assert a is not None and b is not None
    x, factor = (a, b) if _gate_of(b) else (b, a)
    found = _gate_of(factor)
    assert found is not None
    gate, sigmoid = found
    y, apart = node.outputs[0], list[ir.Node]()
    if _of_heads(factor) is not None:
        apart = [ir.node("Reshape", [gate, sizes(model, 0, 0, dimension(gate, 2), 1)])]
        apart[0].outputs[0].type, apart[0].outputs[0].shape = gate.type, factor.shape
        gate = apart[0].outputs[0]
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
    if x.shape is None or gate.shape is None or len(x.shape) < 2:
        return "its gate has another shape than what it multiplies"
    channels, one = x.shape[-1], gate.shape == ir.Shape([*list(x.shape)[:-1], 1])
    if x.shape != gate.shape and not one:
        return "its gate has another shape than what it multiplies"
    if not isinstance(channels, int):
        return "the number of channels is not fixed"
    if after is not None:
        y, weight = after.end, after.weight
    like = y
    x, x_first = columns_of(x)
    gate, first, run, period = (*columns_of(gate), 0, 0) if one else runs_of(gate)
    attributes |= {"channels": channels, "x_first": x_first, "first": first}
    if one and channels > 1:
        attributes["one"] = 1
    if run:
        attributes |= {"run": run, "period": period}
    gated = ir.node(
        "GatedNorm",
        [x, gate, weight],
        attributes=attributes,
        domain=DOMAIN,
        outputs=[new_value(f"{y.name}.gated", like)],
    )
    last = y.producer()
    assert last is not None
    replace(model, [last], [*apart, gated], {y: gated.outputs[0]})
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
    end, flat = y, list[ir.Value]()
    while (joined := only_use(end)) is not None and joined.op_type == "Reshape" and len(end.shape or ()) != 3:
        end = joined.outputs[0]
    if end is y or len(sources) < 2:
        return None
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
