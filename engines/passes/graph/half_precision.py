"""Every float tensor of a strongly typed graph in one 16-bit type; logits leave in float32.

Inserts no casts but the last one: weights, caches and constants change type, and with them every operator between.
Scales of quantized tensors follow, since a dequantized tensor has the type of its scale. Norms and softmax keep
float32 inside (``stash_type`` of RMSNormalization, the kernels of Attention).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import Lowering, PassResult, defer
from tapeout.errors import BuildError

# Inputs that stay in float32, by their places: the scales of a KV cache.
FLOAT32_INPUTS = {"PagedAttention": (14, 15)}
TYPES: dict[str, tuple[ir.DataType, Any]] = {
    "fp16": (ir.DataType.FLOAT16, np.float16),
    "bf16": (ir.DataType.BFLOAT16, ml_dtypes.bfloat16),
}


def run(lowering: Lowering) -> PassResult:
    graph = lowering.model.graph
    dtype, element = TYPES[lowering.float_type]
    changed = 0
    for name, value in graph.initializers.items():
        if value.dtype != ir.DataType.FLOAT or _stays(value):
            continue
        tensor = value.const_value
        assert tensor is not None
        value.type = ir.TensorType(dtype)
        defer(value, partial(_narrowed, lowering, name, tensor, element))
        changed += 1
    for value in graph.inputs:
        if value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(dtype)
    for node in graph:
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", dtype)
        if node.op_type == "ConstantOfShape" and node.outputs[0].dtype == ir.DataType.FLOAT:
            filled = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, "f4")
            node.attributes["value"] = ir.AttrTensor(
                "value", ir.tensor(_narrow(node.name or "", filled, element), dtype)
            )
        for output in node.outputs:
            if output.dtype == ir.DataType.FLOAT:
                output.type = ir.TensorType(dtype)
    logits = graph.outputs[0]
    cast = ir.node("Cast", [logits], attributes={"to": ir.DataType.FLOAT})
    result = cast.outputs[0]
    result.name, logits.name = logits.name, f"{logits.name}.{lowering.float_type}"
    result.shape, result.type = logits.shape, ir.TensorType(ir.DataType.FLOAT)
    graph.append(cast)
    graph.outputs[0] = result
    return PassResult(changed)


def _stays(value: ir.Value) -> bool:
    return bool(value.uses()) and all(use.idx in FLOAT32_INPUTS.get(use.node.op_type, ()) for use in value.uses())


def _narrowed(lowering: Lowering, name: str, tensor: ir.TensorProtocol, element: Any) -> NDArray[Any]:
    values = lowering.weights.weight(name) if isinstance(tensor, ir.ExternalTensor) else tensor.numpy()
    return _narrow(name, values, element)


def _narrow(name: str, values: NDArray[Any], element: Any) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        narrowed = values.astype(element)
    if not np.isfinite(narrowed.astype(np.float32)).all() and np.isfinite(values).all():
        raise BuildError(
            f"{name} holds values up to {np.abs(values).max():.3g}",
            expected=f"what {np.dtype(element).name} can represent",
            remedy="build with --precision bf16, or for a target that computes in float32",
        )
    return narrowed
