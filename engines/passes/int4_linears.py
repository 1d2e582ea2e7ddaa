"""Linears in 4-bit blocks, as the standard operator TensorRT compiles to a weight-only kernel.

    Linear(x)   ->   MatMul(x, DequantizeLinear(codes int4 [K, N], scales [K / block, N]) {axis: 0, block_size})

Runs for ``precision: int4`` only, on symmetric 4-bit codes, which are taken as they are. TensorRT knows no zero points
and documents positive scales only (``IDequantizeLayer`` in NvInfer.h), so an asymmetric linear stays in float, and a
block whose scale is negative is negated, where the one code without an opposite (-8) loses a step. That costs much
(docs/targets.md), and is said; a checkpoint quantized with ``positive_scales`` has no such block.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import Lowering, PassResult, initializer
from engines.passes.float_linears import finish, is_head, label_of
from engines.passes.half_precision import scales_as_stored
from engines.passes.linears import is_linear, weights_of

MIDPOINT = 8  # unsigned code of zero
LARGEST_CODE, SMALLEST_CODE = 7, -8


def run(lowering: Lowering) -> PassResult:
    if lowering.precision != "int4":
        return PassResult(0, (f"the build's precision is {lowering.precision}",))
    matched, notes = 0, list[str]()
    for node in [n for n in lowering.model.graph if is_linear(n)]:
        label = label_of(lowering, node)
        parts = [lowering.weights.linear(name) for name in weights_of(node)]
        reason = "an output head" if is_head(lowering, node) else _unfit(parts)
        if reason:
            notes.append(f"{label}: {reason}; kept in {lowering.float_type}")
            continue
        codes, scales, note = signed_codes(parts)
        if note:
            notes.append(f"{label}: {note}")
        _lower(lowering, node, label, codes, scales)
        matched += 1
    return PassResult(matched, tuple(notes))


def _unfit(parts: list[Any]) -> str:
    if not all(hasattr(p, "codes") for p in parts):
        return "float weights in the checkpoint"
    formats = {(p.bits, p.group_size) for p in parts}
    if len(formats) > 1 or parts[0].bits != 4:
        return f"its checkpoint has {' and '.join(sorted({str(p.format) for p in parts}))}"
    if any(p.zero_points is not None for p in parts):
        return "asymmetric codes, and TensorRT takes no zero points"
    return ""


def signed_codes(parts: list[Any]) -> tuple[NDArray[np.int8], NDArray[np.float32], str]:
    """Codes ``[N, K]`` and positive scales ``[N, K / block]`` of the merged linear, and what was lost, in words."""
    codes = np.concatenate([p.codes for p in parts], axis=0).astype(np.int8) - MIDPOINT
    scales = np.concatenate([p.scales for p in parts], axis=0).astype(np.float32)
    blocks = codes.reshape(*scales.shape, -1)
    negative = scales < 0
    flipped = np.where(negative[:, :, None], np.minimum(-blocks, LARGEST_CODE), blocks).astype(np.int8)
    lost = int(((blocks == SMALLEST_CODE) & negative[:, :, None]).sum())
    note = f"{lost} of {codes.size} codes lost a step, their blocks having negative scales" if lost else ""
    return flipped.reshape(codes.shape), scales_as_stored(np.abs(scales)), note


def _lower(lowering: Lowering, node: ir.Node, label: str, codes: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
    block = codes.shape[1] // scales.shape[1]
    packed = initializer(lowering.model, f"{label}.codes", np.ascontiguousarray(codes.T).astype(ml_dtypes.int4))
    scale = initializer(lowering.model, f"{label}.scales", np.ascontiguousarray(scales.T))
    weight = ir.node("DequantizeLinear", [packed, scale], attributes={"axis": 0, "block_size": block})
    product = ir.node("MatMul", [node.inputs[0], weight.outputs[0]])
    weight.outputs[0].name = f"{label}.weight"
    weight.outputs[0].shape, weight.outputs[0].type = packed.shape, ir.TensorType(ir.DataType.FLOAT)
    finish(lowering, node, [weight, product])
    lowering.plan[label] = f"MatMul int4 g{block}"
