"""Linears with weights and activations in FP8 (E4M3), as Q/DQ around the matmul.

    Linear(x)   ->   MatMul(DequantizeLinear(QuantizeLinear(x, scale)), Transpose(DequantizeLinear(codes, scales)))

Runs for precisions that have FP8, on weights in it (``tapeout/formats/fp8.py``). Weights have one scale per output
channel. Activations have one static scale per linear group, from calibration: the largest ``|x|`` seen falls on the
largest FP8 value, and what is larger saturates. So no scale depends on a request, nor on its neighbours in a batch.
Seventeen binades of range make outliers harmless that INT8 could not hold.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from engines.lowerings import lowering_of
from engines.passes.base import Lowering, PassResult, constant, initializer, new_value
from engines.passes.graph.linears import group_name, is_head, is_linear, label_of, quantized
from engines.passes.tensorrt.float_linears import finish
from tapeout.errors import BuildError
from tapeout.quantized import QuantizedWeight

BACKEND, NAME = "tensorrt", "fp8_linears"  # the row of engines/lowerings.py; tensorrt-rtx has the same
FORMAT = "fp8"


def run(lowering: Lowering) -> PassResult:
    if FORMAT not in lowering.formats:
        return PassResult(0, (f"the build's precision is {lowering.precision}",))
    matched, notes = 0, list[str]()
    for node in [n for n in lowering.model.graph if is_linear(n)]:
        label, parts = label_of(lowering, node), quantized(lowering, node)
        if is_head(lowering, node):
            notes.append(f"{label}: an output head; kept in {lowering.float_type}")
        elif not parts or any(NAME not in lowering_of(part.scheme, BACKEND).passes for part in parts):
            notes.append(f"{label}: no FP8 weights in the checkpoint; left to the next kernel pass")
        else:
            _lower(lowering, node, label, parts)
            matched += 1
    return PassResult(matched, tuple(notes))


def _input_scale(lowering: Lowering, group: str, label: str, parts: list[QuantizedWeight]) -> ir.Value:
    """One constant for the linears of a group, which read one input."""
    scales = {part.input_scale for part in parts}
    scale = scales.pop()
    wrong = "" if scale is not None and np.isfinite(scale) and scale > 0 else f"an input scale of {scale}"
    if not wrong:
        shared = constant(lowering.model, f"{group}.input_scale", np.array(scale, np.float32))
        assert shared.const_value is not None
        if not scales and shared.const_value.numpy() == np.float32(scale or 0):
            return shared
        wrong = f"an input scale of {scale} beside {shared.const_value.numpy()} on the same input"
    raise BuildError(
        f"{label} has {wrong}",
        expected="one positive scale for the linears that read an input in FP8",
        remedy="run `dvc repro quantize`, or build from another checkpoint",
    )


def _lower(lowering: Lowering, node: ir.Node, label: str, parts: list[QuantizedWeight]) -> None:
    model, x = lowering.model, node.inputs[0]
    assert x is not None
    codes = np.concatenate([part.codes for part in parts]).view(ml_dtypes.float8_e4m3fn)
    scales = np.concatenate([part.scales[:, 0] for part in parts]).astype(np.float32)
    stored = initializer(model, f"{label}.codes", codes)
    x_scale = _input_scale(lowering, group_name(lowering, node), label, parts)
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
