"""What a graph computes from small parameters alone becomes an initializer, which is computed when it is written.

Neg(Exp(A_log))                     ->   an initializer
Neg(Reshape(Exp(A_log), shape))     ->   an initializer
Add(weight, 1)                      ->   an initializer

ONNX Runtime folds constants with its CPU kernels, and has none for float16: such a sum would be computed in every step,
from a weight that was rounded before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import Lowering, PassResult, deferred, parameter_behind, producer_of, remove_dead

MOST = 1 << 16  # elements of what is folded

Float = NDArray[np.float32]
_FUNCTIONS: dict[str, Callable[..., Float]] = {
    "Add": np.add,
    "Exp": np.exp,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Sub": np.subtract,
}


def run(lowering: Lowering) -> PassResult:
    model, matched = lowering.model, 0
    for node in [n for n in model.graph if n.domain == "" and n.op_type in _FUNCTIONS]:
        inputs = [one for value in node.inputs if (one := _initializer(value)) is not None]
        shape = fixed_shape(node.outputs[0])
        floats = all(value.dtype == ir.DataType.FLOAT for value in inputs)
        if len(inputs) < len(node.inputs) or not floats or shape is None or np.prod(shape) > MOST:
            continue
        name = next((found for value in inputs if "." in (found := parameter_behind(value))), "constants.value")
        while name in model.graph.initializers:  # no checkpoint has it, and users know what it is of
            module, _, parameter = name.rpartition(".")
            name = f"{module}.folded.{parameter}"
        shapes = [fixed_shape(value) for value in node.inputs if value is not None]
        read = [_reshaped(reader(lowering, value), to) for value, to in zip(inputs, shapes, strict=True)]
        make = partial(_computed, _FUNCTIONS[node.op_type], shape, read)
        node.outputs[0].replace_all_uses_with(deferred(model, name, shape, ir.DataType.FLOAT, make))
        remove_dead(model, [node])
        matched += 1
    return PassResult(matched, () if matched else ("nothing is computed from parameters alone",))


def _initializer(value: ir.Value | None) -> ir.Value | None:
    """An initializer, or the one that another shape is given."""
    reshape = producer_of(value, "Reshape")
    if reshape is not None and value is not None and fixed_shape(value) is not None:
        value = reshape.inputs[0]
    return value if value is not None and value.is_initializer() else None


def _reshaped(read: Callable[[], Float], shape: tuple[int, ...] | None) -> Callable[[], Float]:
    return read if shape is None else lambda: read().reshape(shape)


def fixed_shape(value: ir.Value) -> tuple[int, ...] | None:
    sizes = tuple(size for size in value.shape or () if isinstance(size, int))
    return sizes if value.shape is not None and len(sizes) == len(value.shape) else None


def reader(lowering: Lowering, value: ir.Value) -> Callable[[], Float]:
    """What gives an initializer's elements: from the checkpoint, where the graph has only its place."""
    tensor = value.const_value
    assert tensor is not None and value.name is not None
    if isinstance(tensor, ir.ExternalTensor):
        return partial(lowering.weights.weight, value.name)
    return lambda: np.asarray(tensor.numpy(), np.float32)


def _computed(function: Callable[..., Float], shape: tuple[int, ...], read: list[Callable[[], Float]]) -> Float:
    return np.ascontiguousarray(np.asarray(function(*(each() for each in read)), np.float32).reshape(shape))
