"""ChooseExperts, the operator: what the standard operators of a router choose, the same in any batch."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kernels import cpu as native
from engines.passes.onnxruntime import routers
from tests.lowering import apply, lowering, model_of, named, op, parameter, run, value
from tests.native import Matrix

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
KINDS = ("all", "normalized", "chosen")


def constant(name: str, number: int) -> ir.Value:
    return parameter(name, np.array([number], np.int64))


def top(scores: ir.Value, experts: int, chosen: int) -> tuple[ir.Value, ir.Value]:
    values = op("TopK", [scores, constant("k", chosen)], ["tokens", chosen], outputs=2, axis=-1)
    node = values.producer()
    assert node is not None
    node.outputs[1].type, node.outputs[1].shape = ir.TensorType(ir.DataType.INT64), ir.Shape(["tokens", chosen])
    return values, node.outputs[1]


def router(kind: str, experts: int, chosen: int) -> ir.Model:
    logits = value("logits", ["tokens", experts])
    if kind == "chosen":
        values, index = top(logits, experts, chosen)
        weight = op("Softmax", [values], ["tokens", chosen], axis=-1)
    else:
        weight, index = top(op("Softmax", [logits], ["tokens", experts], axis=-1), experts, chosen)
        if kind == "normalized":
            total = op("ReduceSum", [weight, constant("last", -1)], ["tokens", 1], keepdims=1)
            weight = op("Div", [weight, total], ["tokens", chosen])
    return model_of([logits], [named("index", index), named("weight", weight)])


def random(tokens: int, experts: int, seed: int) -> Matrix:
    return (np.random.default_rng(seed).standard_normal((tokens, experts)) * 3).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    experts=st.integers(1, 130),
    share=st.floats(0, 1),
    tokens=st.integers(1, 60),
    seed=st.integers(0, 2**31),
)
def test_it_chooses_what_the_standard_operators_choose(
    kind: str, experts: int, share: float, tokens: int, seed: int
) -> None:
    chosen = max(1, round(share * experts))
    model, logits = router(kind, experts, chosen), random(tokens, experts, seed)
    before = run(model, {"logits": logits})
    outcome = apply(lowering(model), routers)
    assert (outcome.matched, outcome.declined) == (1, ())
    assert [node.op_type for node in model.graph] == ["ChooseExperts"]
    after = run(model, {"logits": logits}, threads=2)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :chosen]
    assert (after["index"] == order).all() or (after["index"] == before["index"]).all()
    np.testing.assert_allclose(after["weight"], before["weight"], rtol=2e-6)
    for token in range(min(tokens, 3)):
        alone = run(model, {"logits": logits[token : token + 1]})
        assert all((alone[name][0] == after[name][token]).all() for name in ("index", "weight"))


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_logits_the_first_is_chosen_and_nan_chooses_experts_that_exist(kind: str) -> None:
    model = router(kind, 20, 3)
    apply(lowering(model), routers)
    logits = np.zeros((3, 20), np.float32)
    logits[1], logits[2, 5] = np.nan, 1
    found = run(model, {"logits": logits})
    assert found["index"].tolist() == [[0, 1, 2], [0, 1, 2], [5, 0, 1]]
    assert np.isnan(found["weight"][1]).all() and np.isfinite(found["weight"][[0, 2]]).all()


def test_other_ways_to_choose_are_left_to_onnx_runtime() -> None:
    logits = value("logits", ["tokens", 8])
    weight, index = top(op("Sigmoid", [logits], ["tokens", 8]), 8, 2)
    model = model_of([logits], [named("index", index), named("weight", op("Neg", [weight], ["tokens", 2]))])
    outcome = apply(lowering(model), routers)
    assert outcome.matched == 0 and "weighted in a way without a kernel" in outcome.declined[0]
