"""Each linear gets the kernel its weights ask for: the last pass that knows what a linear is.

    Linear(x) over codes    ->   MatMulNBits(x, packed codes, scales[, zero points][, bias])   int8 accumulation
    Linear(x) over floats   ->   MatMul(x, transposed weight) [+ bias]

Merged linears are stacked along their output rows. MatMulNBits layout (ONNX Runtime docs/ContribOperators.md):
B is ``[N, ceil(K/block), block·bits/8]`` uint8, low nibble first along K; zero points are packed the same way.
Accuracy level 4 quantizes activations to int8 per row and block, so rows of different requests share nothing.
Codes of 6 bits, which MatMulNBits does not have, are widened to 8: the same weights to the bit, in more bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.bundle import LinearOutput
from engines.passes.base import CONTRIB, Lowering, PassResult, initializer, new_value, replace
from engines.passes.linears import biases_of, is_linear, out_features_of, weights_of
from tapeout.errors import BuildError

ACCURACY_LEVEL = 4
BITS = (4, 8)


def run(lowering: Lowering) -> PassResult:
    nodes = [n for n in lowering.model.graph if is_linear(n)]
    for node in nodes:
        _lower(lowering, node)
    lowering.model.opset_imports[CONTRIB] = 1
    return PassResult(len(nodes), () if nodes else ("no linear was left to it",))


def _lower(lowering: Lowering, node: ir.Node) -> None:
    names, biases = weights_of(node), biases_of(node)
    parts = [lowering.weights.linear(name) for name in names]
    quantized = [hasattr(part, "codes") for part in parts]
    group = lowering.group_of(names[0])
    # A group that was not merged has a kernel for each of its members, named after it.
    label = group.name if group is not None and len(names) == len(group.members) else names[0]
    bias = stacked_bias(lowering, label, biases)
    if all(quantized):
        one_format(label, parts)
        lowered = _nbits(lowering, label, node, [widened(part) for part in parts], bias)
        symmetry = "sym" if parts[0].zero_points is None else "asym"
        kind = f"MatMulNBits {parts[0].bits}-bit g{parts[0].group_size} {symmetry}{in_more_bits(parts[0])}"
    elif not any(quantized):
        lowered = _float(lowering, label, node, parts, bias)
        kind = "MatMul fp32"
    else:
        raise BuildError(f"{label} mixes quantized and float weights in one merged product")
    lowering.plan[label] = kind
    replace(lowering.model, [node], lowered, {node.outputs[0]: lowered[-1].outputs[0]})
    rows = tuple(out_features_of(node))
    lowering.linear_outputs.append(
        LinearOutput(value=lowered[-1].outputs[0].name or "", weights=tuple(names), rows=rows)
    )


def one_format(label: str, parts: list[Any]) -> None:
    """:class:`BuildError` for parts of a merged product that are stored differently."""
    formats = {(p.bits, p.group_size, p.zero_points is None) for p in parts}
    if len(formats) > 1:
        raise BuildError(
            f"{label} mixes formats {sorted(formats)} in one merged product",
            expected="one format for linears that read the same input",
            remedy="let one rule of plan.kernels match the whole group",
        )


def widened(linear: Any) -> Any:
    """Codes in bits that ONNX Runtime's own operators have; those of 6 bits are decoded to the same from 8."""
    if linear.bits in BITS:
        return linear
    up = 0 if linear.zero_points is not None else (1 << 7) - (1 << (linear.bits - 1))  # from midpoint to midpoint
    return dataclasses.replace(linear, codes=linear.codes + np.uint8(up), bits=8)


def in_more_bits(linear: Any) -> str:
    """For a bundle's record."""
    return "" if linear.bits in BITS else ", stored in 8 bits"


def stacked_bias(lowering: Lowering, label: str, names: list[str]) -> ir.Value | None:
    """The biases of a product as one initializer ``[N]``; None where there are none."""
    if not any(names):
        return None
    return initializer(lowering.model, f"{label}.biases", np.concatenate([lowering.weights.tensor(n) for n in names]))


def _float(
    lowering: Lowering, label: str, node: ir.Node, parts: list[NDArray[np.float32]], bias: ir.Value | None
) -> list[ir.Node]:
    # Not ".weight" and ".bias": an untied head's parameters are called so, and are still initializers here.
    weight = initializer(lowering.model, f"{label}.transposed", np.ascontiguousarray(np.concatenate(parts, axis=0).T))
    nodes = [ir.node("MatMul", [node.inputs[0], weight], outputs=[new_value(f"{label}.matmul", node.outputs[0])])]
    if bias is not None:
        nodes.append(
            ir.node("Add", [nodes[0].outputs[0], bias], outputs=[new_value(f"{label}.biased", node.outputs[0])])
        )
    return nodes


def _nbits(lowering: Lowering, label: str, node: ir.Node, parts: list[Any], bias: ir.Value | None) -> list[ir.Node]:
    bits, block = parts[0].bits, parts[0].group_size
    codes = np.concatenate([p.codes for p in parts], axis=0)
    scales = np.concatenate([p.scales for p in parts], axis=0).astype(np.float32)
    rows, columns = codes.shape
    blocks = -(-columns // block)
    padded = np.full((rows, blocks * block), 1 << (bits - 1), np.uint8)
    padded[:, :columns] = codes
    model = lowering.model
    inputs: list[ir.Value | None] = [
        node.inputs[0],
        initializer(model, f"{label}.codes", pack(padded, bits).reshape(rows, blocks, block * bits // 8)),
        initializer(model, f"{label}.scales", scales),
    ]
    if parts[0].zero_points is not None:
        zero_points = np.concatenate([p.zero_points for p in parts], axis=0)
        inputs.append(initializer(model, f"{label}.zero_points", pack(zero_points, bits)))
    if bias is not None:
        inputs += [None] * (5 - len(inputs)) + [bias]
    return [
        ir.node(
            "MatMulNBits",
            inputs,
            attributes={
                "K": columns,
                "N": rows,
                "bits": bits,
                "block_size": block,
                "accuracy_level": ACCURACY_LEVEL,
            },
            domain=CONTRIB,
            outputs=[new_value(f"{label}.matmul", node.outputs[0])],
        )
    ]


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
