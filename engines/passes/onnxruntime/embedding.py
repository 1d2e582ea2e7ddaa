"""The token embedding gathers codes where the checkpoint has them.

    Gather(embedding, ids)   ->   BlockGather(ids, codes, scales[, zero points])            of our own kernels
                             ->   BlockGather(ids, halves, ones)   of 16 bits, where they read weights in float
                             ->   GatherBlockQuantized(codes, ids, scales[, zero points])   where they do not run

A tied output head reads the same codes; the bundle's writer stores equal bytes once.
"""

from __future__ import annotations

import onnx_ir as ir

from engines.kernels.operators import DOMAIN
from engines.lowerings import lowering_of
from engines.passes.base import CONTRIB, Lowering, PassResult, deferred, initializer, new_value, replace
from engines.passes.onnxruntime import block_linears
from engines.passes.onnxruntime.block_linears import in_more_bits, widened
from engines.passes.onnxruntime.linear_kernels import pack
from tapeout.errors import BuildError
from tapeout.quantized import QuantizedWeight


def run(lowering: Lowering) -> PassResult:
    name = lowering.graph.embedding
    weight = lowering.weights.linear(name)
    nodes = [
        n
        for n in lowering.model.graph
        if n.op_type == "Gather" and n.inputs[0] is not None and n.inputs[0].name == name
    ]
    if not isinstance(weight, QuantizedWeight) and nodes and not lowering.kernels.unsupported_float(weight.shape[1]):
        lowering.plan["embedding"] = "BlockGather fp16"
        lowering.model.opset_imports[DOMAIN] = 1
        halves = block_linears.halves(lowering, "embedding", [name], *weight.shape)
        for node in nodes:
            gather = _gather(node, [*halves], block_linears.float_attributes(*weight.shape))
            replace(lowering.model, [node], [gather], {node.outputs[0]: gather.outputs[0]})
        return PassResult(len(nodes))
    if not isinstance(weight, QuantizedWeight):
        lowering.plan["embedding"] = f"Gather {lowering.float_type}"
        return PassResult(0, (f"{name}: it is not quantized; it is gathered in float",))
    if not nodes:
        return PassResult(0, (f"{name}: no Gather reads it; its codes are left unused",))
    known = lowering_of(weight.scheme, "onnxruntime")
    if known.embedding:
        raise BuildError(
            f"{name} in {weight.scheme.name}: {known.embedding}",
            expected="an embedding that is weight-only",
            remedy="run `dvc repro quantize`",
        )
    if not known.stock_bits:
        lowering.plan["embedding"] = f"Gather {lowering.float_type}, decoded from {weight.scheme.name}"
        return PassResult(0, (f"{name}: no operator gathers {weight.scheme.name}; it is gathered in float",))
    kernels = lowering.kernels
    reason = kernels.unsupported("BlockGather") or kernels.unsupported_weight(weight)
    bits = known.stock_bits if reason else kernels.code_bits(weight)
    for node in nodes:
        gather = (_stock if reason else _native)(lowering, name, bits, node)
        replace(lowering.model, [node], [gather], {node.outputs[0]: gather.outputs[0]})
        stored = in_more_bits(weight, bits)
        lowering.plan["embedding"] = f"{gather.op_type} {weight.scheme.codes} g{weight.group_size}{stored}"
    return PassResult(len(nodes), (f"{name}: {reason}; ONNX Runtime's own operator reads it",) if reason else ())


def _native(lowering: Lowering, name: str, bits: int, node: ir.Node) -> ir.Node:
    model, weight = lowering.model, _codes(lowering, name, bits)
    codes, scales, zero_points = block_linears.stacked(
        model, lowering.kernels, "embedding", lambda: [_codes(lowering, name, bits)]
    )
    model.opset_imports[DOMAIN] = 1
    inputs = [codes, scales] + ([zero_points] if zero_points is not None else [])
    return _gather(node, inputs, {"N": weight.codes.shape[0]} | block_linears.attributes(weight, scales))


def _gather(node: ir.Node, weight: list[ir.Value], attributes: dict[str, int]) -> ir.Node:
    return ir.node(
        "BlockGather",
        [node.inputs[1], *weight],
        attributes=attributes,
        domain=DOMAIN,
        outputs=[new_value("embedding.rows", node.outputs[0])],
    )


def _codes(lowering: Lowering, name: str, bits: int) -> QuantizedWeight:
    return widened(lowering.weights.linear(name), bits)


def _stock(lowering: Lowering, name: str, bits: int, node: ir.Node) -> ir.Node:
    model, weight = lowering.model, _codes(lowering, name, bits)
    shape = (len(weight.codes), -(-weight.codes.shape[1] * bits // 8))
    codes = deferred(
        model, "embedding.codes", shape, ir.DataType.UINT8, lambda: pack(_codes(lowering, name, bits).codes, bits)
    )
    inputs = [codes, node.inputs[1], initializer(model, "embedding.scales", weight.scales)]
    if weight.zero_points is not None:
        inputs.append(initializer(model, "embedding.zero_points", pack(weight.zero_points, bits)))
    return ir.node(
        "GatherBlockQuantized",
        inputs,
        attributes={"bits": bits, "block_size": weight.group_size, "gather_axis": 0, "quantize_axis": 1},
        domain=CONTRIB,
        outputs=[new_value("embedding.rows", node.outputs[0])],
    )
