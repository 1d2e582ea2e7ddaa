from __future__ import annotations

import numpy as np
import pytest

from engines.passes.onnxruntime import silu
from tests.lowering import apply, lowering, model_of, named, op, operators, run, value

X = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32) * 4


@pytest.mark.parametrize("sigmoid_first", [True, False])
def test_x_times_its_sigmoid_is_one_node(sigmoid_first: bool) -> None:
    x = value("x", ["rows", 32])
    gate = op("Sigmoid", [x], ["rows", 32])
    model = model_of([x], [named("y", op("Mul", [gate, x] if sigmoid_first else [x, gate], ["rows", 32]))])
    before = run(model, {"x": X})["y"]
    outcome = apply(lowering(model), silu)
    assert (outcome.matched, outcome.declined) == (1, ())
    assert operators(model) == ["QuickGelu"]
    np.testing.assert_allclose(run(model, {"x": X})["y"], before, rtol=1e-5, atol=1e-6)


def test_a_sigmoid_of_something_else_is_left() -> None:
    x, other = value("x", ["rows", 32]), value("other", ["rows", 32])
    gate = named("gate", op("Sigmoid", [other], ["rows", 32]))
    model = model_of([x, other], [named("y", op("Mul", [gate, x], ["rows", 32]))])
    outcome = apply(lowering(model), silu)
    assert outcome.matched == 0
    assert outcome.declined == ("Sigmoid gate: what multiplies it is not its own input; kept as it is",)
    assert operators(model) == ["Sigmoid", "Mul"]


def test_a_sigmoid_that_is_read_elsewhere_too_stays_for_that() -> None:
    x = value("x", ["rows", 32])
    gate = op("Sigmoid", [x], ["rows", 32])
    outputs = [named("y", op("Mul", [gate, x], ["rows", 32])), named("z", op("Neg", [gate], ["rows", 32]))]
    model = model_of([x], outputs)
    before = run(model, {"x": X})
    assert apply(lowering(model), silu).matched == 1
    assert sorted(operators(model)) == ["Neg", "QuickGelu", "Sigmoid"]
    after = run(model, {"x": X})
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6)
