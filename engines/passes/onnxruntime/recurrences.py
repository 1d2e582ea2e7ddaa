"""Gated delta rules and selective scans become native operators over a pool of state slots.

    GatedDelta(value, query, key, decay, beta, mask, past)
        ->   GatedDelta(value, query, key, decay, beta, state, offsets, starts, slots, rate, bias)
    SelectiveScan(value, query, key, decay, mask, past)
        ->   SelectiveScan(value, query, key, decay, state, offsets, starts, slots, rate, bias, skip)

The graph inputs change as for short convolutions (``recurrent_conv.py``); the state is ``[slots, H, K, V]``, in float32
or, where the plan says so, in bfloat16, rounded after each token. Inputs are
read where they lie, as columns of the linear's or convolution's output that a model splits. What models compute around
the recurrence is computed with it where it is written as they write it:

    decay = rate * step, step = Clip(Softplus(x + bias))   ->   decay is x, with ``least_step`` and ``most_step``
    decay = least * Sigmoid(rate * (x + bias))             ->   decay is x, with ``least_decay``
    value = x * step, of a selective scan                  ->   value is x
    y = scan + skip * x, of a selective scan               ->   skip is an input
    beta = Sigmoid(x), or a constant times it              ->   beta is x, with ``squash`` and ``most_beta``

Decays of a gated delta rule are those of heads, ``[B, S, H]``, or of key channels, ``[B, S, H, K]``, with
``by_channel``: then rates are of heads and biases of channels.

:class:`BuildError` where the kernels have no such operator: the target has no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnx_ir as ir

from engines.bundle import OFFSETS, SLOTS, STARTS
from engines.kernels.operators import DOMAIN
from engines.passes.base import (
    Lowering,
    PassResult,
    dimension,
    new_value,
    only_use,
    producer_of,
    remove_dead,
    sizes,
)
from engines.passes.onnxruntime.columns import columns_of, flat_columns_of
from engines.passes.onnxruntime.step_inputs import drop_mask, step_inputs
from tapeout.errors import BuildError
from tapeout.operators import gated_delta, layer_of_node
from tapeout.operators.gated_delta import is_gated_delta
from tapeout.operators.selective_scan import is_selective_scan

PLAIN_ABOVE = 20  # where torch's softplus takes x for log(1 + e^x)


@dataclass
class TimeStep:
    """What decays are made of: a linear's output, and constants. ``value``: the time step; none of a least decay."""

    value: ir.Value | None
    x: ir.Value  # before bias and softplus
    bias: ir.Value | None
    rate: ir.Value
    bounds: dict[str, float] = field(default_factory=dict[str, float])


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if is_gated_delta(n) or is_selective_scan(n)]
    if not nodes:
        return PassResult(0, ("no recurrence in the graph",))
    where = step_inputs(model, OFFSETS, STARTS, SLOTS)
    notes: list[str] = []
    for node in nodes:
        name = node.op_type
        if reason := lowering.kernels.unsupported(name):
            raise BuildError(
                f"no {name} for layer {layer_of_node(node)}: {reason}",
                expected="a recurrence that a kernel of the target computes (docs/native-kernels.md)",
                remedy="build this model for another target",
            )
        layer = layer_of_node(node)
        notes += (f"layer {layer}: {note}" for note in _lower(lowering, node, where))
        model.functions.pop(("tapeout", name, ""), None)
    drop_mask(model)
    model.opset_imports[DOMAIN] = 1
    return PassResult(len(nodes), tuple(notes))


def _lower(lowering: Lowering, node: ir.Node, where: list[ir.Value]) -> list[str]:
    """Replace one node. Returns what could not be computed with it."""
    model = lowering.model
    value, query, key, decay, *betas, _, past = node.inputs
    assert value is not None and query is not None and key is not None and decay is not None
    assert past is not None and past.shape is not None
    scans, notes = node.op_type != gated_delta.NAME, list[str]()
    attributes: dict[str, int | float] = {"groups": dimension(key, 2)}
    by_channel = len(decay.shape or ()) == 4
    if by_channel:
        attributes["by_channel"] = 1
    step, skip, output = _step_of(decay), None, node.outputs[0]
    if step is not None and scans:
        unscaled = None if step.value is None else _factor(value, step.value)
        if unscaled is None:
            step = None
        else:
            value = unscaled
            if found := _skip_of(output, value):
                skip, output = found
    if step is None:
        notes.append("its decay is not made of a linear's output in a known way; computed outside of the recurrence")
    else:
        decay, attributes = step.x, attributes | step.bounds
    (beta,) = betas or [None]
    factor = _number_times(beta)
    most, inner = factor or (1.0, beta)
    sigmoid = producer_of(inner, "Sigmoid")
    if sigmoid is not None:
        (beta,) = sigmoid.inputs
        attributes |= {"squash": 1, **({"most_beta": most} if most != 1 else {})}
    created, inputs = list[ir.Node](), list[ir.Value | None]()
    for name, each in {"value": value, "query": query, "key": key, "decay": decay, "beta": beta}.items():
        if each is not None:
            whole = flat_columns_of(model, each, created) if len(each.shape or ()) == 4 else columns_of(each)
            source, attributes[f"{name}_first"] = whole
            inputs.append(source)
    inputs += [past, *where, step.rate if step else None, step.bias if step else None, *([skip] if scans else [])]
    heads, _, channels = (dimension(past, axis) for axis in (1, 2, 3))
    past.shape = ir.Shape(["slots", *list(past.shape)[1:]])
    past.type = ir.TensorType(ir.DataType[{"float32": "FLOAT", "bfloat16": "BFLOAT16"}[lowering.recurrent_dtype]])
    flat = new_value(f"{past.name}.read")
    flat.type = output.type
    flat.shape = ir.Shape([*list(value.shape or ())[:2], heads * channels])
    created.append(ir.node(node.op_type, inputs, attributes=attributes, domain=DOMAIN, outputs=[flat]))
    model.graph.insert_before(node, created)
    model.graph.outputs.remove(node.outputs[1])
    _hand_on(model, output, flat, heads, channels)
    remove_dead(model, [node])
    return notes


def _step_of(decay: ir.Value) -> TimeStep | None:
    """What a decay ``[B, S, H]`` or ``[B, S, H, K]`` is made of, if it is a kernel's."""
    product = producer_of(decay, "Mul")
    if product is None:
        return None
    return _least_decay_of(product) or _multiple_of(product)


def _multiple_of(product: ir.Node) -> TimeStep | None:
    """``rate * Clip(Softplus(x + bias))``"""
    step, rate = _with_constant(product, by_head=True)
    if step is None or rate is None:
        return None
    bounds, value = dict[str, float](), step
    clip = producer_of(value, "Clip")
    if clip is not None:
        for name, bound in zip(("least_step", "most_step"), clip.inputs[1:], strict=False):
            if bound is not None and bound.const_value is None:
                return None
            if bound is not None and bound.const_value is not None:
                bounds[name] = float(bound.const_value.numpy())
        (value, *_) = clip.inputs
    plain = _softplus_of(value)
    return None if plain is None else TimeStep(step, *_without_bias(plain), rate, bounds)


def _least_decay_of(product: ir.Node) -> TimeStep | None:
    """``least * Sigmoid(rate * (x + bias))``"""
    least, sigmoid = _number_times(product.outputs[0]) or (0.0, None)
    inner = producer_of(sigmoid, "Sigmoid")
    scaled = producer_of(inner.inputs[0], "Mul") if inner is not None else None
    x, rate = _with_constant(scaled, by_head=True) if scaled is not None else (None, None)
    if not least < 0 or x is None or rate is None:
        return None
    return TimeStep(None, *_without_bias(x), rate, {"least_decay": least})


def _number_times(value: ir.Value | None) -> tuple[float, ir.Value] | None:
    """The number and the other factor of a product with one."""
    product = producer_of(value, "Mul")
    for x, other in (product.inputs, reversed(product.inputs)) if product is not None else ():
        tensor = other.const_value if other is not None else None
        if x is not None and tensor is not None and tensor.size == 1:
            return float(np.asarray(tensor.numpy()).item()), x
    return None


def _without_bias(x: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """What a bias is added to, before or after it is cut into heads, and the bias; else ``x`` itself."""
    joined = producer_of(x, "Reshape") if len(x.shape or ()) == 4 else None
    for value in (x, joined.inputs[0] if joined is not None else None):
        total = producer_of(value, "Add")
        if total is not None:
            plain, bias = _with_constant(total, by_head=False)
            if plain is not None and bias is not None:
                return plain, bias
    return x, None


def _softplus_of(value: ir.Value | None) -> ir.Value | None:
    """The x of a softplus, as torch exports it or models write it: x itself where it is large."""
    where = producer_of(value, "Where")
    if where is None:
        return None
    condition, large, small = where.inputs
    greater = producer_of(condition, "Greater")
    if greater is None or large is None:
        return None
    bound = greater.inputs[1].const_value if greater.inputs[1] is not None else None
    same = greater.inputs[0] is large and _logarithm_of(small) is large
    return large if same and bound is not None and float(bound.numpy()) == PLAIN_ABOVE else None


def _logarithm_of(small: ir.Value | None) -> ir.Value | None:
    """The x of Softplus(x), or of Log(1 + Exp(x))."""
    softplus, logarithm = producer_of(small, "Softplus"), producer_of(small, "Log")
    if softplus is not None:
        return softplus.inputs[0]
    total = producer_of(logarithm.inputs[0], "Add") if logarithm is not None else None
    for x, other in (total.inputs, reversed(total.inputs)) if total is not None else ():
        exponential, one = producer_of(x, "Exp"), other.const_value if other is not None else None
        if exponential is not None and one is not None and (np.asarray(one.numpy()) == 1).all():
            return exponential.inputs[0]
    return None


def _with_constant(node: ir.Node, *, by_head: bool) -> tuple[ir.Value | None, ir.Value | None]:
    """The computed operand of a sum or product, and the other, an initializer.

    The operand is ``[B, S, H]``, and the other ``[H]``; or ``[B, S, H, K]``, and the other has a number for each head,
    as ``[1, 1, H, 1]``, or where not ``by_head`` for each channel; or ``[B, S, H·K]``, and a number for each.
    """
    for x, other in (node.inputs, reversed(node.inputs)):
        numbers = _initializer(other)
        if numbers is not None and other is not None and _initializer(x) is None and x is not None:
            shape, own = list(x.shape or ())[2:], [size for size in other.shape or () if isinstance(size, int)]
            wanted = [*shape[:1], 1] if by_head and len(shape) == 2 else shape
            padded = [1] * (len(wanted) - len(own)) + own
            fits = padded[-len(wanted) :] == wanted and prod(padded) == prod(wanted)
            return (x, numbers) if fits else (None, None)
    return None, None


def _initializer(value: ir.Value | None) -> ir.Value | None:
    """An initializer, or the one that another shape is given; kernels count its numbers alone."""
    reshape = producer_of(value, "Reshape")
    value = value if reshape is None else reshape.inputs[0]
    return value if value is not None and value.is_initializer() else None


def _factor(value: ir.Value, step: ir.Value) -> ir.Value | None:
    """The x of x * step, where value ``[B, S, H, V]`` is that."""
    product = producer_of(value, "Mul")
    for x, other in (product.inputs, reversed(product.inputs)) if product is not None else ():
        apart = producer_of(other, "Unsqueeze")
        if apart is not None and apart.inputs[0] is step and _axes(apart) in ((-1,), (3,)):
            return x
    return None


def _skip_of(output: ir.Value, value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The factor ``[H]`` of the values that are added to an output, and the sum."""
    total = only_use(output)
    if total is None or total.op_type != "Add":
        return None
    added = total.inputs[1] if total.inputs[0] is output else total.inputs[0]
    product = producer_of(added, "Mul")
    for x, other in (product.inputs, reversed(product.inputs)) if product is not None else ():
        apart = producer_of(other, "Unsqueeze")
        skip = apart.inputs[0] if apart is not None and _axes(apart) in ((-1,), (1,)) else None
        if x is value and skip is not None and skip.is_initializer() and len(skip.shape or ()) == 1:
            return skip, total.outputs[0]
    return None


def _axes(node: ir.Node) -> tuple[int, ...]:
    axes = node.inputs[1].const_value if node.inputs[1] is not None else None
    return () if axes is None else tuple(np.asarray(axes.numpy()).ravel().tolist())


def _hand_on(model: ir.Model, output: ir.Value, flat: ir.Value, heads: int, channels: int) -> None:
    """Give ``[B, S, H·V]`` to those that reshape the node's ``[B, S, H, V]`` to it, and ``[B, S, H, V]`` to others."""
    for use in list(output.uses()):
        joined = use.node.outputs[0]
        if use.node.op_type == "Reshape" and len(joined.shape or ()) == 3 and joined.shape == flat.shape:
            joined.replace_all_uses_with(flat)
            remove_dead(model, [use.node])
    producer = output.producer()
    assert producer is not None
    if output.uses():
        apart = ir.node(
            "Reshape",
            [flat, sizes(model, 0, 0, heads, channels)],
            outputs=[new_value(f"{flat.name}.heads", output)],
        )
        model.graph.insert_before(producer, apart)
        output.replace_all_uses_with(apart.outputs[0])
    remove_dead(model, [producer])
