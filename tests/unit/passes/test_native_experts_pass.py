"""Experts before and after their pass, in every layout that checkpoints have."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import onnx_ir as ir
import pytest

from engines.kernels import cpu as native
from engines.passes.onnxruntime import native_experts
from tapeout.operators import DOMAIN
from tapeout.operators.experts import ExpertGate
from tapeout.operators.experts.function import experts_function
from tests.lowering import Shape, apply, lowering, model_of, named, op, parameter, run, value
from tests.native import Matrix

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
EXPERTS, HIDDEN, INNER = 5, 12, 20


def random(*shape: int, seed: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def experts(gate: ExpertGate, *, has_gate: bool, transposed: bool, biased: bool) -> ir.Model:
    width = INNER * (1 + has_gate)
    shapes: dict[str, Shape] = {"up": (EXPERTS, width, HIDDEN), "down": (EXPERTS, HIDDEN, INNER)}
    weights = {f"mlp.{name}": random(*map(int, shape), seed=n) for n, (name, shape) in enumerate(shapes.items())}
    stored = {
        name: np.ascontiguousarray(weight.transpose(0, 2, 1)) if transposed else weight
        for name, weight in weights.items()
    }
    parts = [parameter(name, weight) for name, weight in stored.items()]
    if transposed:
        parts = [op("Transpose", [part], weights[part.name or ""].shape, perm=[0, 2, 1]) for part in parts]
    if biased:
        stored |= {"mlp.up_bias": random(EXPERTS, width, seed=7), "mlp.down_bias": random(EXPERTS, HIDDEN, seed=8)}
        biases = [parameter(name, stored[name]) for name in ("mlp.up_bias", "mlp.down_bias")]
    else:
        biases = [parameter(name, np.zeros((1, 1), np.float32)) for name in ("no_up_bias", "no_down_bias")]
    inputs = [
        value("x", ["tokens", HIDDEN]),
        value("index", ["tokens", 2], ir.DataType.INT64),
        value("weight", ["tokens", 2]),
    ]
    attributes = asdict(gate) | {"interleaved": int(gate.interleaved)}
    y = op("Experts", [*inputs, *parts, *biases], ["tokens", HIDDEN], domain=DOMAIN, **attributes)
    model = model_of(inputs, [named("y", y)])
    model.opset_imports[DOMAIN] = 1
    model.functions[(DOMAIN, "Experts", "")] = experts_function()
    return model


FEEDS = {
    "x": random(6, HIDDEN, seed=20),
    "index": np.array([[0, 3], [3, 1], [2, 0], [0, 3], [1, 2], [3, 2]]),
    "weight": np.abs(random(6, 2, seed=21)),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("gate", "has_gate"),
    [
        (ExpertGate("silu"), True),
        (ExpertGate("silu", alpha=1.702, limit=1.0, offset=1.0, interleaved=True), True),
        (ExpertGate("gelu_tanh"), True),
        (ExpertGate("relu2"), False),
    ],
)
def test_the_native_operator_computes_what_the_body_does(
    gate: ExpertGate, has_gate: bool, transposed: bool, biased: bool
) -> None:
    model = experts(gate, has_gate=has_gate, transposed=transposed, biased=biased)
    before = run(model, FEEDS)["y"]
    outcome = apply(lowering(model), native_experts)
    assert (outcome.matched, outcome.declined) == (1, ())
    (node,) = [node for node in model.graph if node.op_type == "Experts"]
    assert node.domain == native_experts.DOMAIN and len([v for v in node.inputs if v is not None]) == 5 + 2 * biased
    np.testing.assert_allclose(run(model, FEEDS)["y"], before, rtol=1e-5, atol=1e-5 * np.abs(before).max())


def test_an_activation_without_a_kernel_is_left_to_onnx_runtime() -> None:
    model = experts(ExpertGate("gelu"), has_gate=True, transposed=False, biased=False)
    outcome = apply(lowering(model), native_experts)
    assert outcome.matched == 0 and "no kernel for gelu of experts" in outcome.declined[0]
    assert next(node for node in model.graph if node.op_type == "Experts").domain == DOMAIN
