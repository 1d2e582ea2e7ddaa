from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from engines.passes.graph import linears
from engines.passes.onnxruntime import linear_kernels
from engines.passes.tensorrt import float_linears
from tapeout.graph_analysis.linears import find_linears
from tapeout.quantized import round_to_nearest
from tapeout.schemes import Scheme
from tests.lowering import apply, group, linear, lowering, model_of, named, op, operators, parameter, run, value

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


@pytest.mark.parametrize(
    ("kernels", "quantized"), [(linear_kernels, False), (linear_kernels, True), (float_linears, False)]
)
def test_a_weight_that_is_stored_the_other_way_is_a_linear_like_any(kernels: ModuleType, quantized: bool) -> None:
    """gpt2 stores ``[in, out]``; codes are ``[out, in]`` always."""
    x = value("x", ["batch", "tokens", 32])
    y = op("MatMul", [x, parameter("block.fc.weight", np.ascontiguousarray(W.T))], ["batch", "tokens", 24])
    model = model_of([x], [named("y", op("Add", [y, parameter("block.fc.bias", B)], ["batch", "tokens", 24]))])
    (found,) = find_linears(model.graph)
    assert found.transposed and found.shape == (24, 32)
    codes = round_to_nearest(W, Scheme(bits=8, group_size=32, symmetric=True))
    groups = [group("block", "block.fc", out_features=24).model_copy(update={"transposed": True})]
    lowered = lowering(model, {"block.fc.weight": codes} if quantized else {}, groups=groups)
    outcome = apply(lowered, linears)
    assert (outcome.matched, outcome.declined) == (1, ())
    assert linears.weights_of(model.graph[0]) == ["block.fc.weight"]
    assert "block.fc.weight" not in model.graph.initializers
    apply(lowered, kernels)
    expected = X @ (codes.dequantize() if quantized else W).T + B
    tolerance = 0.02 if quantized else 1e-5  # activations are rounded to int8 beside codes
    assert np.abs(run(model, {"x": X})["y"] - expected).max() < tolerance * np.abs(expected).max()


def test_a_product_with_what_is_no_parameter_is_left_and_said() -> None:
    x, other = value("x", ["batch", "tokens", 32]), value("other", [32, 24])
    model = model_of([x, other], [named("y", op("MatMul", [x, other], ["batch", "tokens", 24]))])
    outcome = apply(lowering(model), linears)
    assert outcome.matched == 0 and operators(model) == ["MatMul"]
    assert outcome.declined == ("MatMul y: its weight is not a parameter; kept in float",)
