"""Checks a graph between passes: ONNX checker and type and shape inference, without the weights.

Weights are declared as inputs of the same type and shape, so nothing large is serialized. Constants of at most
``CONSTANT_BYTES`` stay, because shapes depend on them. Operators of our own kernels are compared with their declaration
(``kernels/operators.py``); those of other domains that ONNX does not know are not checked.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from engines.kernels.operators import DOMAIN, OPERATORS, Argument
from engines.passes.base import CONTRIB
from tapeout.errors import BuildError

CONSTANT_BYTES = 1024
# ONNX Runtime registers these in the domain of ONNX, which does not have them.
RUNTIME_OPERATORS = ("SimplifiedLayerNormalization",)


def check(model: ir.Model, step: str) -> None:
    """:class:`BuildError` names the pass ``step`` that left an invalid graph."""
    try:
        proto = structure(model)
        onnx.checker.check_model(proto)
        onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
        for node in model.graph.all_nodes():
            if node.domain == DOMAIN:
                _check_declared(node)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise BuildError(
            f"the graph is invalid after the pass {step}: {' '.join(str(error).split())[:500]}",
            expected="a graph that the ONNX checker and shape inference accept",
            remedy="this is a defect of the pass; please report it with the model's name",
        ) from error


def _check_declared(node: ir.Node) -> None:
    """:class:`ValueError` where a node is not as its operator is declared."""
    operator = OPERATORS.get(node.op_type)
    if operator is None:
        raise ValueError(f"{DOMAIN} has no operator {node.op_type}")
    for kind, values, declared in (
        ("input", node.inputs, operator.inputs),
        ("output", node.outputs, operator.outputs),
    ):
        if len(values) > len(declared):
            raise ValueError(f"{node.op_type} has {len(values)} {kind}s, and {len(declared)} are declared")
        for at, argument in enumerate(declared):
            reason = _unfit(values[at] if at < len(values) else None, argument)
            if reason:
                raise ValueError(f"{kind} {argument.name} of {node.op_type} {reason}")


def _unfit(value: ir.Value | None, argument: Argument) -> str:
    if value is None:
        return "" if argument.optional else "is missing"
    known = None if value.dtype is None else value.dtype.numpy().name
    return "" if known in (None, *argument.types) else f"is {known}, not {' or '.join(argument.types)}"


def structure(model: ir.Model) -> onnx.ModelProto:
    """The model with its weights declared as inputs."""
    graph = model.graph
    weights = {name: value for name, value in graph.initializers.items() if _is_weight(value)}
    for name in weights:
        del graph.initializers[name]
    graph.inputs.extend(weights.values())
    try:
        proto = ir.to_proto(model)
    finally:
        del graph.inputs[len(graph.inputs) - len(weights) :]
        graph.initializers.update(weights)
    for node in proto.graph.node:
        if node.op_type in RUNTIME_OPERATORS:
            node.domain = CONTRIB
    known = {imported.domain for imported in proto.opset_import}
    for domain in {CONTRIB, *(node.domain for node in model.graph.all_nodes())} - known:
        proto.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return proto


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and (isinstance(tensor, ir.ExternalTensor) or tensor.nbytes > CONSTANT_BYTES)
