"""Linears with a static input scale become integer matmuls: two to three times the arithmetic of block kernels.

    Linear(x) over codes with an input scale
        ->   MatMulIntegerToFloat(QuantizeActivations(x, scale), codes [K, N], scale, scales [N], 128[, zero][, bias])

QuantizeActivations is a kernel of our own, which counts what the grid clips. Where it does not run,
QuantizeLinear(x, scale, 128) computes the same and counts nothing.

The scale is one constant from calibration, so tokens of different requests share nothing that depends on them. Inputs
are uint8 around 128: with int8 ones ONNX Runtime 1.31 has no vector kernel on x86 and is hundreds of times slower.
Linears without an input scale are left to the next kernel pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.kernels.operators import DOMAIN
from engines.passes.base import CONTRIB, Lowering, PassResult, deferred, initializer, new_value
from engines.passes.graph.linears import is_linear, label_of, put, quantized, stacked_bias, trimmed
from tapeout.errors import BuildError
from tapeout.quantized import QuantizedWeight

MIDPOINT = 128  # unsigned code of zero, of inputs and weights alike


def run(lowering: Lowering) -> PassResult:
    matched, declined, reason = 0, list[str](), lowering.kernels.unsupported("QuantizeActivations")
    for node in [n for n in lowering.model.graph if is_linear(n)]:
        parts = quantized(lowering, node)
        scales = {part.input_scale for part in parts} or {None}
        if scales == {None}:
            declined.append(
                f"{label_of(lowering, node)}: its inputs have no static scale; left to the next kernel pass"
            )
            continue
        if len(scales) > 1:
            raise BuildError(
                f"{label_of(lowering, node)} reads one input with scales {sorted(map(str, scales))}",
                expected="one input scale for linears that read the same input",
                remedy="let one rule of plan.schemes match the whole group",
            )
        _lower(lowering, node, parts, counts=not reason)
        matched += 1
    lowering.model.opset_imports[CONTRIB] = 1
    if not matched:
        return PassResult(0, ("no linear has a static scale for its inputs",))
    if reason:
        declined.append(f"every linear: {reason}; what static grids clip is not counted")
    return PassResult(matched, tuple(declined))


def _lower(lowering: Lowering, node: ir.Node, parts: list[QuantizedWeight], *, counts: bool) -> None:
    model, label, signed = lowering.model, label_of(lowering, node), lowering.kernels.exact_signed_products

    def codes() -> NDArray[Any]:
        stacked = np.concatenate([part.codes for part in quantized(lowering, node)]).T
        return (stacked ^ np.uint8(MIDPOINT)).view(np.int8) if signed else np.ascontiguousarray(stacked)

    shape = (parts[0].codes.shape[1], sum(len(part.codes) for part in parts))
    scale = initializer(model, f"{label}.input_scale", np.array(parts[0].input_scale, np.float32))
    middle = initializer(model, f"{label}.input_zero", np.array(MIDPOINT, np.uint8))
    grid, rounded = [node.inputs[0], scale], [new_value(f"{label}.inputs")]
    if not counts:
        quantize = ir.node("QuantizeLinear", [*grid, middle], outputs=rounded)
    else:
        quantize = ir.node("QuantizeActivations", grid, domain=DOMAIN, outputs=rounded)
        model.opset_imports[DOMAIN] = 1
    inputs = [
        rounded[0],
        deferred(model, f"{label}.codes", shape, ir.DataType.INT8 if signed else ir.DataType.UINT8, codes),
        scale,
        initializer(model, f"{label}.scales", np.concatenate([part.scales[:, 0] for part in parts]).astype(np.float32)),
        middle,
        None if signed else middle,
        stacked_bias(lowering, node),
    ]
    output = new_value(f"{label}.matmul", node.outputs[0])
    linear = ir.node("MatMulIntegerToFloat", trimmed(inputs), domain=CONTRIB, outputs=[output])
    put(lowering, node, [quantize, linear], "MatMulIntegerToFloat 8-bit, static int8 input")
