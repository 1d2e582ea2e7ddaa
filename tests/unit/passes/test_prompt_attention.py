"""Prompts and single tokens take branches of their own, over one cache and one copy of everything else."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.passes.onnxruntime import prompt_attention
from tests.attention_graph import MAX_TOKENS, Array, Buffers, Layout, exported, graph, lower, sequences, unpacked
from tests.lowering import apply, lowering, model_of, named, op, operators, value


@pytest.fixture(autouse=True)
def prompts_of_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_attention, "FEW_TOKENS", 1)


def branch(model: ir.Model, name: str) -> list[str]:
    node = [n for n in model.graph if n.op_type == "If"][-1]
    return [n.op_type for n in node.attributes[name].as_graph()]


def test_each_branch_holds_only_its_own_attention() -> None:
    model = graph(Layout(merged=True))
    lower(Layout(merged=True), model, then=(prompt_attention,))
    assert [op_type for op_type in operators(model) if op_type in ("MatMul", "If", "Neg")] == [
        "MatMul",
        "If",
        "If",
        "Neg",
    ]
    assert branch(model, "else_branch") == ["GroupQueryAttention"]
    prompt = branch(model, "then_branch")
    assert (
        prompt.count("Attention") == 1 and prompt.count("TensorScatter") == 2 and prompt.count("RotaryEmbedding") == 2
    )
    assert "GroupQueryAttention" not in prompt and "QuantizeLinear" not in prompt


def test_an_int8_cache_is_written_once_and_read_without_scaling_it_back() -> None:
    layout = Layout()
    scales: dict[str, Array] = {
        f"layers.0.{part}_scale": np.full((layout.kv_heads, layout.head_size), 0.02, np.float32) for part in ("k", "v")
    }
    model = graph(layout)
    lower(layout, model, scales, then=(prompt_attention,))
    prompt = branch(model, "then_branch")
    assert prompt.count("QuantizeLinear") == 2 and prompt.count("Cast") == 2 and "DequantizeLinear" not in prompt


def test_a_4_bit_cache_is_packed_and_taken_apart() -> None:
    layout = Layout()
    scales: dict[str, Array] = {
        f"layers.0.{part}_scale": np.full((layout.kv_heads, layout.head_size), 0.3, np.float32) for part in ("k", "v")
    }
    model = graph(layout)
    lower(layout, model, scales, kv_bits=4, then=(prompt_attention,))
    assert [output.type for output in model.graph.outputs[1:]] == [ir.TensorType(ir.DataType.UINT8)] * 2
    assert [list(output.shape or ())[3] for output in model.graph.outputs[1:]] == [layout.head_size // 2] * 2
    prompt = branch(model, "then_branch")
    assert prompt.count("QuantizeLinear") == 2 and prompt.count("BitShift") == 2
    assert prompt.count("DequantizeLinear") == 2  # with a step of one: from code + 8 to code


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("layout", [Layout(), Layout(window=3), Layout(rotary="interleaved", softcap=2.0)], ids=str)
def test_both_branches_write_the_same_codes(layout: Layout, bits: int) -> None:
    """One token more than a prompt of one: the cache after [a, b] equals that after [a], [b]."""
    scales: dict[str, Array] = {
        f"layers.0.{part}_scale": np.full((layout.kv_heads, layout.head_size), 0.02, np.float32) for part in ("k", "v")
    }
    model = graph(layout)
    (row,) = sequences(layout, 1)
    lower(layout, model, scales, kv_bits=bits, then=(prompt_attention,))
    dtype = np.int8 if bits == 8 else np.uint8
    together, apart = (Buffers(model, layout, rows=1, dtype=dtype) for _ in range(2))
    whole = together.step([row], [0], 9)
    single = np.concatenate([apart.step([row], [at], 1) for at in range(9)], axis=1)
    np.testing.assert_allclose(whole, single, rtol=1e-4, atol=1e-4)
    for name, buffer in together.past.items():
        codes = [past if bits == 8 else unpacked(past) for past in (buffer, apart.past[name])]
        assert np.abs(codes[0].astype(int) - codes[1]).max() <= 1  # the order of a sum may turn a rounding
        assert buffer[:, :, 9:MAX_TOKENS].any() == np.False_


@pytest.mark.parametrize("count", [4, 5])
def test_a_few_tokens_are_no_prompt(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_attention, "FEW_TOKENS", 4)
    model = graph(Layout())
    (row,) = sequences(Layout(), 1)
    expected = exported(model, Layout(), row, count)
    lower(Layout(), model, then=(prompt_attention,))
    chosen = [n for n in model.graph if n.op_type == "If"][-1]
    for name, op_type in (("then_branch", "Attention"), ("else_branch", "GroupQueryAttention")):
        assert op_type in [n.op_type for n in chosen.attributes[name].as_graph()]
    np.testing.assert_allclose(
        Buffers(model, Layout(), rows=1).step([row], [0], count)[0], expected, rtol=1e-4, atol=1e-4
    )


def test_a_graph_without_attention_is_left_and_says_so() -> None:
    x = value("x", ["rows", 4])
    model = model_of([x], [named("y", op("Neg", [x], ["rows", 4]))])
    outcome = apply(lowering(model), prompt_attention)
    assert (outcome.matched, outcome.declined) == (0, ("no GroupQueryAttention in the graph",))
