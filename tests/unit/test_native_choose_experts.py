"""ChooseExperts, the operator: what the standard operators of a router choose, the same in any batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engines.kernels import cpu as native
from engines.passes.onnxruntime import routers
from tests.lowering import apply, lowering, model_of, named, op, parameter, run, value
from tests.native import Matrix

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())


@dataclass(frozen=True)
class Kind:
    """A way to choose. ``of_chosen``: the softmax is that of the chosen. ``best``: how many scores of a group count."""

    scores: str = "Softmax"
    of_chosen: bool = False
    biased: bool = False
    normalized: bool = False
    added: float = 0
    least: float = 0
    factor: float = 1
    groups: int = 1
    kept: int = 1
    best: int = 0
    masked: float = -np.inf  # the experts of other groups


KINDS = {
    "Qwen2-MoE": Kind(),
    "Qwen3-MoE": Kind(normalized=True),
    "Mixtral": Kind(of_chosen=True),
    "LFM2-MoE": Kind("Sigmoid", biased=True, normalized=True, added=1e-6),
    "LFM2-MoE without bias": Kind("Sigmoid"),
    "ERNIE 4.5": Kind(biased=True, normalized=True, least=1e-3),
    "AFMoE": Kind("Sigmoid", biased=True, normalized=True, factor=2.5),
    "DeepSeek-V3": Kind("Sigmoid", biased=True, normalized=True, factor=2.5, groups=4, kept=2, best=2),
    "DeepSeek-V2": Kind(factor=16, groups=4, kept=3, best=1, masked=0),
}


def constant(name: str, number: float, dtype: type = np.int64) -> ir.Value:
    return parameter(name, np.array([number], dtype))


def top(scores: ir.Value, chosen: int, shape: list[str | int], name: str) -> tuple[ir.Value, ir.Value]:
    values = op("TopK", [scores, constant(f"{name}.k", chosen)], [*shape, chosen], outputs=2, axis=-1)
    node = values.producer()
    assert node is not None
    node.outputs[1].type, node.outputs[1].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([*shape, chosen])
    return values, node.outputs[1]


def of_best_groups(kind: Kind, scores: ir.Value, experts: int) -> ir.Value:
    """As transformers' models are exported: a mask of the groups that are not kept."""
    size, integers = experts // kind.groups, ir.TensorType(ir.DataType.INT64)
    shape = parameter("apart", np.array([-1, kind.groups, size], np.int64))
    apart = op("Reshape", [scores, shape], ["tokens", kind.groups, size])
    if kind.best == 1:
        sums = op("ReduceMax", [apart, constant("last", -1)], ["tokens", kind.groups], keepdims=0)
    else:
        best, _ = top(apart, kind.best, ["tokens", kind.groups], "of_group")
        sums = op("ReduceSum", [best, constant("last", -1)], ["tokens", kind.groups], keepdims=0)
    _, index = top(sums, kind.kept, ["tokens"], "groups")
    zeros = op("Expand", [parameter("zero", np.array(0, np.float32)), op("Shape", [sums])], ["tokens", kind.groups])
    one = ir.tensor(np.ones(1, np.float32))
    ones = op("ConstantOfShape", [op("Shape", [index])], ["tokens", kind.kept], value=one)
    for shaped in (zeros, ones):
        made = shaped.producer()
        assert made is not None and made.inputs[-1] is not None
        made.inputs[-1].type = integers
    marks = op("ScatterElements", [zeros, index, ones], ["tokens", kind.groups], axis=1)
    wide = op(
        "Expand",
        [
            op("Unsqueeze", [marks, constant("behind", -1)], ["tokens", kind.groups, 1]),
            parameter("wide", np.array([1, kind.groups, size], np.int64)),
        ],
        ["tokens", kind.groups, size],
    )
    flat = op("Reshape", [wide, parameter("flat", np.array([-1, experts], np.int64))], ["tokens", experts])
    marked = op("Cast", [flat], ["tokens", experts], to=ir.DataType.BOOL)
    mask = op("Not", [marked], ["tokens", experts])
    marked.type = mask.type = ir.TensorType(ir.DataType.BOOL)
    return op("Where", [mask, parameter("masked", np.array(kind.masked, np.float32)), scores], ["tokens", experts])


def router(kind: Kind, experts: int, chosen: int, bias: Matrix | None = None) -> ir.Model:
    logits = value("logits", ["tokens", experts])
    scores = logits if kind.of_chosen else op(kind.scores, [logits], ["tokens", experts])
    among = scores if bias is None else op("Add", [scores, parameter("router.bias", bias)], ["tokens", experts])
    if kind.groups > 1:
        among = of_best_groups(kind, among, experts)
    weight, index = top(among, chosen, ["tokens"], "experts")
    if among is not scores and kind.masked:
        weight = op("GatherElements", [scores, index], ["tokens", chosen], axis=1)
    if kind.of_chosen:
        weight = op("Softmax", [weight], ["tokens", chosen], axis=-1)
    if kind.normalized:
        total = op("ReduceSum", [weight, constant("axis", -1)], ["tokens", 1], keepdims=1)
        if kind.added:
            total = op("Add", [total, parameter("added", np.array(kind.added, np.float32))], ["tokens", 1])
        if kind.least:
            total = op("Clip", [total, parameter("least", np.array(kind.least, np.float32))], ["tokens", 1])
        weight = op("Div", [weight, total], ["tokens", chosen])
    if kind.factor != 1:
        weight = op("Mul", [weight, parameter("factor", np.array(kind.factor, np.float32))], ["tokens", chosen])
    return model_of([logits], [named("index", index), named("weight", weight)])


def bias_of(kind: Kind, experts: int, seed: int = 1) -> Matrix | None:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(experts) * 0.2).astype(np.float32) if kind.biased else None


def random(tokens: int, experts: int, seed: int) -> Matrix:
    return (np.random.default_rng(seed).standard_normal((tokens, experts)) * 3).astype(np.float32)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from([*KINDS]),
    experts=st.integers(1, 130),
    share=st.floats(0, 1),
    tokens=st.integers(1, 60),
    seed=st.integers(0, 2**31),
)
def test_it_chooses_what_the_standard_operators_choose(
    name: str, experts: int, share: float, tokens: int, seed: int
) -> None:
    kind = KINDS[name]
    if kind.groups > 1:
        experts = max(experts // kind.groups, kind.best) * kind.groups
    most = experts // kind.groups * kind.kept  # others are masked, and equal
    chosen = max(1, round(share * most))
    logits, bias = random(tokens, experts, seed), bias_of(kind, experts, seed)
    model = router(kind, experts, chosen, bias)
    before = run(model, {"logits": logits})
    outcome = apply(lowering(model), routers)
    assert (outcome.matched, outcome.declined) == (1, ())
    assert [node.op_type for node in model.graph] == ["ChooseExperts"]
    after = run(model, {"logits": logits}, threads=2)
    order = [np.argsort(found["index"], axis=1) for found in (after, before)]  # equal scores may come in any
    index, weight = (
        [np.take_along_axis(found[each], rows, axis=1) for found, rows in zip((after, before), order, strict=True)]
        for each in ("index", "weight")
    )
    same = (index[0] == index[1]).all(axis=1)
    assert all(_is_tie(kind, logits[row], bias, index[0][row], index[1][row]) for row in np.flatnonzero(~same))
    # Sigmoids of ONNX Runtime are off by 2e-7.
    np.testing.assert_allclose(weight[0][same], weight[1][same], rtol=5e-6, atol=1e-6 * kind.factor)
    for token in range(min(tokens, 3)):
        alone = run(model, {"logits": logits[token : token + 1]})
        assert all((alone[each][0] == after[each][token]).all() for each in ("index", "weight"))


def scores_of(kind: Kind, logits: Matrix) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    if kind.of_chosen:
        return x
    return 1 / (1 + np.exp(-x)) if kind.scores == "Sigmoid" else np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def _is_tie(kind: Kind, logits: Matrix, bias: Matrix | None, a: Matrix, b: Matrix) -> bool:
    """Whether two choices differ by scores, or by groups, that are the same but for rounding."""
    scores = scores_of(kind, logits)
    by = scores if bias is None else scores + bias
    sums = np.sort(by.reshape(kind.groups, -1), axis=1)[:, -max(kind.best, 1) :].sum(axis=1)
    border = np.sort(sums)[-kind.kept - 1 :][:2] if kind.kept < kind.groups else np.array([0, 1])
    largest = np.abs(by).max()
    return abs(by[a].sum() - by[b].sum()) < 1e-5 * largest or abs(border[0] - border[-1]) < 1e-5 * largest


def test_sigmoids_next_to_nothing_are_exact_and_what_is_added_to_their_sum_counts() -> None:
    kind, logits = KINDS["LFM2-MoE"], random(50, 12, 0) - 25
    model = router(kind, 12, 4, np.zeros(12, np.float32))
    apply(lowering(model), routers)
    found = run(model, {"logits": logits})
    scores = np.take_along_axis(scores_of(kind, logits), found["index"], axis=1)
    np.testing.assert_allclose(found["weight"], scores / (scores.sum(axis=1, keepdims=True) + 1e-6), rtol=2e-6)


@pytest.mark.parametrize("name", KINDS)
def test_of_equal_logits_the_first_is_chosen_and_nan_chooses_experts_that_exist(name: str) -> None:
    kind = KINDS[name]
    model = router(kind, 20, 3, np.zeros(20, np.float32) if kind.biased else None)
    apply(lowering(model), routers)
    logits = np.zeros((3, 20), np.float32)
    logits[1], logits[2, 5] = np.nan, 1
    found = run(model, {"logits": logits})
    assert found["index"].tolist() == [[0, 1, 2], [0, 1, 2], [5, *([6, 7] if kind.kept == 1 < kind.groups else [0, 1])]]
    assert np.isnan(found["weight"][1]).all() and np.isfinite(found["weight"][[0, 2]]).all()


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("Qwen2-MoE", "Neg"),  # other scores than softmax and sigmoid
        ("LFM2-MoE", "Neg"),
        ("DeepSeek-V3", "Not"),  # the groups that are not the best
        ("DeepSeek-V3", "zeros"),  # which are not below a score with a bias
    ],
)
def test_other_ways_to_choose_are_left_to_onnx_runtime(name: str, other: str) -> None:
    kind = replace(KINDS[name], masked=0) if other == "zeros" else KINDS[name]
    model = router(kind, 16, 2, bias_of(kind, 16))
    if other == "Not":
        (inverted,) = (node for node in model.graph if node.op_type == "Not")
        assert inverted.inputs[0] is not None
        inverted.outputs[0].replace_all_uses_with(inverted.inputs[0])
        model.graph.remove(inverted, safe=True)
    elif other != "zeros":
        (made,) = (node for node in model.graph if node.op_type == kind.scores)
        made.op_type = other
    kinds = [node.op_type for node in model.graph]
    outcome = apply(lowering(model), routers)
    assert outcome.matched == 0 and [node.op_type for node in model.graph] == kinds
    assert "without a kernel; ONNX Runtime computes it" in outcome.declined[0]
