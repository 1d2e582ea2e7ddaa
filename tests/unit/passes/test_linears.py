from __future__ import annotations

import numpy as np

from engines.passes import linear_kernels, linears
from tests.lowering import apply, linear, lowering, model_of, named, op, operators, parameter, run, value

RNG = np.random.default_rng(0)
W = RNG.standard_normal((24, 32)).astype(np.float32)
B = RNG.standard_normal(24).astype(np.float32)
X = RNG.standard_normal((2, 3, 32)).astype(np.float32)


def test_a_product_and_its_bias_become_one_linear_that_computes_the_same() -> None:
    x = value("x", ["batch", "tokens", 32])
    model = model_of([x], [named("y", linear(x, "block.fc", W, B))])
    before = run(model, {"x": X})["y"]
    lowered = lowering(model)
    outcome = apply(lowered, linears)
    assert (outcome.matched, outcome.declined) == (1, ())
    (node,) = model.graph
    assert linears.is_linear(node)
    assert linears.weights_of(node) == ["block.fc.weight"] and linears.biases_of(node) == ["block.fc.bias"]
    assert linears.out_features_of(node) == [24]
    apply(lowered, linear_kernels)
    np.testing.assert_allclose(run(model, {"x": X})["y"], before, rtol=1e-5, atol=1e-5)


def test_a_sum_that_others_also_read_past_is_no_bias() -> None:
    x = value("x", ["batch", "tokens", 32])
    product = linear(x, "block.fc", W)
    shape = ["batch", "tokens", 24]
    biased = op("Add", [product, parameter("block.fc.bias", B)], shape)
    model = model_of([x], [named("y", op("Mul", [product, biased], shape))])
    before = run(model, {"x": X})["y"]
    lowered = lowering(model)
    apply(lowered, linears)
    (node,) = [n for n in model.graph if linears.is_linear(n)]
    assert linears.biases_of(node) == [""]
    apply(lowered, linear_kernels)
    np.testing.assert_allclose(run(model, {"x": X})["y"], before, rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_stored_the_other_way_is_left_and_said() -> None:
    x = value("x", ["batch", "tokens", 32])
    y = op("MatMul", [x, parameter("block.fc.weight", np.ascontiguousarray(W.T))], ["batch", "tokens", 24])
    model = model_of([x], [named("y", y)])
    outcome = apply(lowering(model), linears)
    assert outcome.matched == 0 and operators(model) == ["MatMul"]
    assert outcome.declined == ("MatMul y: its weight is not a transposed [out, in] parameter; kept in float",)
