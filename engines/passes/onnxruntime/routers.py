"""Routers of experts, and whatever else stays in float beside quantized linears, become a native operator.

    MatMul(x, weight) [+ bias]   ->   FloatLinear(x, weight in tiles of 16 outputs[, bias])

ONNX Runtime sums a row in another order when a step has more tokens, and a last bit can choose another expert. Here a
row's bits depend on nothing else.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, deferred, new_value, replace
from engines.passes.graph.linears import trimmed
from engines.passes.onnxruntime.native_experts import LANES, tiles_of
from tapeout.graph_analysis import Linear, find_linears

NAME = "FloatLinear"


def run(lowering: Lowering) -> PassResult:
    linears = find_linears(lowering.model.graph)
    if not linears:
        return PassResult(0, ("no linear stays in float",))
    if reason := lowering.kernels.unsupported(NAME):
        return PassResult(0, tuple(f"{linear.name}: {reason}; ONNX Runtime computes it" for linear in linears))
    for linear in linears:
        _lower(lowering, linear)
    lowering.model.opset_imports[DOMAIN] = 1
    return PassResult(len(linears))


def _lower(lowering: Lowering, linear: Linear) -> None:
    name, (outputs, columns), as_stored = linear.name, linear.shape, linear.transposed

    def made() -> NDArray[np.float32]:
        stored = lowering.weights.weight(name)
        return np.ascontiguousarray(tiles_of((stored.T if as_stored else stored)[None])[0].transpose(0, 2, 1))

    shape = -(-outputs // LANES), columns, LANES
    weight = deferred(lowering.model, f"{name}.tiles", shape, ir.DataType.FLOAT, made)
    node = ir.node(
        NAME,
        trimmed([linear.input, weight, linear.bias]),
        attributes={"N": outputs},
        domain=DOMAIN,
        outputs=[new_value(f"{name}.native", linear.output)],
    )
    last = linear.output.producer()
    assert last is not None
    replace(lowering.model, [last], [node], {linear.output: node.outputs[0]})
    if not linear.weight.uses() and name in lowering.model.graph.initializers:
        del lowering.model.graph.initializers[name]
