"""The likeliest token is found in the head, and logits stay what they were."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.bundle import GREEDY, NEXT_TOKENS
from engines.passes.graph import linears
from engines.passes.onnxruntime import block_linears, greedy_head
from tapeout.schemes import Scheme
from tests.lowering import apply, group, linear, lowering, model_of, named, op, operators, run, value
from tests.random_linears import random_linear

X = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
OUTSIDE = "logits are not the output of a native linear; tokens are chosen outside the graph"


def lowered(logits: ir.Value, x: ir.Value) -> tuple[ir.Model, tuple[int, tuple[str, ...]]]:
    model = model_of([x], [named("logits", logits)])
    codes = {"block.head.weight": random_linear(53, 64, Scheme(bits=8, group_size=32, symmetric=True))}
    made = lowering(model, codes, groups=[group("lm_head", "block.head", in_features=64, out_features=53)])
    apply(made, linears, block_linears)
    before = run(model, {"x": X})["logits"]
    outcome = apply(made, greedy_head)
    feeds = {"x": X, GREEDY: np.array(False)}
    np.testing.assert_array_equal(run(model, feeds)["logits"], before)
    if outcome.matched:
        chosen = run(model, feeds | {GREEDY: np.array(True)})
        assert chosen["logits"].shape == (0, 53)
        assert chosen[NEXT_TOKENS].tolist() == before.argmax(axis=1).tolist()
    return model, (outcome.matched, outcome.declined)


def head(x: ir.Value) -> ir.Value:
    return linear(x, "block.head", np.zeros((53, 64), np.float32))


@pytest.mark.usefixtures("native_operators")
def test_a_native_head_gives_either() -> None:
    x = value("x", ["rows", 64])
    model, (matched, declined) = lowered(head(x), x)
    assert (matched, declined) == (1, ()) and operators(model) == ["HeadLinear"]
    assert [output.name for output in model.graph.outputs] == ["logits", NEXT_TOKENS]


@pytest.mark.usefixtures("native_operators")
def test_a_cap_behind_the_head_keeps_it_as_it_is() -> None:
    x = value("x", ["rows", 64])
    model, outcome = lowered(op("Tanh", [head(x)], ["rows", 53]), x)
    assert outcome == (0, (OUTSIDE,)) and operators(model) == ["BlockLinear", "Tanh"]


def test_logits_of_another_shape_are_left() -> None:
    x = value("x", ["batch", "tokens", 5])
    model = model_of([x], [named("logits", op("Neg", [x], ["batch", "tokens", 5]))])
    outcome = apply(lowering(model), greedy_head)
    assert outcome.matched == 0 and outcome.declined
