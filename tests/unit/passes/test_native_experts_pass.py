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
from tapeout.quantized import QuantizedWeight, round_to_nearest
from tapeout.schemes import STATIC_INT8, Scheme
from tests.lowering import Shape, apply, lowering, model_of, named, op, parameter, run, value
from tests.native import Matrix

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
EXPERTS, HIDDEN, INNER = 5, 12, 20
Tensors = dict[str, QuantizedWeight]


def random(*shape: int, seed: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def experts(
    gate: ExpertGate, *, has_gate: bool, transposed: bool, biased: bool, hidden: int = HIDDEN, inner: int = INNER
) -> ir.Model:
    width = inner * (1 + has_gate)
    shapes: dict[str, Shape] = {"up": (EXPERTS, width, hidden), "down": (EXPERTS, hidden, inner)}
    weights = {f"mlp.{name}": random(*map(int, shape), seed=n) for n, (name, shape) in enumerate(shapes.items())}
    stored = {
        name: np.ascontiguousarray(weight.transpose(0, 2, 1)) if transposed else weight
        for name, weight in weights.items()
    }
    parts = [parameter(name, weight) for name, weight in stored.items()]
    if transposed:
        parts = [op("Transpose", [part], weights[part.name or ""].shape, perm=[0, 2, 1]) for part in parts]
    if biased:
        stored |= {"mlp.up_bias": random(EXPERTS, width, seed=7), "mlp.down_bias": random(EXPERTS, hidden, seed=8)}
        biases = [parameter(name, stored[name]) for name in ("mlp.up_bias", "mlp.down_bias")]
    else:
        biases = [parameter(name, np.zeros((1, 1), np.float32)) for name in ("no_up_bias", "no_down_bias")]
    inputs = [
        value("x", ["tokens", hidden]),
        value("index", ["tokens", 2], ir.DataType.INT64),
        value("weight", ["tokens", 2]),
    ]
    attributes = asdict(gate) | {"interleaved": int(gate.interleaved)}
    y = op("Experts", [*inputs, *parts, *biases], ["tokens", hidden], domain=DOMAIN, **attributes)
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


def quantized(model: ir.Model, scheme: Scheme, *, transposed: bool, other: Scheme | None = None) -> Tensors:
    """Codes of the model's experts as a checkpoint has them: rows are those that the operator reads."""
    schemes = {"mlp.up": scheme, "mlp.down": other or scheme}
    weights = {name: model.graph.initializers[name].const_value for name in schemes}
    rows = {name: weight.numpy() for name, weight in weights.items() if weight is not None}
    return {
        name: round_to_nearest(weight.transpose(0, 2, 1) if transposed else weight, schemes[name])
        for name, weight in rows.items()
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_codes_go_to_the_kernel_over_codes(transposed: bool) -> None:
    gate, feeds = ExpertGate("silu", interleaved=transposed), FEEDS | {"x": random(6, 48, seed=20)}
    model = experts(gate, has_gate=True, transposed=transposed, biased=True, hidden=48, inner=32)
    before = run(model, feeds)["y"]
    lowered = lowering(model, quantized(model, Scheme(bits=8, group_size=16), transposed=transposed))
    outcome = apply(lowered, native_experts)
    assert (outcome.matched, outcome.declined) == (1, ())
    assert lowered.plan == {"mlp.up": "BlockExperts 8-bit g16 asym", "mlp.down": "BlockExperts 8-bit g16 asym"}
    assert [node.op_type for node in model.graph if node.domain == native_experts.DOMAIN] == ["BlockExperts"]
    assert np.abs(run(model, feeds)["y"] - before).max() < 0.02 * np.abs(before).max()


def test_experts_whose_codes_no_kernel_reads_are_decoded() -> None:
    model, same = (
        experts(ExpertGate("silu"), has_gate=True, transposed=False, biased=False, hidden=16) for _ in range(2)
    )
    tensors = quantized(model, Scheme(bits=8, group_size=16), transposed=False, other=STATIC_INT8)
    outcome = apply(lowering(model, tensors), native_experts)
    assert outcome.matched == 1
    assert outcome.declined == ("Experts y: native kernels take no weights in static int8; decoded to floats",)
    assert [node.op_type for node in model.graph if node.domain == native_experts.DOMAIN] == ["Experts"]
    feeds = FEEDS | {"x": random(6, 16, seed=20)}
    decoded = {name: tensor.dequantize() for name, tensor in tensors.items()}
    apply(lowering(same, decoded), native_experts)
    assert (run(model, feeds)["y"] == run(same, feeds)["y"]).all()


def test_an_activation_without_a_kernel_is_left_to_onnx_runtime() -> None:
    model = experts(ExpertGate("gelu"), has_gate=True, transposed=False, biased=False)
    outcome = apply(lowering(model), native_experts)
    assert outcome.matched == 0 and "no kernel for gelu of experts" in outcome.declined[0]
    assert next(node for node in model.graph if node.op_type == "Experts").domain == DOMAIN
