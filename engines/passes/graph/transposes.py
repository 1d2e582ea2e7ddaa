"""Transposes between linears move over what is computed element by element, until they meet and are gone.

    Transpose(Mul(a, b)), a and b parts of a Split of Transpose(x)   ->   Mul(a', b'), parts of a Split of x

Models with convolutions put channels before tokens, multiply there, and go back. Linears, and operators of ours, have
channels last. Only an exchange of the last two of three axes is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from engines.passes.base import Lowering, PassResult, attribute, new_value, replace

PERMUTATION = [0, 2, 1]
ELEMENTWISE = ("Add", "Mul", "Sigmoid", "Sub")


def run(lowering: Lowering) -> PassResult:
    model, matched = lowering.model, 0
    moved: dict[ir.Value, ir.Value] = {}
    for node in [n for n in model.graph if _exchanges(n)]:
        (source,) = node.inputs
        if source is None or not _is_free(source):
            continue
        replace(model, [node], [], {node.outputs[0]: _moved(model, source, moved)})
        matched += 1
    return PassResult(matched, () if matched else ("no axes are exchanged between linears",))


def _exchanges(node: ir.Node | None) -> bool:
    perm = node.attributes.get("perm") if node is not None and node.op_type == "Transpose" else None
    return perm is not None and list(perm.as_ints()) == PERMUTATION


def _is_free(value: ir.Value) -> bool:
    """Whether exchanging axes of a value adds no Transpose: all that it is computed from was exchanged."""
    producer = value.producer()
    if producer is None or _exchanges(producer):
        return producer is not None
    if producer.op_type == "Split":
        return attribute(producer, "axis", 0) in (1, -2) and _inputs_free(producer.inputs[:1])
    return producer.op_type in ELEMENTWISE and _inputs_free(producer.inputs)


def _inputs_free(values: Sequence[ir.Value | None]) -> bool:
    return all(value is not None and len(value.shape or ()) == len(PERMUTATION) and _is_free(value) for value in values)


def _moved(model: ir.Model, value: ir.Value, moved: dict[ir.Value, ir.Value]) -> ir.Value:
    """The value with its last two axes exchanged; ``moved``: those that there are."""
    producer = value.producer()
    assert producer is not None
    if _exchanges(producer):
        (source,) = producer.inputs
        assert source is not None
        return source
    if value not in moved:
        data = producer.inputs[:1] if producer.op_type == "Split" else producer.inputs
        inputs = [_moved(model, each, moved) for each in data if each is not None]
        attributes = {name: each.value for name, each in producer.attributes.items()}
        if producer.op_type == "Split":
            attributes["axis"] = 2
        outputs = [new_value(f"{output.name}.channels_last") for output in producer.outputs]
        for output, old in zip(outputs, producer.outputs, strict=True):
            output.type = old.type
            output.shape = ir.Shape([(old.shape or [])[axis] for axis in PERMUTATION])
        created = ir.node(
            producer.op_type, [*inputs, *producer.inputs[len(data) :]], attributes=attributes, outputs=outputs
        )
        model.graph.insert_before(producer, created)
        moved.update(zip(producer.outputs, outputs, strict=True))
    return moved[value]
