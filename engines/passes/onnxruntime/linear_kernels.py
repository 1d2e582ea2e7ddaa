"""Linears as operators that ONNX Runtime has: the last kernel pass, which takes all that is left.

    Linear(x) over codes               ->   MatMulNBits(x, packed codes, scales[, zero points][, bias])
    Linear(x) over floats, of rates    ->   FloatLinear(x, weight in tiles[, bias]), where there is one
    Linear(x) over floats              ->   MatMul(x, transposed weight) [+ bias]

Merged linears are stacked along their output rows. MatMulNBits layout (ONNX Runtime docs/ContribOperators.md):
B is ``[N, ceil(K/block), block·bits/8]`` uint8, low nibble first along K; zero points are packed the same way.
Accuracy level 4 quantizes activations to int8 per token and block, so tokens of different requests share nothing.
Codes of bits that MatMulNBits does not have are widened (engines/lowerings.py).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.lowerings import lowering_of
from engines.passes.base import CONTRIB, Lowering, PassResult, deferred, dimension, initializer, new_value
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
from engines.passes.onnxruntime.routers import float_linear
from tapeout.operators import rate_in
from tapeout.quantized import QuantizedWeight

ACCURACY_LEVEL = 4


def run(lowering: Lowering) -> PassResult:
    nodes = [n for n in lowering.model.graph if is_linear(n)]
    for node in nodes:
        _lower(lowering, node)
    lowering.model.opset_imports[CONTRIB] = 1
    return PassResult(len(nodes), () if nodes else ("no linear was left to it",))


def _lower(lowering: Lowering, node: ir.Node) -> None:
    label, parts = label_of(lowering, node), quantized(lowering, node)
    one_scheme(label, _read(lowering, node))
    bits = lowering_of(parts[0].scheme, "onnxruntime").stock_bits if parts else 0
    if bits:
        nodes = [_nbits(lowering, label, node, bits)]
        put(lowering, node, nodes, f"MatMulNBits {described(parts[0])}{in_more_bits(parts[0], bits)}")
    elif not parts and rate_in(label) and not lowering.kernels.unsupported("FloatLinear"):
        put(lowering, node, [_rate(lowering, label, node)], "FloatLinear fp32")
    else:
        decoded = f", decoded from {parts[0].scheme.name}" if parts else ""
        put(lowering, node, float_nodes(lowering, label, node), f"MatMul fp32{decoded}")


def _rate(lowering: Lowering, label: str, node: ir.Node) -> ir.Node:
    names, (x,) = weights_of(node), node.inputs
    assert x is not None

    def read() -> NDArray[np.float32]:
        return np.concatenate([lowering.weights.weight(name) for name in names])

    outputs, columns = sum(out_features_of(node)), dimension(x, -1)
    return float_linear(
        lowering.model, label, x, (outputs, columns), read, stacked_bias(lowering, node), node.outputs[0]
    )


def float_nodes(lowering: Lowering, label: str, node: ir.Node) -> list[ir.Node]:
    """A matmul over the decoded weight, and its bias."""
    names, first = weights_of(node), _read(lowering, node)[0]
    columns = (first.codes if isinstance(first, QuantizedWeight) else first).shape[1]
    # Not ".weight": an untied head's parameter is called so, and is still an initializer here.
    weight = deferred(
        lowering.model,
        f"{label}.transposed",
        (columns, sum(out_features_of(node))),
        ir.DataType.FLOAT,
        lambda: np.ascontiguousarray(np.concatenate([lowering.weights.weight(name) for name in names], axis=0).T),
    )
    nodes = [ir.node("MatMul", [node.inputs[0], weight], outputs=[new_value(f"{label}.matmul", node.outputs[0])])]
    bias = stacked_bias(lowering, node)
    if bias is not None:
        nodes.append(
            ir.node("Add", [nodes[0].outputs[0], bias], outputs=[new_value(f"{label}.biased", node.outputs[0])])
        )
    return nodes


def _read(lowering: Lowering, node: ir.Node) -> list[QuantizedWeight | NDArray[np.float32]]:
    return [lowering.weights.linear(name) for name in weights_of(node)]


def _widened(lowering: Lowering, node: ir.Node, bits: int) -> list[QuantizedWeight]:
    return [widened(part, bits) for part in _read(lowering, node)]


def _nbits(lowering: Lowering, label: str, node: ir.Node, bits: int) -> ir.Node:
    parts = _widened(lowering, node, bits)
    block, model, columns = parts[0].group_size, lowering.model, parts[0].codes.shape[1]
    outputs, blocks = sum(len(part.codes) for part in parts), -(-columns // block)
    scales = np.concatenate([part.scales for part in parts]).astype(np.float32)
    zero_points = [pack(part.zero_points, bits) for part in parts if part.zero_points is not None]
    shape = (outputs, blocks, block * bits // 8)

    def packed() -> NDArray[np.uint8]:
        padded = np.full((outputs, blocks * block), 1 << (bits - 1), np.uint8)
        np.concatenate([part.codes for part in _widened(lowering, node, bits)], out=padded[:, :columns])
        return pack(padded, bits).reshape(shape)

    inputs = [
        node.inputs[0],
        deferred(model, f"{label}.codes", shape, ir.DataType.UINT8, packed),
        initializer(model, f"{label}.scales", scales),
        initializer(model, f"{label}.zero_points", np.concatenate(zero_points)) if zero_points else None,
        None,
        stacked_bias(lowering, node),
    ]
    return ir.node(
        "MatMulNBits",
        trimmed(inputs),
        attributes={"K": columns, "N": outputs, "bits": bits, "block_size": block, "accuracy_level": ACCURACY_LEVEL},
        domain=CONTRIB,
        outputs=[new_value(f"{label}.matmul", node.outputs[0])],
    )


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes ``[rows, n]`` to bytes ``[rows, ceil(n·bits/8)]``, first code in the lowest bits.

    >>> pack(np.array([[1, 2, 3]], np.uint8), 4)
    array([[33,  3]], dtype=uint8)
    """
    if bits == 8:
        return np.ascontiguousarray(codes)
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
