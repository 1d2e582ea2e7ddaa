from __future__ import annotations

import numpy as np

from engines.passes.graph import folded
from tests.lowering import apply, lowering, model_of, named, op, operators, parameter, run, value

RNG = np.random.default_rng(0)


def test_minus_the_exponential_of_a_parameter_is_an_initializer() -> None:
    x, log = value("x", ["rows", 8]), parameter("layer.A_log", RNG.standard_normal(8).astype(np.float32))
    rate = op("Neg", [op("Exp", [log], [8])], [8])
    model = model_of([x], [named("y", op("Mul", [rate, x], ["rows", 8]))])
    given = {"x": RNG.standard_normal((3, 8)).astype(np.float32)}
    before = run(model, given)["y"]
    outcome = apply(lowering(model), folded)
    assert (outcome.matched, outcome.declined) == (2, ())
    assert operators(model) == ["Mul"]
    np.testing.assert_allclose(run(model, given)["y"], before, rtol=1e-6)


def test_large_parameters_and_what_depends_on_tokens_stay() -> None:
    x, large = value("x", ["rows", 8]), parameter("layer.weight", np.ones((300, 300), np.float32))
    weight = op("Neg", [large], [300, 300])
    outputs = [named("y", op("Exp", [x], ["rows", 8])), named("z", op("Exp", [weight], [300, 300]))]
    model = model_of([x], outputs)
    outcome = apply(lowering(model), folded)
    assert outcome.matched == 0 and outcome.declined == ("nothing is computed from parameters alone",)
    assert sorted(operators(model)) == ["Exp", "Exp", "Neg"]


def test_another_shape_of_a_parameter_is_folded_with_what_reads_it() -> None:
    x, log = value("x", ["rows", 8, 2]), parameter("layer.A_log", RNG.standard_normal(8).astype(np.float32))
    apart = op("Reshape", [op("Exp", [log], [8]), parameter("apart", np.array([8, 1]))], [8, 1])
    model = model_of([x], [named("y", op("Mul", [op("Neg", [apart], [8, 1]), x], ["rows", 8, 2]))])
    given = {"x": RNG.standard_normal((3, 8, 2)).astype(np.float32)}
    before = run(model, given)["y"]
    assert apply(lowering(model), folded).matched == 2
    assert operators(model) == ["Mul"]
    np.testing.assert_allclose(run(model, given)["y"], before, rtol=1e-6)
