"""The likeliest token is chosen in the graph, and logits stay what they were."""

from __future__ import annotations

import numpy as np

from engines.passes import next_tokens
from tests.lowering import apply, lowering, model_of, named, op, run, value


def test_the_first_of_the_largest_logits_is_chosen() -> None:
    x = value("x", ["rows", 5])
    model = model_of([x], [named("logits", op("Neg", [x], ["rows", 5]))])
    assert apply(lowering(model), next_tokens).matched == 1
    rows = -np.array([[0, 3, 1, 3, 2], [9, 9, 9, 9, 9], [-4, -3, -2, -1, -5]], np.float32)
    results = run(model, {"x": rows})
    np.testing.assert_array_equal(results["logits"], -rows)
    assert results["next_tokens"].tolist() == [1, 0, 3]


def test_logits_of_another_shape_are_left() -> None:
    x = value("x", ["batch", "tokens", 5])
    model = model_of([x], [named("logits", op("Neg", [x], ["batch", "tokens", 5]))])
    outcome = apply(lowering(model), next_tokens)
    assert outcome.matched == 0 and outcome.declined
