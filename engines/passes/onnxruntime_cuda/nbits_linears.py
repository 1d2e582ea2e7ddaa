"""Linears as operators of ONNX Runtime's CUDA provider: the kernel pass of ``ort-cuda``, which takes all of them.

    Linear(x) over codes    ->   MatMulNBits(x, packed codes, scales[, zero points][, bias])   weight-only
    Linear(x) over floats   ->   MatMul(x, transposed weight) [+ bias]

The provider's fused kernel for any number of tokens takes symmetric codes of 4 and 8 bits in blocks of 32, without a
bias; all else is decoded to float16 in every step of more than 16 tokens, of 5 where codes have 8 bits. So a symmetric
weight in larger groups is stored in blocks of 32 with each scale repeated, the same weight in at most half a bit more,
and its bias is added by a node of its own. Where the fused kernel has no tile for the input channels, blocks are of 16,
which it does not take: it would be chosen and fail. Asymmetric codes keep their groups. Codes of 5 and 6 bits are
widened to 8. What has no blocks that the provider computes is decoded to the float type. The plan of the bundle names
all of that, and the pass says why.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.lowerings import lowering_of
from engines.passes.base import CONTRIB, Lowering, PassResult, deferred, initializer, new_value
from engines.passes.graph.linears import (
    described,
    is_linear,
    label_of,
    one_scheme,
    out_features_of,
    put,
    quantized,
    stacked_bias,
    trimmed,
    weights_of,
)
from engines.passes.onnxruntime.block_linears import in_more_bits, widened
from engines.passes.onnxruntime.linear_kernels import float_nodes, pack
from tapeout.quantized import QuantizedWeight

BACKEND = "onnxruntime-cuda"  # the row of engines/lowerings.py
FAST_BLOCK = 32  # of the provider's fused kernel
FAST_COLUMNS = 64  # input channels of its tiles
BLOCKS = (16, 32, 64, 128)  # input channels; of 512 the provider gave zeros without an error


@dataclass(frozen=True)
class _Stored:
    """``block``: input channels of one scale. ``note``: why the fused kernel does not take the weight, or nothing."""

    bits: int
    block: int
    note: str


def run(lowering: Lowering) -> PassResult:
    nodes = [n for n in lowering.model.graph if is_linear(n)]
    notes: list[str] = []
    for node in nodes:
        label, parts = label_of(lowering, node), quantized(lowering, node)
        one_scheme(label, [lowering.weights.linear(name) for name in weights_of(node)])
        if not parts:
            put(lowering, node, float_nodes(lowering, label, node), f"MatMul {lowering.float_type}")
            continue
        reason = _unfit(parts[0])
        if reason:
            kind = f"MatMul {lowering.float_type}, decoded from {parts[0].scheme.name}"
            put(lowering, node, float_nodes(lowering, label, node), kind)
            notes.append(f"{label}: {reason}; decoded to {lowering.float_type}")
            continue
        stored = _stored(parts[0])
        put(lowering, node, _nbits(lowering, label, node, parts, stored), _described(parts[0], stored))
        if stored.note:
            notes.append(f"{label}: {stored.note}")
    lowering.model.opset_imports[CONTRIB] = 1
    return PassResult(len(nodes), tuple(notes) if nodes else ("no linear in the graph",))


def _unfit(weight: QuantizedWeight) -> str:
    """Why MatMulNBits cannot compute with a weight."""
    size, columns = weight.group_size, weight.codes.shape[1]
    if weight.scheme.activations == "int8":
        return "the provider has no linear with static int8 inputs"
    if not lowering_of(weight.scheme, BACKEND).stock_bits:
        return f"MatMulNBits has no codes of {weight.scheme.format}"
    # A group is a block, or several blocks of 32 that have its scale.
    if columns % size or (size not in BLOCKS and (size % FAST_BLOCK or not weight.scheme.symmetric)):
        return f"groups of {size} of {columns} input channels, where MatMulNBits takes {', '.join(map(str, BLOCKS))}"
    return ""


def _stored(weight: QuantizedWeight) -> _Stored:
    bits = lowering_of(weight.scheme, BACKEND).stock_bits
    if widened(weight, bits).zero_points is not None:
        return _Stored(bits, weight.group_size, "zero points, which the fused kernel for many tokens does not take")
    if weight.group_size % FAST_BLOCK:
        return _Stored(bits, weight.group_size, f"groups of {weight.group_size}, too small for the fused kernel")
    if (columns := weight.codes.shape[1]) % FAST_COLUMNS:
        return _Stored(bits, FAST_BLOCK // 2, f"{columns} input channels, for which the fused kernel has no tile")
    return _Stored(bits, FAST_BLOCK, "")


def _described(weight: QuantizedWeight, stored: _Stored) -> str:
    blocks = "" if stored.block == weight.group_size else f", in blocks of {stored.block}"
    return f"MatMulNBits {described(weight)}{in_more_bits(weight, stored.bits)}{blocks}"


def _nbits(
    lowering: Lowering, label: str, node: ir.Node, parts: list[QuantizedWeight], stored: _Stored
) -> list[ir.Node]:
    names, columns = weights_of(node), parts[0].codes.shape[1]
    outputs, blocks = sum(out_features_of(node)), columns // stored.block
    shape = (outputs, blocks, stored.block * stored.bits // 8)
    wide = [widened(part, stored.bits) for part in parts]  # it may have other scales
    scales = np.concatenate([part.scales for part in wide]).astype(np.float32)
    zero_points = [pack(part.zero_points, stored.bits) for part in wide if part.zero_points is not None]

    def packed() -> NDArray[np.uint8]:
        codes = [widened(lowering.weights.linear(name), stored.bits).codes for name in names]
        return pack(np.concatenate(codes), stored.bits).reshape(shape)

    inputs = [
        node.inputs[0],
        deferred(lowering.model, f"{label}.codes", shape, ir.DataType.UINT8, packed),
        initializer(lowering.model, f"{label}.scales", np.repeat(scales, parts[0].group_size // stored.block, axis=1)),
        initializer(lowering.model, f"{label}.zero_points", np.concatenate(zero_points)) if zero_points else None,
    ]
    matmul = ir.node(
        "MatMulNBits",
        trimmed(inputs),
        attributes={"K": columns, "N": outputs, "bits": stored.bits, "block_size": stored.block},
        domain=CONTRIB,
        outputs=[new_value(f"{label}.matmul", node.outputs[0])],
    )
    bias = stacked_bias(lowering, node)
    if bias is None:
        return [matmul]
    # ONNX Runtime would fuse an Add into MatMulNBits again.
    return [matmul, ir.node("Sum", [matmul.outputs[0], bias], outputs=[new_value(f"{label}.biased", node.outputs[0])])]
