from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from engines.passes.base import CONTRIB
from engines.passes.graph import linears
from engines.passes.onnxruntime import block_linears, linear_inputs, norms, silu
from tapeout.schemes import Scheme
from tests.lowering import apply, group, linear, lowering, model_of, named, op, operators, parameter, run, value
from tests.random_linears import random_linear

pytestmark = pytest.mark.usefixtures("native_operators")

RNG = np.random.default_rng(0)
WIDTH = 64
SHAPE = ["batch", "tokens", WIDTH]
WEIGHT = RNG.standard_normal(WIDTH).astype(np.float32)
FEEDS = {name: RNG.standard_normal((2, 3, WIDTH)).astype(np.float32) for name in ("a", "b")}
FEEDS["x"] = RNG.standard_normal((2, 3, 2 * WIDTH)).astype(np.float32)
EPSILON = 0.03  # large enough to be seen in the result
CODES = {
    name: random_linear(24, WIDTH, Scheme(bits=6, group_size=32, symmetric=True), seed=n)
    for n, name in enumerate(("fc", "up"))
}
GROUPS = [group("layers.0.fc", "block.fc"), group("layers.0.up", "block.up")]


def norm(x: ir.Value) -> ir.Value:
    weight = parameter("norm.weight", WEIGHT)
    return op("RMSNormalization", [x, weight], x.shape, axis=-1, epsilon=EPSILON)


def product(x: ir.Value, name: str = "fc", bias: NDArray[np.float32] | None = None) -> ir.Value:
    return linear(x, f"block.{name}", np.zeros((24, WIDTH), np.float32), bias)


def read(name: str, x: ir.Value) -> ir.Value:
    return named(name, op("Neg", [x], x.shape))


def check(model: ir.Model, matched: int, reasons: list[str], expected_operators: list[str]) -> ir.Model:
    """Numbers before the pass are those after it; the graph's operators are these, beside those that only read."""
    lowered = lowering(model, {f"block.{name}.weight": codes for name, codes in CODES.items()}, groups=GROUPS)
    apply(lowered, linears, norms, silu, block_linears)
    feeds: dict[str, NDArray[Any]] = {**FEEDS}
    before = run(model, feeds)
    outcome = apply(lowered, linear_inputs)
    assert (outcome.matched, list(outcome.declined)) == (matched, reasons)
    assert sorted(o for o in operators(model) if o != "Neg") == sorted(expected_operators)
    after = run(model, feeds)
    assert list(after) == list(before)
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    present = {output.name for node in model.graph for output in node.outputs}
    assert {made.value for made in lowered.linear_outputs} <= present  # what the record says of products stays true
    return model


def test_a_norm_is_done_while_inputs_are_rounded() -> None:
    a = value("a", SHAPE)
    bias = RNG.standard_normal(24).astype(np.float32)
    model = model_of([a], [read("y", product(norm(a), bias=bias))])
    check(model, 1, [], ["NormLinear"])
    node = next(n for n in model.graph if n.op_type == "NormLinear")
    assert node.attributes["epsilon"].as_float() == pytest.approx(EPSILON)


def test_a_residual_sum_and_its_norm_are_and_the_sum_goes_on() -> None:
    a, b = value("a", SHAPE), value("b", SHAPE)
    stream = op("Add", [a, b], SHAPE)
    outputs = [read("y", product(norm(stream))), read("z", stream)]
    model = check(model_of([a, b], outputs), 1, [], ["ResidualNormLinear"])
    np.testing.assert_array_equal(-run(model, FEEDS)["z"], FEEDS["a"] + FEEDS["b"])


def test_a_sum_that_nobody_else_reads_is_still_given() -> None:
    a, b = value("a", SHAPE), value("b", SHAPE)
    check(model_of([a, b], [read("y", product(norm(op("Add", [a, b], SHAPE))))]), 1, [], ["ResidualNormLinear"])


def test_the_sum_may_be_added_to_by_what_the_product_became() -> None:
    """As in a transformer: stream + f(norm(stream))."""
    a, b = value("a", SHAPE), value("b", SHAPE)
    stream = op("Add", [a, b], SHAPE)
    y = product(norm(stream))
    wider = op("Concat", [y, y, op("Slice", [y, *_range(0, 16)], ["batch", "tokens", 16])], SHAPE, axis=-1)
    model = model_of([a, b], [read("y", op("Sum", [stream, wider], SHAPE))])
    check(model, 1, [], ["Concat", "ResidualNormLinear", "Slice", "Sum"])


def _range(start: int, end: int) -> list[ir.Value]:
    numbers = {"starts": start, "ends": end, "axes": 2}
    return [parameter(f"range_{name}", np.array([number], np.int64)) for name, number in numbers.items()]


@pytest.mark.parametrize("residual", [False, True])
def test_a_product_that_is_an_output_keeps_its_name(residual: bool) -> None:
    a, b = value("a", SHAPE), value("b", SHAPE)
    x = op("Add", [a, b], SHAPE) if residual else a
    model = model_of([a, b], [named("y", product(norm(x))), read("z", x)])
    check(model, 1, [], ["ResidualNormLinear" if residual else "NormLinear"])


@pytest.mark.parametrize("residual", [False, True])
def test_a_norm_that_two_products_read_stays(residual: bool) -> None:
    a, b = value("a", SHAPE), value("b", SHAPE)
    said = [f"layers.0.{name}: the norm has other consumers" for name in ("fc", "up")]
    shared = norm(op("Add", [a, b], SHAPE) if residual else a)
    model = model_of([a, b], [read("y", product(shared)), read("z", product(shared, "up"))])
    kind = "SkipSimplifiedLayerNormalization" if residual else "SimplifiedLayerNormalization"
    check(model, 0, said, ["BlockLinear", "BlockLinear", kind])


def test_a_norm_that_is_an_output_stays() -> None:
    a = value("a", SHAPE)
    shared = norm(a)
    model = model_of([a], [read("y", product(shared)), named("z", shared)])
    said = ["layers.0.fc: the norm has other consumers"]
    check(model, 0, said, ["BlockLinear", "SimplifiedLayerNormalization"])


def test_a_product_of_the_sum_beside_a_norm_stays_the_sums() -> None:
    a, b = value("a", SHAPE), value("b", SHAPE)
    stream = op("Add", [a, b], SHAPE)
    said = ["layers.0.fc: neither a norm nor a gate right before it"]
    model = model_of([a, b], [read("y", product(stream)), read("z", norm(stream))])
    check(model, 0, said, ["BlockLinear", "SkipSimplifiedLayerNormalization"])


def test_a_sum_with_a_bias_stays() -> None:
    a, b = value("a", SHAPE), value("b", SHAPE)
    inputs = [a, b, parameter("norm.weight", WEIGHT), parameter("norm.bias", WEIGHT)]
    made = op("SkipSimplifiedLayerNormalization", inputs, SHAPE, domain=CONTRIB, epsilon=EPSILON)
    said = ["layers.0.fc: the sum before its norm has a bias"]
    check(model_of([a, b], [read("y", product(made))]), 0, said, ["BlockLinear", "SkipSimplifiedLayerNormalization"])


@pytest.mark.parametrize("kind", ["LayerNormalization", "Tanh"])
def test_what_is_neither_norm_nor_gate_stays(kind: str) -> None:
    a = value("a", SHAPE)
    x = op(kind, [a], SHAPE) if kind == "Tanh" else op(kind, [a, parameter("norm.weight", WEIGHT)], SHAPE, axis=-1)
    said = ["layers.0.fc: neither a norm nor a gate right before it"]
    check(model_of([a], [read("y", product(x))]), 0, said, ["BlockLinear", kind])


def halves(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    sizes = parameter("halves", np.array([WIDTH, WIDTH], np.int64))
    first, second = op("Split", [x, sizes], SHAPE, outputs=2, axis=-1).producer().outputs  # type: ignore[union-attr]
    return first, second


def silu_of(x: ir.Value) -> ir.Value:
    return op("Mul", [x, op("Sigmoid", [x], SHAPE)], SHAPE)


@pytest.mark.parametrize("gate_first", [True, False])
def test_a_gate_is_done_while_inputs_are_rounded(gate_first: bool) -> None:
    x = value("x", ["batch", "tokens", 2 * WIDTH])
    gate, up = halves(x)
    pair = (silu_of(gate), up) if gate_first else (up, silu_of(gate))
    check(model_of([x], [read("y", product(op("Mul", pair, SHAPE)))]), 1, [], ["GatedLinear"])


def test_a_gate_that_is_multiplied_first_is_scaled_with_its_half() -> None:
    """As in Falcon-H1."""
    x = value("x", ["batch", "tokens", 2 * WIDTH])
    gate, up = halves(x)
    scaled = op("Mul", [gate, parameter("multiplier", np.array(0.4, np.float32))], SHAPE)
    model = check(model_of([x], [read("y", product(op("Mul", [up, silu_of(scaled)], SHAPE)))]), 1, [],
                  ["GatedLinear", "Scale"])  # fmt: skip
    factors = next(n for n in model.graph if n.op_type == "Scale").inputs[1]
    assert factors is not None and factors.const_value is not None
    assert factors.const_value.numpy().tolist() == [np.float32(0.4)] * WIDTH + [1] * WIDTH


def test_halves_that_others_read_are_kept_for_them() -> None:
    x = value("x", ["batch", "tokens", 2 * WIDTH])
    gate, up = halves(x)
    opened = silu_of(gate)
    outputs = [read("y", product(op("Mul", [opened, up], SHAPE))), read("z", opened), read("w", up)]
    check(model_of([x], outputs), 1, [], ["GatedLinear", "QuickGelu", "Split"])


def test_a_gated_activation_that_others_read_stays() -> None:
    x = value("x", ["batch", "tokens", 2 * WIDTH])
    gate, up = halves(x)
    made = op("Mul", [silu_of(gate), up], SHAPE)
    said = ["layers.0.fc: the gated activation has other consumers"]
    check(
        model_of([x], [read("y", product(made)), read("z", made)]),
        0,
        said,
        ["BlockLinear", "Mul", "QuickGelu", "Split"],
    )


@pytest.mark.parametrize("alpha", [1.702, 2.0])
def test_a_gate_of_another_activation_stays(alpha: float) -> None:
    x = value("x", ["batch", "tokens", 2 * WIDTH])
    gate, up = halves(x)
    opened = op("QuickGelu", [gate], SHAPE, domain=CONTRIB, alpha=alpha)
    said = ["layers.0.fc: its gate is not SiLU"]
    model = model_of([x], [read("y", product(op("Mul", [opened, up], SHAPE)))])
    check(model, 0, said, ["BlockLinear", "Mul", "QuickGelu", "Split"])


def test_a_product_of_no_activation_stays() -> None:
    a, b = value("a", SHAPE), value("b", SHAPE)
    said = ["layers.0.fc: its gate is not SiLU"]
    check(model_of([a, b], [read("y", product(op("Mul", [a, b], SHAPE)))]), 0, said, ["BlockLinear", "Mul"])


@pytest.mark.parametrize("source", ["two inputs", "second half", "same half"])
def test_a_gate_that_is_not_the_first_half_stays(source: str) -> None:
    a, b, x = value("a", SHAPE), value("b", SHAPE), value("x", ["batch", "tokens", 2 * WIDTH])
    first, second = halves(x)
    gate, up = {"two inputs": (a, b), "second half": (second, first), "same half": (first, first)}[source]
    said = ["layers.0.fc: gate and up are not the halves of one linear"]
    model = model_of([a, b, x], [read("y", product(op("Mul", [silu_of(gate), up], SHAPE)))])
    check(model, 0, said, ["BlockLinear", "Mul", "QuickGelu"] + ["Split"] * (source != "two inputs"))


def test_every_product_is_taken_by_what_is_before_it() -> None:
    """A whole gated block: the norm before its first product, the gate before its second."""
    a, b = value("a", SHAPE), value("b", SHAPE)
    stream = op("Add", [a, b], SHAPE)
    wide = random_linear(2 * WIDTH, WIDTH, Scheme(bits=4, group_size=32, symmetric=False))
    first = linear(norm(stream), "block.gate_up", np.zeros((2 * WIDTH, WIDTH), np.float32))
    gate, up = halves(first)
    y = product(op("Mul", [silu_of(gate), up], SHAPE))
    model = model_of([a, b], [read("y", y), read("z", stream)])
    lowered = lowering(model, {"block.gate_up.weight": wide, "block.fc.weight": CODES["fc"]})
    apply(lowered, linears, norms, silu, block_linears)
    before = run(model, FEEDS)
    outcome = apply(lowered, linear_inputs)
    assert (outcome.matched, outcome.declined) == (2, ())
    assert [o for o in operators(model) if o != "Neg"] == ["ResidualNormLinear", "GatedLinear"]
    after = run(model, FEEDS)
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_a_graph_without_native_products_is_said(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("stock_operators")
    a = value("a", SHAPE)
    model = model_of([a], [read("y", product(norm(a)))])
    lowered = lowering(model, {"block.fc.weight": CODES["fc"]})
    outcome = apply(lowered, linears, norms, block_linears, linear_inputs)
    assert (outcome.matched, outcome.declined) == (0, ("no native linear in the graph",))
