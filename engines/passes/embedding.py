"""The token embedding reads a quantized table where the checkpoint has one.

    Gather(embedding, ids)   ->   BlockGather(ids, codes, scales[, zero points])            of our own kernels
                             ->   GatherBlockQuantized(codes, ids, scales[, zero points])   where they do not run

A tied output head reads the same codes; the bundle's writer stores equal bytes once.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from engines.native import DOMAIN, unsupported
from engines.passes import block_linears
from engines.passes.base import CONTRIB, Lowering, PassResult, initializer, new_value, replace
from engines.passes.linear_kernels import in_more_bits, pack, widened


def run(lowering: Lowering) -> PassResult:
    name = lowering.graph.embedding
    table = lowering.weights.linear(name)
    nodes = [
        n
        for n in lowering.model.graph
        if n.op_type == "Gather" and n.inputs[0] is not None and n.inputs[0].name == name
    ]
    if not hasattr(table, "codes"):
        lowering.plan["embedding"] = "Gather fp32"
        return PassResult(0, (f"{name}: it is not quantized; its rows are read as floats",))
    if not nodes:
        return PassResult(0, (f"{name}: no Gather reads it; its codes are left unused",))
    reason = unsupported() or block_linears.unfit(table)
    for node in nodes:
        gather = _stock(lowering.model, table, node) if reason else _native(lowering.model, table, node)
        replace(lowering.model, [node], [gather], {node.outputs[0]: gather.outputs[0]})
        stored = in_more_bits(table) if reason else ""
        lowering.plan["embedding"] = f"{gather.op_type} {table.bits}-bit g{table.group_size}{stored}"
    return PassResult(len(nodes), (f"{name}: {reason}; ONNX Runtime's own operator reads it",) if reason else ())


def _native(model: ir.Model, table: Any, node: ir.Node) -> ir.Node:
    codes, scales, zero_points = block_linears.table(model, "embedding", table, [table])
    model.opset_imports[DOMAIN] = 1
    return ir.node(
        "BlockGather",
        [node.inputs[1], codes, scales] + ([zero_points] if zero_points is not None else []),
        attributes={"N": table.codes.shape[0]} | block_linears.attributes(table, scales),
        domain=DOMAIN,
        outputs=[new_value("embedding.rows", node.outputs[0])],
    )


def _stock(model: ir.Model, table: Any, node: ir.Node) -> ir.Node:
    table = widened(table)
    codes = initializer(model, "embedding.codes", pack(table.codes, table.bits))
    inputs = [codes, node.inputs[1], initializer(model, "embedding.scales", table.scales)]
    if table.zero_points is not None:
        inputs.append(initializer(model, "embedding.zero_points", pack(table.zero_points, table.bits)))
    return ir.node(
        "GatherBlockQuantized",
        inputs,
        attributes={"bits": table.bits, "block_size": table.group_size, "gather_axis": 0, "quantize_axis": 1},
        domain=CONTRIB,
        outputs=[new_value("embedding.rows", node.outputs[0])],
    )
