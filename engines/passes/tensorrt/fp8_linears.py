"""Linears with weights and activations in FP8 (E4M3), as Q/DQ around the matmul.

    Linear(x)   ->   MatMul(DequantizeLinear(QuantizeLinear(x, scale)), Transpose(DequantizeLinear(codes, scales)))

Runs for ``precision: fp8`` only, on float weights. Weights have one scale per output channel. Activations have one
static scale per linear group, from calibration: the largest ``|x|`` seen falls on the largest FP8 value, and what is
larger saturates. So no scale depends on a request, nor on its neighbours in a batch. Seventeen binades of range make
outliers harmless that INT8 could not hold. The arithmetic is that of quantization/qdq.py.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import Lowering, PassResult, constant, initializer, new_value
from engines.passes.graph.linears import group_name, is_head, is_linear, label_of, weights_of
from engines.passes.tensorrt.float_linears import finish, stacked_weight
from tapeout.errors import BuildError


def run(lowering: Lowering) -> PassResult:
    if lowering.precision != "fp8":
        return PassResult(0, (f"the build's precision is {lowering.precision}",))
    matched, notes = 0, list[str]()
    for node in [n for n in lowering.model.graph if is_linear(n)]:
        label = label_of(lowering, node)
        if is_head(lowering, node):
            notes.append(f"{label}: an output head; kept in {lowering.float_type}")
            continue
        _lower(lowering, node, label)
        matched += 1
    return PassResult(matched, tuple(notes))


def _activation_scale(lowering: Lowering, label: str) -> NDArray[np.float32]:
    largest = lowering.activation_max.get(label)
    if largest is None or not np.isfinite(largest) or largest <= 0:
        raise BuildError(
            f"{label} has {'no calibrated range' if largest is None else f'a calibrated range of {largest}'}",
            expected="a positive largest |x| for every linear that computes in FP8",
            remedy="run `dvc repro calibrate` for this model, or choose --precision int4 or fp16",
        )
    assert lowering.qdq is not None
    return lowering.qdq.fp8_input_scale(largest)


def _lower(lowering: Lowering, node: ir.Node, label: str) -> None:
    model, x = lowering.model, node.inputs[0]
    assert x is not None and lowering.qdq is not None
    codes, scales = lowering.qdq.fp8_weight(stacked_weight(lowering, weights_of(node)))
    stored = initializer(model, f"{label}.codes", codes)
    x_scale = constant(
        model, f"{group_name(lowering, node)}.input_scale", _activation_scale(lowering, group_name(lowering, node))
    )
    narrow = ir.node("QuantizeLinear", [x, x_scale], attributes={"output_dtype": ir.DataType.FLOAT8E4M3FN})
    narrow.outputs[0].shape, narrow.outputs[0].type = x.shape, ir.TensorType(ir.DataType.FLOAT8E4M3FN)
    wide = ir.node("DequantizeLinear", [narrow.outputs[0], x_scale], outputs=[new_value(f"{label}.input", x)])
    weight = ir.node(
        "DequantizeLinear", [stored, initializer(model, f"{label}.scales", scales)], attributes={"axis": 0}
    )
    weight.outputs[0].shape, weight.outputs[0].type = stored.shape, ir.TensorType(ir.DataType.FLOAT)
    transposed = ir.node("Transpose", [weight.outputs[0]], attributes={"perm": [1, 0]})
    matmul = ir.node("MatMul", [wide.outputs[0], transposed.outputs[0]])
    finish(lowering, node, [narrow, wide, weight, transposed, matmul], "MatMul fp8")
