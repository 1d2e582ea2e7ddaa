"""The token embedding reads a quantized table where the checkpoint has one.

    Gather(embedding, ids)   ->   GatherBlockQuantized(codes, ids, scales)

A tied output head reads the same codes; the bundle's writer stores equal bytes once.
"""

from __future__ import annotations

import onnx_ir as ir

from engines.passes.base import CONTRIB, Lowering, Outcome, initializer, new_value, replace
from engines.passes.linear_kernels import pack


def run(lowering: Lowering) -> Outcome:
    name = lowering.graph.embedding
    table = lowering.weights.linear(name)
    nodes = [
        n
        for n in lowering.model.graph
        if n.op_type == "Gather" and n.inputs[0] is not None and n.inputs[0].name == name
    ]
    if not hasattr(table, "codes"):
        lowering.plan["embedding"] = "Gather fp32"
        return Outcome(0, (f"{name}: it is not quantized; its rows are read as floats",))
    if not nodes:
        return Outcome(0, (f"{name}: no Gather reads it; its codes are left unused",))
    model = lowering.model
    codes = initializer(model, "embedding.codes", pack(table.codes, table.bits))
    scales = initializer(model, "embedding.scales", table.scales)
    inputs = [scales]
    if table.zero_points is not None:
        inputs.append(initializer(model, "embedding.zero_points", pack(table.zero_points, table.bits)))
    for node in nodes:
        gather = ir.node(
            "GatherBlockQuantized",
            [codes, node.inputs[1], *inputs],
            attributes={"bits": table.bits, "block_size": table.group_size, "gather_axis": 0, "quantize_axis": 1},
            domain=CONTRIB,
            outputs=[new_value("embedding.rows", node.outputs[0])],
        )
        replace(model, [node], [gather], {node.outputs[0]: gather.outputs[0]})
    lowering.plan["embedding"] = f"GatherBlockQuantized {table.bits}-bit g{table.group_size}"
    return Outcome(len(nodes))
