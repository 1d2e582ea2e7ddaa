"""Rotary cosines and sines become constant caches over positions, computed by the graph's own subgraph.

    RotaryEmbedding(x, Cos(position · frequency), Sin(…))   ->   RotaryEmbedding(x, cos_table, sin_table) {table}
    x · cos + (-second half of x, first half of x) · sin    ->   the same
    (first · cos - second · sin, second · cos + first · sin)  ->   the same, of the halves of x
    x · cos + (-odd channels, even channels, in turns) · sin  ->   the same, interleaved
    pairs (even · cos - odd · sin, odd · cos + even · sin)  ->   the same, interleaved

The subgraph is evaluated once for every position, so any RoPE scaling (linear, llama3, yarn) is kept exactly, with no
code for any of them. It must give a position the same values alone as among all others: angles that depend on the
largest position of a call, say, have no table. The exporter leaves the sum where it does not know how angles are made,
such as those of Qwen3.5, whose frequencies are put together from three kinds of positions, and where a model turns the
halves one by one, as gpt-oss does, or pairs neighbours, as Cohere's, GLM-4's and ERNIE 4.5's do. DeepSeek-V2 turns
pairs as complex numbers; DeepSeek-V3 takes even and odd channels as halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import (
    Lowering,
    PassResult,
    attribute,
    constant,
    dimension,
    last_axis_slice,
    new_value,
    producer_of,
    remove_dead,
    replace,
)

POSITIONS = "position_ids"
Tables = tuple[ir.Value, ir.Value]


@dataclass(frozen=True)
class _Rotary:
    """A rotary embedding of ``x``.

    ``written``: in other operators. ``both``: there are angles for both channels of a pair. ``interleaved``: those of a
    pair are neighbours.
    """

    node: ir.Node
    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    written: bool = False
    both: bool = False
    interleaved: bool = False

    @property
    def label(self) -> str:
        return f"RotaryEmbedding {self.node.outputs[0].name}"


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    found = [rotary for node in model.graph if (rotary := _node(node) or _sum(node) or _halves(node) or _pairs(node))]
    tables: dict[tuple[int, int, bool, bool], Tables] = {}
    declined: list[str] = []
    matched = 0
    for rotary in found:
        key = id(rotary.cos), id(rotary.sin), rotary.both, rotary.interleaved
        if key not in tables and id(rotary.cos) in {cos for cos, *_ in tables}:
            declined.append(f"{rotary.label}: its cosines and sines are paired differently elsewhere")
            continue
        if key not in tables:
            arrays = _evaluate(model, [rotary.cos, rotary.sin], lowering.max_tokens)
            if arrays is None:
                declined.append(f"{rotary.label}: its angles depend on more than positions; computed in every step")
                continue
            if rotary.both:
                arrays = _of_pairs(arrays, interleaved=rotary.interleaved)
            if arrays is None:
                declined.append(
                    f"{rotary.label}: channels of a pair are turned by other angles; computed in every step"
                )
                continue
            cos, sin = (
                constant(model, f"rotary.{name}.{len(tables)}", array)
                for name, array in zip(("cos", "sin"), arrays, strict=True)
            )
            tables[key] = cos, sin
        _put(model, rotary, tables[key])
        matched += 1
    return PassResult(matched, tuple(declined) if found else ("no RotaryEmbedding in the graph",))


def _put(model: ir.Model, rotary: _Rotary, tables: Tables) -> None:
    node, positions = rotary.node, next((i for i in model.graph.inputs if i.name == POSITIONS), None)
    if rotary.written:
        output = node.outputs[0]
        made = ir.node(
            "RotaryEmbedding",
            [rotary.x, *tables, positions],
            attributes={"interleaved": int(rotary.interleaved)},
            outputs=[new_value(f"{output.name}.turned", output)],
        )
        replace(model, [node], [made], {output: made.outputs[0]})
        return
    node.resize_inputs(4)
    for place, value in enumerate((*tables, positions), 1):
        node.replace_input_with(place, value)
    remove_dead(model, [p for p in (rotary.cos.producer(), rotary.sin.producer()) if p is not None])


def _node(node: ir.Node) -> _Rotary | None:
    if node.op_type != "RotaryEmbedding":
        return None
    x, cos, sin = node.inputs[:3]
    assert x is not None and cos is not None and sin is not None
    return _Rotary(node, x, cos, sin)


def _sum(node: ir.Node) -> _Rotary | None:
    """``x · cos + x' · sin``, of ``x [B, H, S, R]`` and angles ``[B, S, R]``.

    ``x'`` has the second half of x, negated, and then the first; or of each pair of neighbours the same.
    """
    products = [producer_of(value, "Mul") for value in node.inputs] if node.op_type == "Add" else []
    for plain, crossed in (products, products[::-1]) if len(products) == 2 else ():
        if plain is None or crossed is None:
            continue
        for half_turned, sin in (crossed.inputs, crossed.inputs[::-1]):
            x, interleaved = _half_turned(half_turned), False
            if x is None:
                x, interleaved = _neighbours_turned(half_turned), True
            if x is None or x not in plain.inputs or x.shape is None or len(x.shape) != 4:
                continue
            cos = plain.inputs[1] if plain.inputs[0] is x else plain.inputs[0]
            angles = [_of_tokens(value) for value in (cos, sin)]
            if angles[0] is not None and angles[1] is not None:
                return _Rotary(node, x, angles[0], angles[1], written=True, both=True, interleaved=interleaved)
    return None


def _halves(node: ir.Node) -> _Rotary | None:
    """``(first · cos - second · sin, second · cos + first · sin)`` of ``x``'s halves; angles ``[B, S, R/2]``.

    Where the halves are no parts of one value in this order, they are joined. Those of one head have the shape of
    angles, which are told by what they depend on.
    """
    if node.op_type != "Concat" or len(node.inputs) != 2 or attribute(node, "axis", 0) not in (-1, 3):
        return None
    for first, second, cos, sin in _crossed(*node.inputs):
        x, angles = _of_halves(first, second), [_of_tokens(value) for value in (cos, sin)]
        if len(first.shape or ()) != 4 or angles[0] is None or angles[1] is None:
            continue
        if x is None and dimension(first, -1) == dimension(second, -1) and _of_positions(angles[0]):
            x = _joined(node, first, second)
        if x is not None:
            return _Rotary(node, x, angles[0], angles[1], written=True)
    return None


def _of_positions(value: ir.Value) -> bool:
    """Whether it depends on no other input of the graph."""
    stack, seen = [value], set[int]()
    while stack:
        current = stack.pop()
        if current.is_graph_input() and current.name != POSITIONS:
            return False
        producer = current.producer()
        if producer is not None and id(producer) not in seen:
            seen.add(id(producer))
            stack.extend(each for each in producer.inputs if each is not None)
    return True


def _pairs(node: ir.Node) -> _Rotary | None:
    """The same of every first and every second channel, each pair of which is put together again."""
    joined = producer_of(node.inputs[0], "Concat") if node.op_type == "Reshape" else None
    if joined is None or len(joined.inputs) != 2 or attribute(joined, "axis", 0) not in (-1, 4):
        return None
    for first, second, cos, sin in _crossed(*(_apart(part) for part in joined.inputs)):
        x, angles = _of_pairs_in(first, second), [_of_tokens(value) for value in (cos, sin)]
        if x is not None and x.shape == node.outputs[0].shape and angles[0] is not None and angles[1] is not None:
            return _Rotary(node, x, angles[0], angles[1], written=True, interleaved=True)
    return None


def _crossed(
    less: ir.Value | None, more: ir.Value | None
) -> Iterator[tuple[ir.Value, ir.Value, ir.Value | None, ir.Value | None]]:
    """``first``, ``second``, ``cos``, ``sin`` of ``first · cos - second · sin`` and ``second · cos + first · sin``."""
    ends = producer_of(less, "Sub"), producer_of(more, "Add")
    products = [producer_of(value, "Mul") for end in ends for value in (end.inputs if end is not None else ())]
    if len(products) != 4 or any(product is None for product in products):
        return
    factors = [list(product.inputs) for product in products if product is not None]
    for first, cos in (factors[0], factors[0][::-1]):
        for second, sin in (factors[1], factors[1][::-1]):
            for turned in (factors[2:], factors[:1:-1]):  # second · cos, first · sin in either order
                crossed = _same(turned[0], (second, cos)) and _same(turned[1], (first, sin))
                if crossed and first is not None and second is not None:
                    yield first, second, cos, sin


def _joined(node: ir.Node, first: ir.Value, second: ir.Value) -> ir.Value:
    joined = ir.node("Concat", [first, second], attributes={"axis": -1})
    joined.outputs[0].name = f"{node.outputs[0].name}.halves"
    joined.outputs[0].type, joined.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    assert node.graph is not None
    node.graph.insert_before(node, joined)
    return joined.outputs[0]


def _same(factors: list[ir.Value | None], wanted: tuple[ir.Value | None, ir.Value | None]) -> bool:
    return {id(value) for value in factors} == {id(value) for value in wanted}


def _of_halves(first: ir.Value | None, second: ir.Value | None) -> ir.Value | None:
    """What these are the halves of."""
    split = producer_of(first, "Split")
    if split is None or list(split.outputs) != [first, second] or attribute(split, "axis", 0) not in (-1, 3):
        return None
    return split.inputs[0] if dimension(first, -1) == dimension(second, -1) else None


def _of_pairs_in(first: ir.Value | None, second: ir.Value | None) -> ir.Value | None:
    """What these are every first and every second channel of, by way of ``[.., R/2, 2]``."""
    squeezed = producer_of(first, "Squeeze"), producer_of(second, "Squeeze")
    slices = [producer_of(node.inputs[0], "Slice") if node is not None else None for node in squeezed]
    if slices[0] is None or slices[1] is None or slices[0].inputs[0] is not slices[1].inputs[0]:
        return None
    apart = producer_of(slices[0].inputs[0], "Reshape")
    if apart is None or [last_axis_slice(each) for each in slices if each is not None] != [(0, 1), (1, 2)]:
        return None
    return apart.inputs[0] if dimension(apart.outputs[0], -1) == 2 else None


def _half_turned(value: ir.Value | None) -> ir.Value | None:
    """The x of which a value has the second half, negated, and then the first."""
    joined = producer_of(value, "Concat")
    if joined is None or len(joined.inputs) != 2 or attribute(joined, "axis", 0) not in (-1, 3):
        return None
    negated = producer_of(joined.inputs[0], "Neg")
    second, first = (
        producer_of(part, "Slice") for part in (negated.inputs[0] if negated is not None else None, joined.inputs[1])
    )
    if second is None or first is None or second.inputs[0] is not first.inputs[0]:
        return None
    x = first.inputs[0]
    width = dimension(x, -1)
    return x if (last_axis_slice(first), last_axis_slice(second)) == ((0, width // 2), (width // 2, width)) else None


def _neighbours_turned(value: ir.Value | None) -> ir.Value | None:
    """The x of which a value has each pair of neighbours, the second one negated and before the first."""
    flat = producer_of(value, "Reshape")
    joined = producer_of(flat.inputs[0], "Concat") if flat is not None else None
    if joined is None or len(joined.inputs) != 2 or attribute(joined, "axis", 0) not in (-1, 4):
        return None
    columns = [_apart(part) for part in joined.inputs]
    negated = producer_of(columns[0], "Neg")
    odd, even = (
        producer_of(part, "Slice") for part in (negated.inputs[0] if negated is not None else None, columns[1])
    )
    if odd is None or even is None or odd.inputs[0] is not even.inputs[0]:
        return None
    return even.inputs[0] if (_every_second(even), _every_second(odd)) == (0, 1) else None


def _apart(column: ir.Value | None) -> ir.Value | None:
    """What has become a column of pairs ``[.., R/2, 1]``."""
    node = producer_of(column, "Unsqueeze")
    axes = node.inputs[1].const_value if node is not None and node.inputs[1] is not None else None
    if node is None or axes is None or np.asarray(axes.numpy()).ravel().tolist() not in ([-1], [4]):
        return None
    return node.inputs[0]


def _every_second(node: ir.Node) -> int | None:
    """The first channel of those that a Slice takes, if it takes every second one to the end."""
    tensors = [value.const_value if value is not None else None for value in node.inputs[1:]]
    numbers = [int(tensor.numpy().ravel()[0]) for tensor in tensors if tensor is not None and tensor.size == 1]
    if len(numbers) != 4 or numbers[1] < dimension(node.inputs[0], -1) or numbers[2] not in (-1, 3) or numbers[3] != 2:
        return None
    return numbers[0]


def _of_tokens(value: ir.Value | None) -> ir.Value | None:
    """Angles ``[B, S, R]``, or ``[B, 1, S, R]``, that are the same for all heads."""
    apart = producer_of(value, "Unsqueeze")
    axes = apart.inputs[1].const_value if apart is not None and apart.inputs[1] is not None else None
    if apart is not None and axes is not None and np.asarray(axes.numpy()).ravel().tolist() in ([1], [-3]):
        return apart.inputs[0]
    shape = value.shape if value is not None else None
    return value if shape is not None and len(shape) == 4 and shape[1] == 1 else None


def _of_pairs(arrays: list[NDArray[np.float32]], *, interleaved: bool) -> list[NDArray[np.float32]] | None:
    """One of each pair of ``[positions, R]``; None where the others differ."""
    pairs = [(a[:, ::2], a[:, 1::2]) if interleaved else np.split(a, 2, axis=1) for a in arrays]
    same = all(np.array_equal(first, second) for first, second in pairs)
    return [np.ascontiguousarray(first) for first, _ in pairs] if same else None


def _evaluate(model: ir.Model, values: list[ir.Value], positions: int) -> list[NDArray[np.float32]] | None:
    """The values at positions ``0 .. positions-1``, ``[positions, width]``; None if they depend on anything else."""
    import onnxruntime as ort

    ids = [value for value in model.graph.inputs if value.name == POSITIONS]
    try:
        angles = ir.Model(ir.convenience.extract(model.graph, ids, values), ir_version=min(model.ir_version, 11))
    except ValueError:
        return None
    options = ort.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it runs only four times
    session = ort.InferenceSession(ir.to_proto(angles).SerializeToString(), options, providers=["CPUExecutionProvider"])

    def at(places: NDArray[np.int64]) -> list[NDArray[np.float32]]:
        results = session.run([value.name for value in values], {POSITIONS: places[None]})
        return [np.ascontiguousarray(np.asarray(r, np.float32).reshape(len(places), -1)) for r in results]

    tables = at(np.arange(positions, dtype=np.int64))
    for place in {0, positions // 2, positions - 1}:
        alone = at(np.array([place], np.int64))
        if not all(np.allclose(one[0], table[place], atol=1e-6) for one, table in zip(alone, tables, strict=True)):
            return None
    return tables
