"""``tapeout::Experts``: its body computes what it says, and gates of transformers' modules are read right."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.export.trace import trace
from tapeout.errors import ExportError
from tapeout.operators import DOMAIN
from tapeout.operators.experts import ExpertGate, is_experts
from tapeout.operators.experts.function import experts_function
from tapeout.operators.experts.in_torch import experts_traced, gate_of, gated
from tests.families import random_model
from tests.lowering import model_of, named, value

GATES = (
    ExpertGate("silu"),
    ExpertGate("silu", alpha=1.702, limit=1.5, offset=1.0, interleaved=True),
    ExpertGate("silu", limit=0.7),
    ExpertGate("gelu"),
    ExpertGate("gelu_tanh", interleaved=True),
    ExpertGate("relu2"),
)
Array = NDArray[Any]


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def session(gate: ExpertGate) -> ort.InferenceSession:
    shapes = {"x": ["T", "H"], "index": ["T", "k"], "weight": ["T", "k"], "up": ["E", "J", "H"],
              "down": ["E", "H", "I"], "up_bias": ["Eu", "Ju"], "down_bias": ["Ed", "Hd"]}  # fmt: skip
    inputs = [value(n, s, ir.DataType.INT64 if n == "index" else ir.DataType.FLOAT) for n, s in shapes.items()]
    attributes = asdict(gate) | {"interleaved": int(gate.interleaved)}
    node = ir.node("Experts", inputs, attributes=attributes, domain=DOMAIN)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model = model_of(inputs, [named("y", node.outputs[0])])
    model.opset_imports[DOMAIN] = 1
    model.functions[(DOMAIN, "Experts", "")] = experts_function()
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


def computed(gate: ExpertGate, inputs: dict[str, Array]) -> Array:
    return np.asarray(session(gate).run(None, inputs)[0])


def mixed(gate: ExpertGate, inputs: dict[str, Array]) -> Array:
    """``[T, H]`` in float64, token by token."""
    x, index, weight, up, down, up_bias, down_bias = inputs.values()
    inner, rows = down.shape[2], []
    for token, chosen, shares in zip(x.astype(np.float64), index, weight, strict=True):
        row = np.zeros_like(token)
        for expert, share in zip(chosen, shares, strict=True):
            projected = up[expert].astype(np.float64) @ token + up_bias[min(expert, len(up_bias) - 1)]
            gates, ups = projected[:inner], projected[inner:]
            if gate.interleaved:
                gates, ups = projected[::2], projected[1::2]
            tensors = torch.from_numpy(gates.copy()), torch.from_numpy(ups.copy())
            active = gated(gate, tensors[0], tensors[1] if up.shape[1] > inner else None).numpy()
            row += share * (down[expert].astype(np.float64) @ active + down_bias[min(expert, len(down_bias) - 1)])
        rows.append(row)
    return np.array(rows)


def drawn(tokens: int, experts: int, chosen: int, gated: bool, biased: bool, seed: int) -> dict[str, Array]:
    hidden, inner = 12, 7
    width, draw = inner * (1 + gated), np.random.default_rng(seed)
    order = draw.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)
    none = np.zeros((1, 1), np.float32)
    return {
        "x": random(tokens, hidden, seed=seed),
        "index": order[:, :chosen],
        "weight": draw.random((tokens, chosen)).astype(np.float32),
        "up": random(experts, width, hidden, seed=seed + 1),
        "down": random(experts, hidden, inner, seed=seed + 2),
        "up_bias": random(experts, width, seed=seed + 3) if biased else none,
        "down_bias": random(experts, hidden, seed=seed + 4) if biased else none,
    }


@pytest.mark.parametrize("gate", GATES, ids=str)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_body_computes_what_the_operator_says(gate: ExpertGate, data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 6))
    inputs = drawn(
        data.draw(st.integers(1, 9)),
        experts,
        data.draw(st.integers(1, experts)),
        True,
        data.draw(st.booleans()),
        data.draw(st.integers(0, 2**31)),
    )
    expected = mixed(gate, inputs)  # some outputs are small differences of large sums
    np.testing.assert_allclose(computed(gate, inputs), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max() + 1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_experts_without_a_gate(activation: str) -> None:
    inputs = drawn(5, 4, 2, False, True, 3)
    np.testing.assert_allclose(
        computed(ExpertGate(activation), inputs), mixed(ExpertGate(activation), inputs), rtol=1e-5, atol=1e-4
    )


# --- modules of transformers


class Module(torch.nn.Module):
    """Experts as transformers' interface knows them."""

    is_concatenated, is_transposed, has_bias, has_gate, has_post_expert_norm = True, False, False, True, False

    def __init__(self, gate: ExpertGate, has_gate: bool = True) -> None:
        super().__init__()
        self.gate, self.has_gate, self.is_concatenated = gate, has_gate, not gate.interleaved
        self.down_proj = torch.zeros(2, 8, 6)

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        parts = (both[:, ::2], both[:, 1::2]) if self.gate.interleaved else both.chunk(2, dim=-1)
        return gated(self.gate, *parts)

    def act_fn(self, x: torch.Tensor) -> torch.Tensor:
        return gated(self.gate, x, None)


class Shifted(Module):
    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        return super()._apply_gate(both + 0.1)


class Uneven(Module):
    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        return super()._apply_gate(both) * torch.linspace(1, 2, 6)


class Normed(Module):
    has_post_expert_norm = True


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_a_gate_is_measured(gate: ExpertGate) -> None:
    assert gate_of(Module(gate), "experts") == gate


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_an_activation_without_a_gate_is_measured(activation: str) -> None:
    assert gate_of(Module(ExpertGate(activation), has_gate=False), "experts").activation == activation


@settings(max_examples=50, deadline=None)
@given(
    alpha=st.integers(500, 3000).map(lambda n: n / 1000),
    limit=st.integers(0, 40).map(lambda n: n / 2),
    offset=st.sampled_from((0.0, 1.0, -0.5)),
)
def test_numbers_of_a_gate_are_measured(alpha: float, limit: float, offset: float) -> None:
    gate = ExpertGate("silu", alpha, limit if limit >= 1 else 0.0, offset)
    assert gate_of(Module(gate), "experts") == gate


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Shifted(ExpertGate("silu")), "computes something else between its projections"),
        (Uneven(ExpertGate("silu")), "computes something else between its projections"),
        (Normed(ExpertGate("silu")), "normalizes the output of each expert"),
    ],
)
def test_what_no_gate_says_is_refused(module: torch.nn.Module, found: str) -> None:
    with pytest.raises(ExportError, match=found):
        gate_of(module, "experts")


def test_experts_of_a_layer_are_one_node() -> None:
    model = random_model("olmoe")
    before = model.config._experts_implementation
    nodes = [node for node in trace(model).graph if is_experts(node)]
    assert [ExpertGate.of(node) for node in nodes] == [ExpertGate("silu")] * 2
    assert model.config._experts_implementation == before


def test_gpt_oss_is_read_from_its_module() -> None:
    module = random_model("gpt_oss").model.layers[0].mlp.experts
    assert gate_of(module, "experts") == ExpertGate("silu", alpha=1.702, limit=7.0, offset=1.0, interleaved=True)


def test_a_model_without_experts_is_left_alone() -> None:
    model = random_model("llama")
    with experts_traced(model, None):  # pyright: ignore[reportArgumentType]
        assert "tapeout" not in str(model.config._experts_implementation)
