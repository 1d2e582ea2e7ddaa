"""Experts become a native operator, which reads each expert of a step once.

    Experts(x, index, weight, up, down, up_bias, down_bias)   ->   the same over tiles of 16 outputs, gates before ups

The output of a token is the same to the bit whatever other tokens a step has. What the kernel does not compute stays:
ONNX Runtime runs the operator's body.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.bundle import LinearOutput
from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, deferred, dimension, new_value, parameter_behind, replace
from tapeout.operators.experts import DOWN_INPUT, NAME, UP_INPUT, ExpertGate, is_experts

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu2": 2}  # as source/experts.c has them
LANES = 16  # outputs of a tile


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if is_experts(n)]
    if not nodes:
        return PassResult(0, ("no experts in the graph",))
    declined: list[str] = []
    for node in nodes:
        gate, output, down = ExpertGate.of(node), node.outputs[0], node.inputs[DOWN_INPUT]
        assert down is not None
        name, rows = parameter_behind(down), (dimension(down, 1),)
        unknown = "" if gate.activation in ACTIVATIONS else f"there is no kernel for {gate.activation} of experts"
        if reason := lowering.kernels.unsupported(NAME) or unknown:
            declined.append(f"{NAME} {node.outputs[0].name}: {reason}; ONNX Runtime computes it")
        else:
            output = _lower(lowering, node, gate)
        # Parity compares the sum over experts, by the name of their down projection.
        lowering.linear_outputs.append(LinearOutput(value=output.name or "", weights=(name,), rows=rows))
    if not declined:
        del model.functions[("tapeout", NAME, "")]
    model.opset_imports[DOMAIN] = 1
    return PassResult(len(nodes) - len(declined), tuple(declined))


def _lower(lowering: Lowering, node: ir.Node, gate: ExpertGate) -> ir.Value:
    weights = (_tiled(lowering, node, number, gate) for number in (UP_INPUT, DOWN_INPUT))
    biases = (_bias(lowering, node, number, gate) for number in (UP_INPUT, DOWN_INPUT))
    lowered = ir.node(
        NAME,
        [*node.inputs[:UP_INPUT], *weights, *biases],
        attributes={
            "activation": ACTIVATIONS[gate.activation],
            "alpha": gate.alpha,
            "limit": gate.limit,
            "offset": gate.offset,
        },
        domain=DOMAIN,
        outputs=[new_value(f"{node.outputs[0].name}.native", node.outputs[0])],
    )
    replace(lowering.model, [node], [lowered], {node.outputs[0]: lowered.outputs[0]})
    return lowered.outputs[0]


def _tiled(lowering: Lowering, node: ir.Node, number: int, gate: ExpertGate) -> ir.Value:
    """A weight ``[E, N, K]`` as ``[E, tiles, K, 16]``."""
    value = node.inputs[number]
    assert value is not None
    name, parts = parameter_behind(value), _parts(node, number)
    experts, outputs, columns = (dimension(value, axis) for axis in range(3))
    transposed = _is_transposed(value)

    def made() -> NDArray[np.float32]:
        stored = lowering.weights.weight(name)
        rows = stored.transpose(0, 2, 1) if transposed else stored
        tiles = [tiles_of(part) for part in _separated(rows, parts, gate)]
        return np.ascontiguousarray(np.concatenate(tiles, axis=1).transpose(0, 1, 3, 2))

    shape = experts, parts * -(-(outputs // parts) // LANES), columns, LANES
    return deferred(lowering.model, f"{name}.tiles", shape, ir.DataType.FLOAT, made)


def _bias(lowering: Lowering, node: ir.Node, number: int, gate: ExpertGate) -> ir.Value | None:
    """``[E, tiles, 16]``; None for the one zero that stands where experts have no bias."""
    value, weight = node.inputs[number + 2], node.inputs[number]
    assert value is not None
    if dimension(value, 1) == 1 < dimension(weight, 1):
        return None
    name, parts = parameter_behind(value), _parts(node, number)

    def made() -> NDArray[np.float32]:
        stored = lowering.weights.weight(name)[..., None]
        return np.concatenate([tiles_of(part)[..., 0] for part in _separated(stored, parts, gate)], axis=1)

    shape = dimension(weight, 0), parts * -(-(dimension(weight, 1) // parts) // LANES), LANES
    return deferred(lowering.model, f"{name}.tiles", shape, ir.DataType.FLOAT, made)


def _parts(node: ir.Node, number: int) -> int:
    """2 for a weight that holds gates and ups."""
    return dimension(node.inputs[UP_INPUT], 1) // dimension(node.inputs[DOWN_INPUT], 2) if number == UP_INPUT else 1


def _is_transposed(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and (producer.op_type == "Transpose" or any(map(_is_transposed, _inputs(producer))))


def _inputs(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _separated(rows: NDArray[np.float32], parts: int, gate: ExpertGate) -> list[NDArray[np.float32]]:
    """Gates and ups of ``[E, N, K]``."""
    if parts == 2 and gate.interleaved:
        return [rows[:, ::2], rows[:, 1::2]]
    return np.split(rows, parts, axis=1)


def tiles_of(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """``[E, N, K]`` as ``[E, tiles, 16, K]``, filled up with zeros."""
    experts, outputs, columns = rows.shape
    padded = np.pad(rows, ((0, 0), (0, -outputs % LANES), (0, 0)))
    return padded.reshape(experts, -1, LANES, columns)
