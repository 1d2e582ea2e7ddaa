"""A sum or product of a parameter and a constant becomes one initializer, computed in float32 at the build.

    RMSNormalization(x, Add(weight, 1))   ->   RMSNormalization(x, folded weight)

ONNX Runtime folds constants with its CPU kernels, and has none for float16: the sum would be computed in every step,
from a weight that was rounded before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import Lowering, PassResult, deferred, replace
from tapeout.graph_analysis import is_parameter

_COMPUTED: Mapping[str, Callable[..., NDArray[Any]]] = {"Add": np.add, "Mul": np.multiply, "Sub": np.subtract}


def run(lowering: Lowering) -> PassResult:
    matched = 0
    for node in [n for n in lowering.model.graph if n.op_type in _COMPUTED and n.domain == ""]:
        left, right = node.inputs
        if left is None or right is None or not (left.is_initializer() and right.is_initializer()):
            continue
        name = next((value.name for value in (left, right) if is_parameter(value)), None)
        if name is None or left.shape is None or right.shape is None:
            continue
        shape = np.broadcast_shapes(left.shape.numpy(), right.shape.numpy())
        folded = deferred(
            lowering.model,
            f"{name}.folded",
            shape,
            ir.DataType.FLOAT,
            partial(_value, lowering, node.op_type, _read(left), _read(right)),
        )
        replace(lowering.model, [node], [], {node.outputs[0]: folded})
        matched += 1
    return PassResult(matched, () if matched else ("no parameter meets a constant",))


def _read(value: ir.Value) -> str | NDArray[Any]:
    """A constant's value, or a parameter's name: its value is in the checkpoint."""
    tensor = value.const_value
    assert tensor is not None
    return (value.name or "") if isinstance(tensor, ir.ExternalTensor) else tensor.numpy()


def _value(lowering: Lowering, op_type: str, *inputs: str | NDArray[Any]) -> NDArray[np.float32]:
    arrays = [lowering.weights.weight(one) if isinstance(one, str) else one for one in inputs]
    return _COMPUTED[op_type](*arrays).astype(np.float32)
