"""Linears over codes become BlockLinear, a kernel of our own: bandwidth-bound at one token and compute-bound at many.

    Linear(x) over codes   ->   BlockLinear(x, codes, scales[, zero points][, bias])

What it computes is what MatMulNBits does at accuracy level 4: inputs rounded to int8 for every token and block. Codes
of 4, 5, 6 and 8 bits are packed as the kernel reads them (engines/kernels/cpu/source/codes.h):

tile   16 output channels, the lanes of a vector; N is padded to whole pairs of tiles
step   4 input channels: a step of a tile is 64 codes, lane by lane
8 bits   64 bytes a step
4 bits   64 bytes a pair of steps, the first in the low nibbles
6 bits   192 bytes four steps: 64 with the low four bits of the first two, 64 of the others, 64 with all high bits
5 bits   320 bytes eight steps: 64 with the low four bits of each two, 64 with all high bits. Groups of 16 channels
         have only four steps and are stored in 6 bits

Scales and zero points follow tile by tile, ``[tiles, blocks, 16]``; scales are float16 where that loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.kernels.cpu import DOMAIN, unsupported
from engines.lowerings import lowering_of
from engines.passes.base import Lowering, PassResult, deferred, initializer, new_value
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
from tapeout.quantized import QuantizedWeight

BACKEND = "onnxruntime"
TILE, STEP = 16, 4  # output channels, input channels
SMALLEST_BLOCK = 16  # input channels
PIECE_TILES = 64  # packed at a time


def run(lowering: Lowering) -> PassResult:
    nodes = [n for n in lowering.model.graph if is_linear(n)]
    reason = unsupported()
    if reason or not nodes:
        return PassResult(
            0, (f"every linear: {reason}; left to the next kernel pass" if reason else "no linear in the graph",)
        )
    matched, declined = 0, list[str]()
    for node in nodes:
        parts, label = quantized(lowering, node), label_of(lowering, node)
        reason = unfit(parts[0]) if parts else "it is not quantized"
        if reason:
            declined.append(f"{label}: {reason}; left to the next kernel pass")
            continue
        _lower(lowering, node, label, parts)
        matched += 1
    if matched:
        lowering.model.opset_imports[DOMAIN] = 1
    return PassResult(matched, tuple(declined))


def _lower(lowering: Lowering, node: ir.Node, label: str, parts: list[QuantizedWeight]) -> None:
    one_scheme(label, parts)
    bits = native_bits(parts[0])
    names = weights_of(node)
    codes, scales, zero_points = stacked(
        lowering.model, label, lambda: [widened(lowering.weights.linear(name), bits) for name in names]
    )
    linear = ir.node(
        "BlockLinear",
        trimmed([node.inputs[0], codes, scales, zero_points, stacked_bias(lowering, node)]),
        attributes={"N": sum(out_features_of(node))} | attributes(widened(parts[0], bits), scales),
        domain=DOMAIN,
        outputs=[new_value(f"{label}.matmul", node.outputs[0])],
    )
    put(lowering, node, [linear], f"BlockLinear {described(parts[0])}{in_more_bits(parts[0], bits)}")


def unfit(linear: QuantizedWeight) -> str:
    """Why native kernels cannot take these codes, as a clause; empty where they can."""
    size, columns = linear.group_size, linear.codes.shape[1]
    if not lowering_of(linear.scheme, BACKEND).native_bits:
        return f"native kernels take no weights in {linear.scheme.name}"
    if size % SMALLEST_BLOCK or columns % size:
        return f"groups of {size} of {columns} input channels, where native kernels take multiples of {SMALLEST_BLOCK}"
    return ""


def native_bits(linear: QuantizedWeight) -> int:
    """Bits of a code as native kernels store it."""
    bits = lowering_of(linear.scheme, BACKEND).native_bits
    return bits if linear.group_size % (STEP * joined_steps(bits)) == 0 else 6


def joined_steps(bits: int) -> int:
    """Steps whose codes lie together. A group has whole ones; 5-bit codes of smaller groups are stored in 6 bits."""
    return 8 if bits == 5 else 4


def widened(linear: QuantizedWeight | NDArray[np.float32], bits: int) -> QuantizedWeight:
    """The same weight to the bit, in integer codes of ``bits``, which hold it."""
    found = linear.widened(bits) if isinstance(linear, QuantizedWeight) else None
    assert found is not None, "engines.lowerings asks the format for the bits"
    return found


def in_more_bits(linear: QuantizedWeight, bits: int) -> str:
    """For a bundle's record."""
    return "" if linear.scheme.format == f"int{bits}" else f", stored in {bits} bits"


def stacked(
    model: ir.Model, label: str, read: Callable[[], Sequence[QuantizedWeight]]
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Codes, scales and zero points of linears that are stacked along their outputs, packed; None: no zero points.

    ``read`` gives the linears; codes are packed when they are written.
    """
    parts = read()
    bits, columns, outputs = parts[0].scheme.bits, parts[0].codes.shape[1], sum(len(part.codes) for part in parts)
    scales = np.concatenate([part.scales for part in parts]).astype(np.float32)
    zero_points = [part.zero_points for part in parts if part.zero_points is not None]
    half = scales.astype(np.float16)
    exact = bool(np.array_equal(half.astype(np.float32), scales))
    return (
        deferred(
            model,
            f"{label}.codes",
            (tiles_of(outputs), TILE * columns * bits // 8),
            ir.DataType.UINT8,
            lambda: packed(np.concatenate([part.codes for part in read()]), bits),
        ),
        initializer(model, f"{label}.scales", by_tile(half if exact else scales)),
        initializer(model, f"{label}.zero_points", by_tile(np.concatenate(zero_points))) if zero_points else None,
    )


def attributes(linear: QuantizedWeight, scales: ir.Value) -> dict[str, int]:
    """What the kernels must know of codes beside the tensors."""
    return {
        "K": linear.codes.shape[1],
        "bits": linear.scheme.bits,
        "block_size": linear.group_size,
        "half_scales": int(scales.dtype == ir.DataType.FLOAT16),
        "symmetric": int(linear.scheme.symmetric),
    }


def packed(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """``[N, K]`` codes as the kernels read them, ``[tiles, 16 · K · bits / 8]``. K is a multiple of 16.

    >>> packed(np.arange(32, dtype=np.uint8).reshape(2, 16) % 16, 4).shape
    (2, 128)
    """
    outputs, columns = codes.shape
    written = np.empty((tiles_of(outputs), TILE * columns * bits // 8), np.uint8)
    for first in range(0, len(written), PIECE_TILES):
        piece = written[first : first + PIECE_TILES]
        piece[:] = _packed(codes[first * TILE : (first + len(piece)) * TILE], len(piece), bits)
    return written


def _packed(codes: NDArray[np.uint8], tiles: int, bits: int) -> NDArray[np.uint8]:
    """Some tiles of :func:`packed`; rows that are not there have the code of zero."""
    outputs, columns = codes.shape
    padded = np.full((tiles * TILE, columns), 1 << (bits - 1), np.uint8)
    padded[:outputs] = codes
    steps = padded.reshape(tiles, TILE, columns // STEP, STEP).transpose(0, 2, 1, 3).reshape(tiles, -1, TILE * STEP)
    if bits == 8:
        return np.ascontiguousarray(steps).reshape(tiles, -1)
    if bits == 4:
        return _joined(steps[:, 0::2], steps[:, 1::2], 4).reshape(tiles, -1)
    together, width = joined_steps(bits), bits - 4  # width: high bits of a code
    steps = steps.reshape(tiles, columns // (together * STEP), together, TILE * STEP)
    low, high = (steps & np.uint8(15)).astype(np.uint8), (steps >> np.uint8(4)).astype(np.uint8)
    top = np.bitwise_or.reduce(high << (width * np.arange(together, dtype=np.uint8))[:, None], axis=2, keepdims=True)
    return np.concatenate([_joined(low[:, :, 0::2], low[:, :, 1::2], 4), top], axis=2).reshape(tiles, -1)


def _joined(low: NDArray[np.uint8], high: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Bytes of both, ``high`` above the lowest ``bits``."""
    return np.bitwise_or(low, np.left_shift(high, np.uint8(bits)), dtype=np.uint8)


def tiles_of(outputs: int) -> int:
    return 2 * -(-outputs // (2 * TILE))


def by_tile(values: NDArray[Any]) -> NDArray[Any]:
    """``[N, blocks]`` as ``[tiles, blocks, 16]``; lanes beyond N have the number one."""
    outputs, blocks = values.shape
    tiles = tiles_of(outputs)
    padded = np.ones((tiles * TILE, blocks), values.dtype)
    padded[:outputs] = values
    return np.ascontiguousarray(padded.reshape(tiles, TILE, blocks).transpose(0, 2, 1))
