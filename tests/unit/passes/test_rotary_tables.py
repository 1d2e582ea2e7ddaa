from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.passes.graph import rotary_tables
from tests.lowering import apply, lowering, model_of, named, op, operators, parameter, run, value

RNG = np.random.default_rng(0)
FREQUENCIES = (100.0 ** -np.linspace(0, 1, 4)).astype(np.float32)
HEADS = ["batch", 2, "tokens", 8]
FEEDS = {
    "q": RNG.standard_normal((2, 2, 3, 8)).astype(np.float32),
    "k": RNG.standard_normal((2, 2, 3, 8)).astype(np.float32),
    "position_ids": np.array([[4, 5, 6], [0, 1, 2]], np.int64),
}


def angles(positions: ir.Value, frequencies: ir.Value) -> ir.Value:
    rows = ["batch", "tokens"]
    as_float = op("Cast", [positions], rows, to=ir.DataType.FLOAT.value)
    axis = parameter(f"{frequencies.name}.axis", np.array([2], np.int64))
    column = op("Unsqueeze", [as_float, axis], [*rows, 1])
    return op("Mul", [column, frequencies], [*rows, 4])


def rotary(x: ir.Value, angle: ir.Value, *, scale: float = 1.0) -> tuple[ir.Value, ir.Value, ir.Value]:
    factor = parameter(f"{x.name}.factor", np.array(scale, np.float32))
    cos, sin = (op("Mul", [op(f, [angle], angle.shape), factor], angle.shape) for f in ("Cos", "Sin"))
    return op("RotaryEmbedding", [x, cos, sin], HEADS), cos, sin


def test_angles_become_tables_shared_by_queries_and_keys() -> None:
    q, k = value("q", HEADS), value("k", HEADS)
    positions = value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    turned, cos, sin = rotary(q, angles(positions, parameter("frequencies", FREQUENCIES)), scale=1.3)
    outputs = [named("y", turned), named("z", op("RotaryEmbedding", [k, cos, sin], HEADS))]
    model = model_of([q, k, positions], outputs)
    before = run(model, FEEDS)
    lowered = lowering(model, max_tokens=16)
    outcome = apply(lowered, rotary_tables)
    assert (outcome.matched, outcome.declined) == (2, ())
    assert operators(model) == ["RotaryEmbedding", "RotaryEmbedding"]
    assert len({node.inputs[1].name for node in model.graph}) == 1  # type: ignore[union-attr]
    table = model.graph.initializers["rotary.cos.0"].const_value
    assert table is not None
    expected = 1.3 * np.cos(np.arange(16)[:, None] * FREQUENCIES)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-5, atol=1e-6)
    after = run(model, FEEDS)
    for name, wanted in before.items():
        np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-5)


def written(x: ir.Value, cos: ir.Value, sin: ir.Value, half: int = 4) -> ir.Value:
    """``x · cos + (-second half, first half) · sin``, as transformers writes it; angles ``[B, S, 8]``."""
    heads, axis = parameter(f"{x.name}.heads", np.array([1])), parameter(f"{x.name}.axis", np.array([3]))
    cuts = {cut: parameter(f"{x.name}.cut{cut}", np.array([cut])) for cut in (0, half, 2**62)}
    cos, sin = (op("Unsqueeze", [angle, heads], ["batch", 1, "tokens", 8]) for angle in (cos, sin))
    first, second = (
        op("Slice", [x, cuts[begin], cuts[end], axis], ["batch", 2, "tokens", 4])
        for begin, end in ((0, half), (half, 2**62))
    )
    crossed = op("Concat", [op("Neg", [second], second.shape), first], HEADS, axis=-1)
    return op("Add", [op("Mul", [x, cos], HEADS), op("Mul", [crossed, sin], HEADS)], HEADS)


def doubled(angle: ir.Value, function: str, *, same: bool = True) -> ir.Value:
    values = op(function, [angle], ["batch", "tokens", 4])
    other = values if same else op("Neg", [values], values.shape)
    return op("Concat", [values, other], ["batch", "tokens", 8], axis=-1)


def test_sums_that_turn_halves_are_rotary_embeddings() -> None:
    """The exporter leaves them where it does not know how angles are made."""
    q, k = value("q", HEADS), value("k", HEADS)
    positions = value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    angle = angles(positions, parameter("frequencies", FREQUENCIES))
    cos, sin = (doubled(angle, name) for name in ("Cos", "Sin"))
    model = model_of([q, k, positions], [named("y", written(q, cos, sin)), named("z", written(k, cos, sin))])
    before = run(model, FEEDS)
    outcome = apply(lowering(model, max_tokens=16), rotary_tables)
    assert (outcome.matched, outcome.declined) == (2, ())
    assert operators(model) == ["RotaryEmbedding", "RotaryEmbedding"]
    table = model.graph.initializers["rotary.cos.0"].const_value
    assert table is not None and table.shape == ir.Shape([16, 4])
    after = run(model, FEEDS)
    for name, wanted in before.items():
        np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-5)


def turned_by_halves(
    x: ir.Value, cos: ir.Value, sin: ir.Value, *, sign: str = "Sub", crossed: bool = False
) -> ir.Value:
    """As gpt-oss writes it; angles ``[B, S, 4]``. ``crossed``: the second half is turned as the first one is."""
    half, heads = ["batch", 2, "tokens", 4], parameter(f"{x.name}.heads", np.array([1]))
    cos, sin = (op("Unsqueeze", [angle, heads], ["batch", 1, "tokens", 4]) for angle in (cos, sin))
    first = op("Split", [x], half, outputs=2, axis=-1, num_outputs=2)
    split = first.producer()
    assert split is not None
    second = split.outputs[1]
    less = op(sign, [op("Mul", [first, cos], half), op("Mul", [second, sin], half)], half)
    cos, sin = (sin, cos) if crossed else (cos, sin)
    more = op("Add", [op("Mul", [second, cos], half), op("Mul", [first, sin], half)], half)
    return op("Concat", [less, more], HEADS, axis=-1)


def test_halves_that_are_turned_one_by_one_are_rotary_embeddings() -> None:
    q, k = value("q", HEADS), value("k", HEADS)
    positions = value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    angle = angles(positions, parameter("frequencies", FREQUENCIES))
    cos, sin = (op(name, [angle], angle.shape) for name in ("Cos", "Sin"))
    outputs = [named("y", turned_by_halves(q, cos, sin)), named("z", turned_by_halves(k, cos, sin))]
    model = model_of([q, k, positions], outputs)
    before = run(model, FEEDS)
    outcome = apply(lowering(model, max_tokens=16), rotary_tables)
    assert (outcome.matched, outcome.declined) == (2, ())
    assert operators(model) == ["RotaryEmbedding", "RotaryEmbedding"]
    after = run(model, FEEDS)
    for name, wanted in before.items():
        np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-5)


def turned_by_neighbours(x: ir.Value, cos: ir.Value, sin: ir.Value, *, first: int = 0) -> ir.Value:
    """As Cohere's and ERNIE's models write it; angles ``[B, 1, S, 8]``. ``first``: of the channels that come second."""
    half, pairs = ["batch", 2, "tokens", 4], ["batch", 2, "tokens", 4, 1]
    end, axis, step = (
        parameter(f"{x.name}.{name}", np.array([n])) for name, n in (("end", 2**62), ("at", 3), ("by", 2))
    )
    even, odd = (
        op("Slice", [x, parameter(f"{x.name}.from{begin}", np.array([begin])), end, axis, step], half)
        for begin in (first, 1 - first)
    )
    behind = parameter(f"{x.name}.behind", np.array([-1]))
    columns = [op("Unsqueeze", [part, behind], pairs) for part in (op("Neg", [odd], half), even)]
    stack = op("Concat", columns, [*pairs[:-1], 2], axis=-1)
    crossed = op("Reshape", [stack, parameter(f"{x.name}.flat", np.array([0, 0, 0, 8]))], HEADS)
    return op("Add", [op("Mul", [x, cos], HEADS), op("Mul", [crossed, sin], HEADS)], HEADS)


def repeated(angle: ir.Value, function: str, *, same: bool = True) -> ir.Value:
    """Each angle twice, or with its negative, and the same for all heads."""
    column = op("Unsqueeze", [op(function, [angle], angle.shape), parameter(f"{function}.at", np.array([1, -1]))])
    column.shape = ir.Shape(["batch", 1, "tokens", 4, 1])
    other = column if same else op("Neg", [column], column.shape)
    pairs = op("Concat", [column, other], ["batch", 1, "tokens", 4, 2], axis=-1)
    flat = parameter(f"{function}.flat", np.array([0, 0, 0, 8]))
    return op("Reshape", [pairs, flat], ["batch", 1, "tokens", 8])


def test_neighbours_that_are_turned_are_interleaved_rotary_embeddings() -> None:
    q, k = value("q", HEADS), value("k", HEADS)
    positions = value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    angle = angles(positions, parameter("frequencies", FREQUENCIES))
    cos, sin = (repeated(angle, name) for name in ("Cos", "Sin"))
    outputs = [named("y", turned_by_neighbours(q, cos, sin)), named("z", turned_by_neighbours(k, cos, sin))]
    model = model_of([q, k, positions], outputs)
    before = run(model, FEEDS)
    outcome = apply(lowering(model, max_tokens=16), rotary_tables)
    assert (outcome.matched, outcome.declined) == (2, ())
    assert operators(model) == ["RotaryEmbedding", "RotaryEmbedding"]
    table = model.graph.initializers["rotary.cos.0"].const_value
    assert table is not None and table.shape == ir.Shape([16, 4])
    after = run(model, FEEDS)
    for name, wanted in before.items():
        np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-5)


def test_neighbours_that_are_turned_otherwise_stay() -> None:
    for case in ("the other one is negated", "other angles"):
        q, positions = value("q", HEADS), value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
        angle = angles(positions, parameter("frequencies", FREQUENCIES))
        cos, sin = repeated(angle, "Cos"), repeated(angle, "Sin", same=case != "other angles")
        y = turned_by_neighbours(q, cos, sin, first=int(case != "other angles"))
        model = model_of([q, positions], [named("y", y)])
        before = operators(model)
        assert apply(lowering(model, max_tokens=16), rotary_tables).matched == 0, case
        assert operators(model) == before


def test_halves_that_are_turned_otherwise_stay() -> None:
    for case in ({"sign": "Add"}, {"crossed": True}):
        q, positions = value("q", HEADS), value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
        angle = angles(positions, parameter("frequencies", FREQUENCIES))
        cos, sin = (op(name, [angle], angle.shape) for name in ("Cos", "Sin"))
        y = turned_by_halves(q, cos, sin, **case)
        model = model_of([q, positions], [named("y", y)])
        before = operators(model)
        outcome = apply(lowering(model, max_tokens=16), rotary_tables)
        assert (outcome.matched, outcome.declined) == (0, ("no RotaryEmbedding in the graph",))
        assert operators(model) == before


def test_sums_that_turn_halves_by_other_angles_stay() -> None:
    q, positions = value("q", HEADS), value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    angle = angles(positions, parameter("frequencies", FREQUENCIES))
    y = written(q, doubled(angle, "Cos"), doubled(angle, "Sin", same=False))
    model = model_of([q, positions], [named("y", y)])
    before = operators(model)
    outcome = apply(lowering(model, max_tokens=16), rotary_tables)
    assert (outcome.matched, outcome.declined) == (
        0,
        ("RotaryEmbedding y: channels of a pair are turned by other angles; computed in every step",),
    )
    assert operators(model) == before


def test_layers_with_other_frequencies_get_tables_of_their_own() -> None:
    """gemma3 turns its local and its global layers by different angles."""
    q, k = value("q", HEADS), value("k", HEADS)
    positions = value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    local, *_ = rotary(q, angles(positions, parameter("local", FREQUENCIES)))
    distant, *_ = rotary(k, angles(positions, parameter("global", FREQUENCIES / 8)))
    model = model_of([q, k, positions], [named("y", local), named("z", distant)])
    before = run(model, FEEDS)
    outcome = apply(lowering(model), rotary_tables)
    assert outcome.matched == 2
    assert sorted(n for n in model.graph.initializers if n.startswith("rotary.cos")) == ["rotary.cos.0", "rotary.cos.1"]
    after = run(model, FEEDS)
    for name, wanted in before.items():
        np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-5)


def test_angles_that_depend_on_more_than_positions_stay() -> None:
    q, frequencies = value("q", HEADS), value("frequencies", [4])
    positions = value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    turned, *_ = rotary(q, angles(positions, frequencies))
    model = model_of([q, positions, frequencies], [named("y", turned)])
    before = operators(model)
    outcome = apply(lowering(model), rotary_tables)
    assert (outcome.matched, outcome.declined) == (
        0,
        ("RotaryEmbedding y: its angles depend on more than positions; computed in every step",),
    )
    assert operators(model) == before


def test_angles_that_depend_on_the_largest_position_of_a_call_stay() -> None:
    """A table would hold for every sequence what one of the greatest length gets, as with factors of longrope."""
    q, positions = value("q", HEADS), value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    floats = op("Cast", [positions], ["batch", "tokens"], to=ir.DataType.FLOAT.value)
    longest = op("ReduceMax", [floats], [1, 1], keepdims=1)
    scale = op("Max", [longest, parameter("original", np.array(6, np.float32))], [1, 1])
    turned, *_ = rotary(q, op("Div", [angles(positions, parameter("frequencies", FREQUENCIES)), scale]))
    turned.shape = ir.Shape(HEADS)
    model = model_of([q, positions], [named("y", turned)])
    outcome = apply(lowering(model, max_tokens=16), rotary_tables)
    assert outcome.matched == 0
    assert outcome.declined == ("RotaryEmbedding y: its angles depend on more than positions; computed in every step",)


def apart(x: ir.Value, as_pairs: bool) -> list[ir.Value]:
    """The even and the odd channels of x, by steps of two or as ``[.., R/2, 2]``."""
    if not as_pairs:
        ends = [parameter(f"{x.name}.{name}", np.array([n])) for name, n in (("end", 8), ("axis", 3), ("step", 2))]
        firsts = [parameter(f"{x.name}.first{first}", np.array([first])) for first in (0, 1)]
        return [op("Slice", [x, first, *ends], [*HEADS[:3], 4]) for first in firsts]
    view = op("Reshape", [x, parameter(f"{x.name}.pairs", np.array([0, 0, 0, 4, 2]))], [*HEADS[:3], 4, 2])
    axis = parameter(f"{x.name}.axis", np.array([4]))
    cuts = [parameter(f"{x.name}.cut{cut}", np.array([cut])) for cut in (0, 1, 2)]
    slices = [op("Slice", [view, *cuts[n : n + 2], axis], [*HEADS[:3], 4, 1]) for n in (0, 1)]
    return [op("Squeeze", [each, axis], [*HEADS[:3], 4]) for each in slices]


def complex_product(x: ir.Value, cos: ir.Value, sin: ir.Value, as_pairs: bool) -> ir.Value:
    """Pairs of neighbours turned: as pairs (DeepSeek-V2), or first the real parts of all (DeepSeek-V3)."""
    even, odd = apart(x, as_pairs)
    products = [op("Mul", [a, b], even.shape) for a, b in ((even, cos), (odd, sin), (odd, cos), (even, sin))]
    parts = [op("Sub", products[:2], even.shape), op("Add", products[2:], even.shape)]
    if not as_pairs:
        return op("Concat", parts, HEADS, axis=-1)
    axis = parameter(f"{x.name}.last", np.array([-1]))
    columns = [op("Unsqueeze", [part, axis], [*HEADS[:3], 4, 1]) for part in parts]
    stacked = op("Concat", columns, [*HEADS[:3], 4, 2], axis=-1)
    return op("Reshape", [stacked, parameter(f"{x.name}.flat", np.array([0, 0, 0, 8]))], HEADS)


@pytest.mark.parametrize("as_pairs", [False, True])
def test_complex_products_are_rotary_embeddings(as_pairs: bool) -> None:
    q, k = value("q", HEADS), value("k", HEADS)
    positions = value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    angle = angles(positions, parameter("frequencies", FREQUENCIES))
    heads = parameter("heads", np.array([1]))
    cos, sin = (
        op("Unsqueeze", [op(f, [angle], angle.shape), heads], ["batch", 1, "tokens", 4]) for f in ("Cos", "Sin")
    )
    turned = [named(name, complex_product(x, cos, sin, as_pairs)) for name, x in (("y", q), ("z", k))]
    model = model_of([q, k, positions], turned)
    before = run(model, FEEDS)
    outcome = apply(lowering(model, max_tokens=16), rotary_tables)
    assert (outcome.matched, outcome.declined) == (2, ())
    moves = {"Slice", "Concat"} if not as_pairs else set()
    assert {*operators(model)} == {"RotaryEmbedding"} | moves
    after = run(model, FEEDS)
    for name, wanted in before.items():
        np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("angles_first", [False, True])
def test_one_head_is_told_from_the_angles_it_is_turned_by(angles_first: bool) -> None:
    """Both are ``[B, 1, S, R/2]``, and a product does not say which is which."""
    shape = ["batch", 1, "tokens", 8]
    x, positions = value("x", shape), value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    angle = angles(positions, parameter("frequencies", FREQUENCIES))
    heads = parameter("heads", np.array([1]))
    cos, sin = (
        op("Unsqueeze", [op(f, [angle], angle.shape), heads], ["batch", 1, "tokens", 4]) for f in ("Cos", "Sin")
    )
    ends = [parameter(name, np.array([n])) for name, n in (("end", 8), ("axis", 3), ("step", 2))]
    even, odd = (
        op("Slice", [x, parameter(f"first{first}", np.array([first])), *ends], [*shape[:3], 4]) for first in (0, 1)
    )
    factors = [(even, cos), (odd, sin), (odd, cos), (even, sin)]
    products = [op("Mul", pair[::-1] if angles_first else pair, even.shape) for pair in factors]
    parts = [op("Sub", products[:2], even.shape), op("Add", products[2:], even.shape)]
    model = model_of([x, positions], [named("y", op("Concat", parts, shape, axis=-1))])
    outcome = apply(lowering(model, max_tokens=16), rotary_tables)
    assert (outcome.matched, outcome.declined) == (1, ())


def test_parts_of_two_sizes_are_no_halves() -> None:
    """One channel is turned against each of four."""
    x, positions = value("x", [*HEADS[:3], 5]), value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    angle = angles(positions, parameter("frequencies", FREQUENCIES))
    heads = parameter("heads", np.array([1]))
    cos, sin = (
        op("Unsqueeze", [op(f, [angle], angle.shape), heads], ["batch", 1, "tokens", 4]) for f in ("Cos", "Sin")
    )
    cuts, axis = [parameter(f"cut{cut}", np.array([cut])) for cut in (0, 1, 5)], parameter("axis", np.array([3]))
    one, four = (op("Slice", [x, *cuts[n : n + 2], axis], [*HEADS[:3], size]) for n, size in ((0, 1), (1, 4)))
    products = [op("Mul", pair, four.shape) for pair in ((one, cos), (four, sin), (four, cos), (one, sin))]
    parts = [op("Sub", products[:2], four.shape), op("Add", products[2:], four.shape)]
    model = model_of([x, positions], [named("y", op("Concat", parts, HEADS, axis=-1))])
    assert apply(lowering(model, max_tokens=16), rotary_tables).matched == 0


def test_a_product_with_the_conjugate_is_none() -> None:
    """Turned the other way, which no table of these angles does."""
    x, positions = value("q", HEADS), value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    angle = angles(positions, parameter("frequencies", FREQUENCIES))
    heads = parameter("heads", np.array([1]))
    cos, sin = (
        op("Unsqueeze", [op(f, [angle], angle.shape), heads], ["batch", 1, "tokens", 4]) for f in ("Cos", "Sin")
    )
    even, odd = apart(x, False)
    products = [op("Mul", [a, b], even.shape) for a, b in ((even, cos), (odd, sin), (odd, cos), (even, sin))]
    parts = [op("Add", products[:2], even.shape), op("Sub", products[2:], even.shape)]
    model = model_of([x, positions], [named("y", op("Concat", parts, HEADS, axis=-1))])
    assert apply(lowering(model, max_tokens=16), rotary_tables).matched == 0
