from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.passes.graph import linears, merge_linears
from engines.passes.onnxruntime import linear_kernels
from tests.lowering import apply, group, linear, lowering, model_of, named, op, operators, run, value

RNG = np.random.default_rng(0)
SIZES = {"block.q": 32, "block.k": 16, "block.v": 16}
WEIGHTS = {name: RNG.standard_normal((size, 32)).astype(np.float32) for name, size in SIZES.items()}
BIASES = {name: RNG.standard_normal(size).astype(np.float32) for name, size in SIZES.items()}
X = RNG.standard_normal((2, 3, 32)).astype(np.float32)


def three_products(biased: tuple[str, ...], *, apart: bool = False) -> ir.Model:
    x = value("x", ["batch", "tokens", 32])
    outputs: list[ir.Value] = []
    for name in SIZES:
        read = op("Neg", [x], ["batch", "tokens", 32]) if apart and name == "block.v" else x
        product = linear(read, name, WEIGHTS[name], BIASES[name] if name in biased else None)
        outputs.append(named(name[-1], op("Neg", [product], product.shape)))
    return model_of([x], outputs)


@pytest.mark.parametrize("biased", [(), tuple(SIZES)])
def test_linears_of_a_group_become_one_product_and_a_split(biased: tuple[str, ...]) -> None:
    model = three_products(biased)
    before = run(model, {"x": X})
    lowered = lowering(model, groups=[group("layers.0.qkv", *SIZES, biased=bool(biased))])
    outcome = apply(lowered, linears, merge_linears)
    assert (outcome.matched, outcome.declined) == (1, ())
    assert operators(model) == ["Linear", "Split", "Neg", "Neg", "Neg"]
    apply(lowered, linear_kernels)
    assert operators(model)[:-3] == (["MatMul", "Add", "Split"] if biased else ["MatMul", "Split"])
    assert lowered.plan == {"layers.0.qkv": "MatMul fp32"}
    after = run(model, {"x": X})
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("biased", "apart", "reason"),
    [
        (("block.q",), False, "layers.0.qkv: only some members have a bias"),
        ((), True, "layers.0.qkv: its members read different values"),
    ],
)
def test_what_cannot_be_one_product_is_left_and_said(biased: tuple[str, ...], apart: bool, reason: str) -> None:
    model = three_products(biased, apart=apart)
    before = run(model, {"x": X})
    lowered = lowering(model, groups=[group("layers.0.qkv", *SIZES)])
    outcome = apply(lowered, linears, merge_linears)
    assert (outcome.matched, outcome.declined) == (0, (reason,))
    apply(lowered, linear_kernels)
    after = run(model, {"x": X})
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-5)


def test_a_group_of_one_is_not_touched() -> None:
    x = value("x", ["batch", "tokens", 32])
    model = model_of([x], [named("y", linear(x, "block.q", WEIGHTS["block.q"]))])
    outcome = apply(lowering(model, groups=[group("layers.0.o", "block.q")]), linears, merge_linears)
    assert (outcome.matched, outcome.declined) == (0, ("every linear is the only one of its group; nothing to merge",))
    assert operators(model) == ["Linear"]
