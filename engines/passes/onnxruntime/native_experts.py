"""Experts become a native operator, which reads each expert of a step once.

    Experts(x, index, weight, up, down, up_bias, down_bias)
      over codes    ->   BlockExperts, which computes as BlockLinear does: over the codes of each expert
      over floats   ->   Experts, over tiles of 16 outputs

A weight of codes ``[E, N, K]`` has the rows that the operator's input has, whatever the float checkpoint's orientation.
Experts may differ in bits: codes of one follow those of the one before, and the operator is told where they begin.
Where the target's kernels do not take both weights of a layer, they are decoded to floats. The output of a token is the
same to the bit whatever other tokens a step has. What no kernel computes stays: ONNX Runtime runs the operator's body.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.bundle import LinearOutput
from engines.kernels.operators import DOMAIN
from engines.passes.base import (
    Lowering,
    PassResult,
    deferred,
    dimension,
    initializer,
    new_value,
    parameter_behind,
    replace,
)
from engines.passes.graph.linears import described, trimmed
from engines.passes.onnxruntime.block_linears import in_more_bits, widened
from tapeout.operators.experts import DOWN_INPUT, NAME, UP_INPUT, ExpertGate, is_experts
from tapeout.quantized import QuantizedWeight

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu2": 2}  # as source/experts.h has them
OVER_CODES = "BlockExperts"
LANES = 16  # outputs of a tile


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if is_experts(n)]
    if not nodes:
        return PassResult(0, ("no experts in the graph",))
    declined: list[str] = []
    left = 0
    for node in nodes:
        gate, output, down = ExpertGate.of(node), node.outputs[0], node.inputs[DOWN_INPUT]
        assert down is not None
        name, rows, subject = parameter_behind(down), (dimension(down, 1),), f"{NAME} {output.name}"
        unknown = "" if gate.activation in ACTIVATIONS else f"there is no kernel for {gate.activation} of experts"
        if reason := lowering.kernels.unsupported(NAME) or unknown:
            declined.append(f"{subject}: {reason}; ONNX Runtime computes it")
            left += 1
        else:
            output, reason = _lower(lowering, node, gate)
            if reason:
                declined.append(f"{subject}: {reason}; decoded to floats")
        # Parity compares the sum over experts, by the name of their down projection.
        lowering.linear_outputs.append(LinearOutput(value=output.name or "", weights=(name,), rows=rows))
    if not left:
        del model.functions[("tapeout", NAME, "")]
    model.opset_imports[DOMAIN] = 1
    return PassResult(len(nodes) - left, tuple(declined))


@dataclass(frozen=True)
class Projection:
    """One of the two weights of a node, as it is read when the bundle is written."""

    prefix: str  # of the kernel's attributes
    name: str
    label: str  # in the bundle's record
    bias: str  # empty: none
    shape: tuple[int, int, int]  # [E, N, K]
    parts: int  # 2: gates and ups
    interleaved: bool
    transposed: bool  # floats; codes have the rows of the operator's input

    @classmethod
    def of(cls, lowering: Lowering, node: ir.Node, number: int, gate: ExpertGate) -> Projection:
        value, bias = node.inputs[number], node.inputs[number + 2]
        assert value is not None and bias is not None
        name, (experts, outputs, columns) = parameter_behind(value), (dimension(value, axis) for axis in range(3))
        group = lowering.group_of(name)
        is_zero = dimension(bias, 1) == 1 < outputs  # which stands where experts have no bias
        parts = outputs // dimension(node.inputs[DOWN_INPUT], 2) if number == UP_INPUT else 1
        return cls(
            prefix="up" if number == UP_INPUT else "down",
            name=name,
            label=name if group is None else group.name,
            bias="" if is_zero else parameter_behind(bias),
            shape=(experts, outputs, columns),
            parts=parts,
            interleaved=parts == 2 and gate.interleaved,
            transposed=_is_transposed(value),
        )

    def read(self, lowering: Lowering) -> QuantizedWeight | NDArray[np.float32]:
        stored = lowering.weights.linear(self.name)
        if isinstance(stored, QuantizedWeight) or not self.transposed:
            return stored
        return stored.transpose(0, 2, 1)

    def separated(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Gates and ups of ``[E, N, ..]``."""
        return [rows[:, ::2], rows[:, 1::2]] if self.interleaved else np.split(rows, self.parts, axis=1)

    def order(self) -> NDArray[np.int64]:
        """Rows as BlockExperts has them: 16 gates, then the ups of the same channels."""
        rows = [part.reshape(-1) for part in self.separated(np.arange(self.shape[1])[None])]
        return rows[0] if self.parts == 1 else np.stack([r.reshape(-1, LANES) for r in rows], axis=1).reshape(-1)


def _lower(lowering: Lowering, node: ir.Node, gate: ExpertGate) -> tuple[ir.Value, str]:
    """The output, and why codes are decoded: empty where they are not, or there are none."""
    projections = [Projection.of(lowering, node, number, gate) for number in (UP_INPUT, DOWN_INPUT)]
    stored = [projection.read(lowering) for projection in projections]
    coded = [weight for weight in stored if isinstance(weight, QuantizedWeight)]
    reason = "its other weight is in float" if len(coded) < len(stored) else lowering.kernels.unsupported(OVER_CODES)
    for weight in coded:
        reason = reason or lowering.kernels.unsupported_weight(weight)
    attributes: dict[str, int | float] = {
        "activation": ACTIVATIONS[gate.activation],
        "alpha": gate.alpha,
        "limit": gate.limit,
        "offset": gate.offset,
    }
    if reason:
        inputs = [_tiled(lowering, projection) for projection in projections]
        inputs += [_tiled_bias(lowering, projection) for projection in projections]
    else:
        up, down = projections
        attributes |= {"H": up.shape[2], "I": down.shape[2], "gated": int(up.parts == 2)}
        inputs, begins = list[ir.Value | None](), list[ir.Value | None]()
        for projection, weight in zip(projections, coded, strict=True):
            found, known = _packed(lowering, projection, weight)
            inputs += found
            begins.append(_begins(lowering, projection, weight))
            attributes |= {f"{projection.prefix}_{name}": number for name, number in known.items()}
        inputs += [_packed_bias(lowering, projection) for projection in projections] + begins
    lowered = ir.node(
        NAME if reason else OVER_CODES,
        trimmed([*node.inputs[:UP_INPUT], *inputs]),
        attributes=attributes,
        domain=DOMAIN,
        outputs=[new_value(f"{node.outputs[0].name}.native", node.outputs[0])],
    )
    replace(lowering.model, [node], [lowered], {node.outputs[0]: lowered.outputs[0]})
    return lowered.outputs[0], reason if coded else ""


# --- over codes -----------------------------------------------------------------------------------------------------


def _packed(
    lowering: Lowering, projection: Projection, stored: QuantizedWeight
) -> tuple[list[ir.Value | None], dict[str, int]]:
    """Codes, scales and zero points of all experts, each packed as a linear; and what the kernel must know of them."""
    kernels, label, order = lowering.kernels, projection.label, projection.order()
    experts, _, columns = projection.shape
    bits = _bits(lowering, stored)
    first = widened(_alone(stored.part(0)), bits[0])  # all have its shapes and types, but for codes
    dtype = kernels.stored_scales(stored.scales, first.scheme).dtype
    shapes = [kernels.codes_shape(len(order), columns, own) for own in bits]

    def each_expert() -> Iterator[QuantizedWeight]:
        """One after another, so that nothing but the result is as large as a layer's experts."""
        weight = projection.read(lowering)
        assert isinstance(weight, QuantizedWeight)
        for expert, own in enumerate(bits):
            yield widened(weight.part(expert), own)

    def all_experts(pack: Callable[[QuantizedWeight], NDArray[Any]]) -> NDArray[Any]:
        found = np.empty((experts, *pack(first).shape), pack(first).dtype)
        for place, weight in zip(found, each_expert(), strict=True):
            place[:] = pack(weight)
        return found

    def all_codes() -> NDArray[np.uint8]:
        found = np.empty(sum(map(math.prod, shapes)), np.uint8)
        at = 0
        for weight, own, shape in zip(each_expert(), bits, shapes, strict=True):
            found[at : at + math.prod(shape)] = kernels.pack_codes(weight.codes[order], own).reshape(-1)
            at += math.prod(shape)
        return found if one is None else found.reshape(one)

    def scales(weight: QuantizedWeight) -> NDArray[Any]:
        return kernels.pack_scales(kernels.stored_scales(weight.scales[order], weight.scheme).astype(dtype))

    def zero_points(weight: QuantizedWeight) -> NDArray[np.uint8]:
        assert weight.zero_points is not None
        return kernels.pack_scales(weight.zero_points[order])

    def value(
        name: str, shape: tuple[int, ...], dtype: ir.DataType, pack: Callable[[QuantizedWeight], NDArray[Any]]
    ) -> ir.Value:
        return deferred(lowering.model, f"{label}.{name}", (experts, *shape), dtype, lambda: all_experts(pack))

    lowering.plan[label] = f"{OVER_CODES} {described(stored)}{in_more_bits(stored, max(bits))}"
    blocks = scales(first).shape
    one = (experts, *shapes[0]) if len(set(bits)) == 1 else None
    all_bytes = sum(map(math.prod, shapes))
    inputs = [
        deferred(lowering.model, f"{label}.codes", one or (all_bytes,), ir.DataType.UINT8, all_codes),
        value("scales", blocks, ir.DataType.from_numpy(dtype), scales),
        None if first.zero_points is None else value("zero_points", blocks, ir.DataType.UINT8, zero_points),
    ]
    return inputs, {
        "bits": max(bits),
        "block_size": stored.group_size,
        "half_scales": int(dtype == np.float16),
        "symmetric": int(first.zero_points is None),
    } | ({"e2m1": 1} if dtype == np.uint8 else {})


def _bits(lowering: Lowering, stored: QuantizedWeight) -> list[int]:
    """Of each expert's codes in the engine."""
    schemes = (stored.scheme.of_expert(expert) for expert in range(len(stored.codes)))
    return [lowering.kernels.code_bits(dataclasses.replace(stored, scheme=scheme)) for scheme in schemes]


def _begins(lowering: Lowering, projection: Projection, stored: QuantizedWeight) -> ir.Value | None:
    """Where the codes of each expert begin, and the end of all; None where all have as many bits."""
    bits, (_, outputs, columns) = _bits(lowering, stored), projection.shape
    if len(set(bits)) == 1:
        return None
    sizes = [math.prod(lowering.kernels.codes_shape(outputs, columns, own)) for own in bits]
    return initializer(lowering.model, f"{projection.label}.begins", np.cumsum([0, *sizes], dtype=np.int64))


def _alone(weight: QuantizedWeight) -> QuantizedWeight:
    """A copy: what is kept until the bundle is written must not hold all experts of a layer."""
    zero_points = None if weight.zero_points is None else weight.zero_points.copy()
    return QuantizedWeight(weight.codes.copy(), weight.scales.copy(), zero_points, weight.scheme)


def _packed_bias(lowering: Lowering, projection: Projection) -> ir.Value | None:
    """``[E, tiles, 16]``, as the scales of a weight."""
    if not projection.bias:
        return None
    stored = lowering.weights.tensor(projection.bias)[:, projection.order()]
    packed = np.stack([lowering.kernels.pack_scales(of_expert[:, None])[:, 0] for of_expert in stored])
    return initializer(lowering.model, f"{projection.bias}.packed", packed)


# --- over floats ----------------------------------------------------------------------------------------------------


def _tiled(lowering: Lowering, projection: Projection) -> ir.Value | None:
    """A weight ``[E, N, K]`` as ``[E, tiles, K, 16]``, gates before ups."""
    experts, outputs, columns = projection.shape

    def made() -> NDArray[np.float32]:
        stored = projection.read(lowering)
        rows = stored.dequantize() if isinstance(stored, QuantizedWeight) else stored
        tiles = [tiles_of(part) for part in projection.separated(rows)]
        return np.ascontiguousarray(np.concatenate(tiles, axis=1).transpose(0, 1, 3, 2))

    shape = experts, projection.parts * -(-(outputs // projection.parts) // LANES), columns, LANES
    return deferred(lowering.model, f"{projection.name}.tiles", shape, ir.DataType.FLOAT, made)


def _tiled_bias(lowering: Lowering, projection: Projection) -> ir.Value | None:
    """``[E, tiles, 16]``."""
    if not projection.bias:
        return None
    experts, outputs, _ = projection.shape

    def made() -> NDArray[np.float32]:
        stored = lowering.weights.tensor(projection.bias)[..., None]
        return np.concatenate([tiles_of(part)[..., 0] for part in projection.separated(stored)], axis=1)

    shape = experts, projection.parts * -(-(outputs // projection.parts) // LANES), LANES
    return deferred(lowering.model, f"{projection.bias}.tiles", shape, ir.DataType.FLOAT, made)


def _is_transposed(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and (producer.op_type == "Transpose" or any(map(_is_transposed, _inputs(producer))))


def _inputs(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def tiles_of(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """``[E, N, K]`` as ``[E, tiles, 16, K]``, filled up with zeros."""
    experts, outputs, columns = rows.shape
    padded = np.pad(rows, ((0, 0), (0, -outputs % LANES), (0, 0)))
    return padded.reshape(experts, -1, LANES, columns)
