"""``x · sigmoid(x)`` becomes one node: ``QuickGelu`` with alpha 1 is exactly SiLU."""

from __future__ import annotations

import onnx_ir as ir

from engines.passes.base import CONTRIB, Lowering, PassResult, new_value, replace


def run(lowering: Lowering) -> PassResult:
    model, matched, declined = lowering.model, 0, list[str]()
    sigmoids = [n for n in model.graph if n.op_type == "Sigmoid"]
    for sigmoid in sigmoids:
        x, gate = sigmoid.inputs[0], sigmoid.outputs[0]
        for use in list(gate.uses()):
            mul = use.node
            if mul.op_type == "Mul" and mul.inputs[1 - use.idx] is x:
                output = mul.outputs[0]
                fused = ir.node(
                    "QuickGelu",
                    [x],
                    attributes={"alpha": 1.0},
                    domain=CONTRIB,
                    outputs=[new_value(f"{output.name}.silu", output)],
                )
                replace(model, [mul], [fused], {output: fused.outputs[0]})
                matched += 1
            else:
                declined.append(f"Sigmoid {gate.name}: what multiplies it is not its own input; kept as it is")
    return PassResult(matched, tuple(declined) if sigmoids else ("no Sigmoid in the graph; the activation is another",))
