"""Linears in 4-bit blocks, as the standard operator TensorRT compiles to a weight-only kernel.

    Linear(x)   ->   MatMul(x, DequantizeLinear(codes int4 [K, N], scales [K / block, N]) {axis: 0, block_size})

Runs for ``precision: int4`` only. Codes of a symmetric 4-bit checkpoint are taken as they are. Float weights are
rounded here, to nearest, each block with the scale of the least squared error on a small grid. TensorRT knows no zero
points and only positive scales (QuantDequantLinearHelper of its ONNX parser), so an asymmetric linear stays in float,
and a block whose scale is negative is negated, where the one code without an opposite (-8) loses a step.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import Lowering, Outcome, initializer
from engines.passes.float_linears import finish, is_head, label_of
from engines.passes.half_precision import scales_as_stored
from engines.passes.linears import is_linear, weights_of

BLOCK = 64  # wanted input channels per scale, for weights that are rounded here
SMALLEST_BLOCK = 16
LARGEST_CODE, SMALLEST_CODE = 7, -8
CLIPS = tuple(1 - 0.04 * step for step in range(10))  # of the range up to the largest weight of a block


def run(lowering: Lowering) -> Outcome:
    if lowering.precision != "int4":
        return Outcome(0, (f"precision is {lowering.precision}",))
    matched, notes = 0, list[str]()
    for node in [n for n in lowering.model.graph if is_linear(n)]:
        label = label_of(lowering, node)
        parts = [lowering.weights.linear(name) for name in weights_of(node)]
        reason = "an output head" if is_head(lowering, node) else _unfit(parts)
        if reason:
            notes.append(f"{label}: {reason}; kept in {lowering.float_type}")
            continue
        codes, scales, note = _codes(parts)
        if note:
            notes.append(f"{label}: {note}")
        _lower(lowering, node, label, codes, scales)
        matched += 1
    return Outcome(matched, tuple(notes))


def _unfit(parts: list[Any]) -> str:
    if any(hasattr(p, "codes") for p in parts):
        if not all(hasattr(p, "codes") for p in parts):
            return "its members are partly float"
        formats = {(p.bits, p.group_size) for p in parts}
        if len(formats) > 1 or next(iter(formats))[0] != 4:
            return f"its checkpoint has {' and '.join(f'{bits} bits' for bits, _ in sorted(formats))}"
        if any(p.zero_points is not None for p in parts):
            return "asymmetric codes, and TensorRT takes no zero points"
    elif parts[0].shape[1] % SMALLEST_BLOCK:
        return f"{parts[0].shape[1]} input channels, not a multiple of {SMALLEST_BLOCK}"
    return ""


def _codes(parts: list[Any]) -> tuple[NDArray[np.int8], NDArray[np.float32], str]:
    """Signed codes ``[N, K]`` and positive scales ``[N, K / block]`` of the merged linear."""
    if not hasattr(parts[0], "codes"):
        weight = np.concatenate(parts, axis=0)
        block = BLOCK
        while weight.shape[1] % block:
            block //= 2
        return (*round_blocks(weight, block), "")
    codes = np.concatenate([p.codes for p in parts], axis=0).astype(np.int8) - 8
    scales = np.concatenate([p.scales for p in parts], axis=0).astype(np.float32)
    blocks = codes.reshape(*scales.shape, -1)
    negative = scales < 0
    flipped = np.where(negative[:, :, None], np.minimum(-blocks, LARGEST_CODE), blocks).astype(np.int8)
    lost = int(((blocks == SMALLEST_CODE) & negative[:, :, None]).sum())
    note = f"{lost} of {codes.size} codes lost a step, their blocks having negative scales" if lost else ""
    return flipped.reshape(codes.shape), np.abs(scales), note


def round_blocks(weight: NDArray[np.float32], block: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """``weight [N, K]`` to codes in ``[-8, 7]`` and positive float16 scales ``[N, K / block]``, to nearest.

    >>> codes, scales = round_blocks(np.array([[7.0, -3.0, 0.4, 0.0]], np.float32), 4)
    >>> (codes * scales).tolist()
    [[7.0, -3.0, 0.0, 0.0]]
    """
    blocks = weight.reshape(weight.shape[0], -1, block)
    largest = np.abs(blocks).max(axis=2)
    best_scale = np.zeros_like(largest)
    best_error = np.full_like(largest, np.inf)
    for clip in CLIPS:
        scale = scales_as_stored(largest * np.float32(clip / LARGEST_CODE))
        rounded = np.clip(np.rint(blocks / scale[:, :, None]), SMALLEST_CODE, LARGEST_CODE)
        error = np.square(rounded * scale[:, :, None] - blocks).sum(axis=2)
        better = error < best_error
        best_scale, best_error = np.where(better, scale, best_scale), np.where(better, error, best_error)
    codes = np.clip(np.rint(blocks / best_scale[:, :, None]), SMALLEST_CODE, LARGEST_CODE)
    return codes.astype(np.int8).reshape(weight.shape), best_scale


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
