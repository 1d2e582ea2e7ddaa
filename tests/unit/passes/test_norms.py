from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.passes.onnxruntime import norms
from tests.lowering import apply, lowering, model_of, named, op, operators, parameter, run, value

RNG = np.random.default_rng(0)
SHAPE = ["batch", "tokens", 32]
WEIGHT = RNG.standard_normal(32).astype(np.float32)
BIAS = RNG.standard_normal(32).astype(np.float32)
FEEDS = {name: RNG.standard_normal((2, 3, 32)).astype(np.float32) for name in ("a", "b")}
EPSILON = 0.03  # large enough to be seen in the result


def norm(kind: str, x: ir.Value, weight: np.ndarray = WEIGHT, *, bias: bool = False, axis: int = -1) -> ir.Value:
    """A norm and something that reads it: no norm is an output of a model. One of another weight is named after it."""
    name = "norm" if weight is not BIAS else "other"
    inputs = [x, parameter(f"{name}.weight", weight), *([parameter("norm.bias", BIAS)] if bias else [])]
    return op("Neg", [op(kind, inputs, x.shape, axis=axis, epsilon=EPSILON)], x.shape)


def check(model: ir.Model, matched: int, reasons: list[str], expected_operators: list[str]) -> None:
    before = run(model, FEEDS)
    outcome = apply(lowering(model), norms)
    assert outcome.matched == matched
    assert [reason.partition("; ")[0] for reason in outcome.declined] == reasons
    assert sorted(o for o in operators(model) if o != "Neg") == sorted(expected_operators)
    after = run(model, FEEDS)
    assert list(after) == list(before)
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "bias", "fused"),
    [
        ("RMSNormalization", False, "SkipSimplifiedLayerNormalization"),
        ("LayerNormalization", False, "SkipLayerNormalization"),
        ("LayerNormalization", True, "SkipLayerNormalization"),
    ],
)
def test_a_residual_sum_and_its_norm_are_one_node_that_gives_both(kind: str, bias: bool, fused: str) -> None:
    a, b = value("a", SHAPE), value("b", SHAPE)
    stream = op("Add", [a, b], SHAPE)
    outputs = [named("y", norm(kind, stream, bias=bias)), named("z", op("Neg", [stream], SHAPE))]
    check(model_of([a, b], outputs), 1, [], [fused])


def test_a_norm_with_no_sum_before_it_is_the_plain_kernel() -> None:
    a = value("a", SHAPE)
    reasons = ["norm.weight: no residual sum before it"]
    check(model_of([a], [named("y", norm("RMSNormalization", a))]), 1, reasons, ["SimplifiedLayerNormalization"])


def test_a_norm_of_one_plus_a_parameter_is_named_after_it() -> None:
    """gemma's norms multiply by ``1 + weight``."""
    a, one = value("a", SHAPE), parameter("one", np.ones(32, np.float32))
    weight = op("Add", [parameter("norm.weight", WEIGHT), one], [32])
    y = op("Neg", [op("RMSNormalization", [a, weight], SHAPE, axis=-1, epsilon=EPSILON)], SHAPE)
    reasons = ["norm.weight: no residual sum before it"]
    check(model_of([a], [named("y", y)]), 1, reasons, ["Add", "SimplifiedLayerNormalization"])


def test_a_layer_norm_with_no_sum_before_it_stays() -> None:
    a = value("a", SHAPE)
    model = model_of([a], [named("y", norm("LayerNormalization", a, bias=True))])
    check(model, 0, ["norm.weight: no residual sum before it"], ["LayerNormalization"])


def test_a_sum_with_a_constant_is_no_residual() -> None:
    a = value("a", SHAPE)
    stream = op("Add", [a, parameter("shift.value", BIAS)], SHAPE)
    model = model_of([a], [named("y", norm("RMSNormalization", stream))])
    check(model, 1, ["norm.weight: the sum before it adds a constant"], ["Add", "SimplifiedLayerNormalization"])


def test_a_sum_that_broadcasts_is_no_residual() -> None:
    a, b = value("a", SHAPE), value("b", SHAPE)
    row = op("ReduceMean", [b, parameter("axes", np.array([1], np.int64))], ["batch", 1, 32], keepdims=1)
    model = model_of([a, b], [named("y", norm("RMSNormalization", op("Add", [a, row], SHAPE)))])
    check(
        model, 1, ["norm.weight: the sum before it broadcasts"], ["Add", "ReduceMean", "SimplifiedLayerNormalization"]
    )


def test_a_norm_over_several_axes_stays() -> None:
    a = value("a", SHAPE)
    weight = RNG.standard_normal((3, 32)).astype(np.float32)
    model = model_of([a], [named("y", norm("LayerNormalization", a, weight, axis=1))])
    check(model, 0, ["norm.weight: it normalizes more than the last axis"], ["LayerNormalization"])


def test_a_sum_that_two_norms_read_is_made_once() -> None:
    """Parallel blocks (phi, gpt_neox) normalize one stream twice."""
    a, b = value("a", SHAPE), value("b", SHAPE)
    stream = op("Add", [a, b], SHAPE)
    outputs = [named("y", norm("RMSNormalization", stream)), named("z", norm("RMSNormalization", stream, BIAS))]
    check(
        model_of([a, b], outputs),
        2,
        ["other.weight: no residual sum before it"],
        ["SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization"],
    )
