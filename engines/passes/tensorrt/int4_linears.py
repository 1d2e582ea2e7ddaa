"""Linears in 4-bit blocks, as the standard operator TensorRT compiles to a weight-only kernel.

    Linear(x)   ->   MatMul(x, DequantizeLinear(codes int4 [K, N], scales [K / block, N]) {axis: 0, block_size})

Runs for precisions that have 4-bit blocks, on symmetric 4-bit codes. TensorRT knows no zero points
and documents positive scales only (``IDequantizeLayer`` in NvInfer.h), so an asymmetric linear stays in float, and a
block whose scale is negative is negated (quantization/qdq.py). That costs much (docs/targets.md), and is said; a
checkpoint quantized with ``positive_scales`` has no such block.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from engines.lowerings import lowering_of
from engines.passes.base import Lowering, PassResult, initializer
from engines.passes.graph.linears import is_head, is_linear, label_of, quantized
from engines.passes.tensorrt.float_linears import finish
from tapeout.quantized import QuantizedWeight

BACKEND, NAME = "tensorrt", "int4_linears"  # the row of engines/lowerings.py; tensorrt-rtx has the same
FORMAT = "int4"


def run(lowering: Lowering) -> PassResult:
    if FORMAT not in lowering.formats:
        return PassResult(0, (f"the build's precision is {lowering.precision}",))
    matched, notes = 0, list[str]()
    for node in [n for n in lowering.model.graph if is_linear(n)]:
        label = label_of(lowering, node)
        parts = quantized(lowering, node)
        reason = "an output head" if is_head(lowering, node) else _unfit(parts)
        if reason:
            notes.append(f"{label}: {reason}; left to the next kernel pass")
            continue
        lost = _lower(lowering, node, label, parts)
        if lost:
            size = sum(part.codes.size for part in parts)
            notes.append(f"{label}: {lost} of {size} codes lost a step, their blocks having negative scales")
        matched += 1
    return PassResult(matched, tuple(notes))


def _unfit(parts: list[QuantizedWeight]) -> str:
    if not parts:
        return "float weights in the checkpoint"
    schemes = {(part.scheme.format, part.group_size) for part in parts}
    if len(schemes) > 1 or NAME not in lowering_of(parts[0].scheme, BACKEND).passes:
        return f"its checkpoint has {' and '.join(sorted({part.scheme.name for part in parts}))}"
    if any(part.zero_points is not None for part in parts):
        return "asymmetric codes, and TensorRT takes no zero points"
    return ""


def _lower(lowering: Lowering, node: ir.Node, label: str, parts: list[QuantizedWeight]) -> int:
    """How many codes lost a step."""
    assert lowering.qdq is not None
    codes, scales, lost = lowering.qdq.positive_int4(parts)
    block = codes.shape[1] // scales.shape[1]
    packed = initializer(lowering.model, f"{label}.codes", np.ascontiguousarray(codes.T).astype(ml_dtypes.int4))
    scale = initializer(lowering.model, f"{label}.scales", np.ascontiguousarray(scales.T))
    weight = ir.node("DequantizeLinear", [packed, scale], attributes={"axis": 0, "block_size": block})
    matmul = ir.node("MatMul", [node.inputs[0], weight.outputs[0]])
    weight.outputs[0].name = f"{label}.weight"
    weight.outputs[0].shape, weight.outputs[0].type = packed.shape, ir.TensorType(ir.DataType.FLOAT)
    finish(lowering, node, [weight, matmul], f"MatMul int4 g{block}")
    return lost
