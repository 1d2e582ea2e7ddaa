from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.passes.base import CONTRIB, PassResult
from engines.passes.graph import linears
from engines.passes.onnxruntime import block_linears, native_norms, norms
from tapeout.schemes import Scheme
from tests.attention_graph import MAX_TOKENS, Blocks, Layout, exported, graph, lower, sequences
from tests.lowering import apply, group, linear, lowering, model_of, named, op, operators, parameter, run, value
from tests.random_linears import random_linear

pytestmark = pytest.mark.usefixtures("native_operators")

RNG = np.random.default_rng(0)
K = 32
SHAPE = ["batch", "tokens", K]
WEIGHT = RNG.standard_normal(K).astype(np.float32)
SCHEME = Scheme(bits=6, group_size=32, symmetric=True)
GIVEN = {name: RNG.standard_normal((2, 3, K)).astype(np.float32) for name in "ab"}


def norm(x: ir.Value, weight: ir.Value | None = None) -> ir.Value:
    return op("RMSNormalization", [x, weight or parameter("norm.weight", WEIGHT)], x.shape, axis=-1, epsilon=0.03)


def two_linears(x: ir.Value) -> list[ir.Value]:
    """Both read a norm, so neither computes it."""
    return [named(f"y.{name}", linear(x, name, np.zeros((48, K), np.float32))) for name in ("first", "second")]


def lowered(model: ir.Model) -> PassResult:
    """Numbers before the pass are those after it."""
    names = ("first", "second")
    known = {f"{name}.weight": random_linear(48, K, SCHEME) for name in names}
    state = lowering(model, known, groups=[group(name, name, out_features=48) for name in names])
    apply(state, linears, norms, block_linears)
    given = {i.name or "": GIVEN[i.name or ""] for i in model.graph.inputs}
    before = run(model, given)
    outcome = apply(state, native_norms)
    for name, found in run(model, given).items():
        np.testing.assert_allclose(found, before[name], rtol=1e-4, atol=1e-4)
    return outcome


def test_a_norm_of_a_sum_that_others_read_returns_both() -> None:
    a, b = value("a", SHAPE), value("b", SHAPE)
    total = op("Add", [a, b], SHAPE)
    model = model_of([a, b], [*two_linears(norm(total)), named("sum", op("Neg", [total], SHAPE))])
    assert lowered(model) == PassResult(1)
    assert sorted(operators(model)) == ["BlockLinear", "BlockLinear", "Neg", "ResidualNorm"]
    node = next(n for n in model.graph if n.op_type == "ResidualNorm")
    assert node.attributes["epsilon"].as_float() == pytest.approx(0.03)


def test_a_norm_without_a_sum_is_one_operator() -> None:
    a = value("a", SHAPE)
    model = model_of([a], two_linears(norm(a)))
    assert lowered(model) == PassResult(1)
    assert operators(model) == ["Norm", "BlockLinear", "BlockLinear"]


def test_a_norm_that_no_native_operator_reads_stays() -> None:
    a = value("a", SHAPE)
    model = model_of([a], [named("y", op("Neg", [norm(a)], SHAPE))])
    assert lowered(model) == PassResult(0, ("no norm is left before a native operator",))
    assert operators(model) == ["SimplifiedLayerNormalization", "Neg"]


def test_a_norm_of_more_numbers_than_it_has_weights_stays() -> None:
    a = value("a", SHAPE)
    one = op("SimplifiedLayerNormalization", [a, parameter("norm.weight", WEIGHT[:1])], SHAPE, axis=-1, epsilon=0.03)
    model = model_of([a], two_linears(one))
    assert lowered(model).declined == (
        "norm.weight: the norm has no weight for each of a multiple of 16 channels; ONNX Runtime computes it",
    )


def test_a_sum_with_a_bias_stays() -> None:
    a, b = value("a", SHAPE), value("b", SHAPE)
    weights = [parameter("norm.weight", WEIGHT), parameter("norm.bias", WEIGHT)]
    made = op("SkipSimplifiedLayerNormalization", [a, b, *weights], SHAPE, domain=CONTRIB, epsilon=0.03)
    declined = lowered(model_of([a, b], two_linears(made))).declined
    assert declined == ("norm.weight: the sum before its norm has a bias; ONNX Runtime computes it",)


def normed_attention(model: ir.Model, layout: Layout) -> PassResult:
    lower(layout, model)
    apply(state := lowering(model), norms)
    return apply(state, native_norms)


@pytest.mark.parametrize("rotary", ["half", "none"])
def test_whole_queries_and_keys_are_normalized_where_one_linear_has_made_them(rotary: str) -> None:
    """Planted: the weights of queries and of keys change places."""
    layout = Layout(merged=True, normed=True, rotary=rotary)
    model, rows = graph(layout), sequences(layout, 2)
    expected = [exported(model, layout, row, MAX_TOKENS) for row in rows]
    assert normed_attention(model, layout).matched == 2
    assert operators(model) == ["MatMul", "Norm", "CachedAttention", "Neg"]
    blocks = Blocks(model, layout, rows=2)
    for row in range(2):
        for start, count in ((0, 3), (3, 5)):
            actual = blocks.step([rows[row]], [start], count, first=row)[0]
            np.testing.assert_allclose(actual, expected[row][start : start + count], rtol=1e-4, atol=1e-5)
    together = blocks.step(rows, [8, 8], 1)
    for actual, whole in zip(together, expected, strict=True):
        np.testing.assert_allclose(actual, whole[8:9], rtol=1e-4, atol=1e-5)


def test_norms_of_queries_and_keys_that_linears_of_their_own_have_made_stay_apart() -> None:
    layout = Layout(normed=True)
    assert normed_attention(model := graph(layout), layout).matched == 2
    assert operators(model) == ["Norm", "Norm", "CachedAttention", "Neg"]


def test_norms_with_other_epsilons_stay_apart() -> None:
    model = graph(layout := Layout(merged=True, normed=True))
    first = next(node for node in model.graph if node.op_type == "RMSNormalization")
    first.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
    assert normed_attention(model, layout).matched == 2
    assert operators(model).count("Norm") == 2 and "Split" in operators(model)
