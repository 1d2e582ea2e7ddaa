from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.passes.base import CONTRIB, PassResult
from engines.passes.graph import linears, logit_positions
from engines.passes.onnxruntime import block_linears, norm_rows, norms
from tapeout.schemes import Scheme
from tests.lowering import apply, group, linear, lowering, model_of, named, op, operators, parameter, run, value
from tests.random_linears import random_linear

pytestmark = pytest.mark.usefixtures("native_operators")

RNG = np.random.default_rng(0)
SHAPE = ["batch", "tokens", 32]
HEAD = random_linear(53, 32, Scheme(bits=6, group_size=32, symmetric=True))
FEEDS = {name: RNG.standard_normal((2, 3, 32)).astype(np.float32) for name in "ab"}
ROWS = np.array([4, 0, 0], np.int64)


def norm(x: ir.Value) -> ir.Value:
    weight = parameter("norm.weight", RNG.standard_normal(32).astype(np.float32))
    return op("RMSNormalization", [x, weight], x.shape, axis=-1, epsilon=0.03)


def inputs() -> tuple[ir.Value, ir.Value]:
    return value("a", SHAPE), value("b", SHAPE)


def fused(model: ir.Model, *, quantized: bool = True) -> PassResult:
    """Numbers before the pass are those after it."""
    known = {"lm_head.weight": HEAD} if quantized else {}
    lowered = lowering(model, known, groups=[group("lm_head", "lm_head", out_features=53)])
    apply(lowered, linears, norms, logit_positions, block_linears)
    feeds = {i.name or "": {**FEEDS, "logit_positions": ROWS}[i.name or ""] for i in model.graph.inputs}
    before = run(model, feeds) if quantized else {}
    outcome = apply(lowered, norm_rows)
    for name, expected in before.items():
        np.testing.assert_allclose(run(model, feeds)[name], expected, rtol=1e-4, atol=1e-4)
    return outcome


def head(x: ir.Value) -> ir.Value:
    return named("logits", linear(x, "lm_head", np.zeros((53, 32), np.float32)))


@pytest.mark.parametrize("residual", [False, True])
def test_the_last_norm_and_the_choice_of_tokens_are_one_operator(residual: bool) -> None:
    a, b = inputs()
    stream = op("Add", [a, b], SHAPE) if residual else a
    model = model_of([a, b] if residual else [a], [head(norm(stream))])
    assert fused(model) == PassResult(1)
    assert operators(model) == ["NormRows", "BlockLinear"]
    node = next(n for n in model.graph if n.op_type == "NormRows")
    assert (node.inputs[1] is None) != residual
    assert node.attributes["epsilon"].as_float() == pytest.approx(0.03)


def test_a_sum_or_norm_that_others_read_stays() -> None:
    for which in ("sum", "norm"):
        a, b = inputs()
        stream = op("Add", [a, b], SHAPE)
        normal = norm(stream)
        read = named("z", op("Neg", [stream if which == "sum" else normal], SHAPE))
        model = model_of([a, b], [head(normal), read])
        assert fused(model) == PassResult(0, ("the last norm or its sum has other consumers",))
        assert "Gather" in operators(model) and "SkipSimplifiedLayerNormalization" in operators(model)


def test_a_sum_with_a_bias_stays() -> None:
    a, b = inputs()
    weights = [parameter(f"norm.{name}", np.ones(32, np.float32)) for name in ("weight", "bias")]
    made = op("SkipSimplifiedLayerNormalization", [a, b, *weights], SHAPE, domain=CONTRIB, epsilon=0.03)
    assert fused(model_of([a, b], [head(made)])) == PassResult(0, ("the sum before the last norm has a bias",))


def test_a_head_that_is_not_native_keeps_the_norm() -> None:
    a, b = inputs()
    model = model_of([a, b], [head(norm(op("Add", [a, b], SHAPE)))])
    assert fused(model, quantized=False) == PassResult(0, ("lm_head is not a native linear",))


def test_without_a_norm_or_a_choice_of_tokens_that_is_said() -> None:
    a, _ = inputs()
    model = model_of([a], [head(op("Tanh", [a], SHAPE))])
    assert fused(model) == PassResult(0, ("no norm right before lm_head's tokens are selected",))
    lowered = lowering(model_of([inputs()[0]], [named("y", op("Neg", [value("x", SHAPE)], SHAPE))]))
    assert norm_rows.run(lowered) == PassResult(0, ("logits are not selected by position",))
