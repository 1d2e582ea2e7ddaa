"""GroupQueryAttention over fixed buffers, alone and with a branch for prompts, against the exported function."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest

from engines.passes.onnxruntime import prompt_attention
from quantization.kv_cache import dequantize, quantize
from tapeout.errors import BuildError
from tests.attention_graph import (
    LAYOUTS,
    MAX_TOKENS,
    RNG,
    Array,
    Buffers,
    Layout,
    exported,
    graph,
    lower,
    sequences,
    unpacked,
)
from tests.lowering import operators, run


@pytest.fixture(autouse=True)
def prompts_of_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_attention, "FEW_TOKENS", 1)


both_ways = pytest.mark.parametrize("then", [(), (prompt_attention,)], ids=["alone", "prompts apart"])


@both_ways
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_prefill_chunks_and_ragged_decode_equal_the_exported_function(
    layout: Layout, then: Sequence[ModuleType]
) -> None:
    model = graph(layout)
    rows = sequences(layout, 3)
    lengths = [2, 7, 15]
    expected = [exported(model, layout, row, MAX_TOKENS) for row in rows]
    declined = lower(layout, model, then=then)
    assert [i.name for i in model.graph.inputs if "mask" in (i.name or "")] == []
    buffers = Buffers(model, layout, rows=3)
    for row, length in enumerate(lengths):
        split = max(1, length // 3)
        for start, count in ((0, split), (split, length - split)):  # a second chunk has a past
            actual = buffers.step([rows[row]], [start], count, first=row)[0]
            np.testing.assert_allclose(actual, expected[row][start : start + count], rtol=1e-4, atol=1e-4)
    for step in range(3):
        at = [length + step for length in lengths]
        actual = buffers.step(rows, at, 1)[:, 0]
        np.testing.assert_allclose(actual, [e[n] for e, n in zip(expected, at, strict=True)], rtol=1e-4, atol=1e-4)
    reason = {"partial": "rotary covers part of the head", "none": "no rotary node right before it"}.get(layout.rotary)
    assert [reason in text for text in declined] == [True] if reason else declined == ()


def test_a_merged_projection_is_handed_over_packed() -> None:
    layout = Layout(merged=True)
    model = graph(layout)
    lower(layout, model)
    assert operators(model) == ["MatMul", "GroupQueryAttention", "Neg"]
    attention = next(n for n in model.graph if n.op_type == "GroupQueryAttention")
    assert attention.inputs[1] is None and attention.inputs[2] is None


def test_a_merged_projection_whose_parts_are_changed_is_split_and_said() -> None:
    """Only part of a head is rotated: queries and keys are taken apart and put together before attention."""
    layout = Layout(merged=True, rotary="partial")
    model = graph(layout)
    _, reason = lower(layout, model)
    assert reason.startswith("layer 0: more happens to queries or keys than rotation")
    assert "Split" in operators(model)


def test_tables_that_are_not_constant_leave_the_rotary_nodes_where_they_are() -> None:
    layout = Layout()
    model = graph(layout)
    rows = sequences(layout, 1)
    expected = exported(model, layout, rows[0], 5)
    tables = {name: model.graph.initializers[name] for name in ("table_cos", "table_sin")}
    arrays = {name: table.const_value.numpy() for name, table in tables.items() if table.const_value is not None}
    for name, table in tables.items():
        del model.graph.initializers[name]
        table.const_value = None
        model.graph.inputs.append(table)
    (reason,) = lower(layout, model)
    assert reason == "layer 0: its rotary table is not constant; rotary stays a node"
    feeds = {name: array[None, :5] for name, array in rows[0].items()} | {
        "position_ids": np.arange(5)[None],
        "seqlens_k": np.array([4], np.int32),
        "total_sequence_length": np.array(5, np.int32),
        **{f"past_key_values.0.{part}": np.zeros((1, 2, MAX_TOKENS, 16), np.float32) for part in ("key", "value")},
    }
    np.testing.assert_allclose(run(model, feeds | arrays)["y"][0], expected, rtol=1e-4, atol=1e-4)


@both_ways
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("layout", [Layout(rotary="none"), Layout(rotary="none", softcap=2.0, window=4)], ids=str)
def test_a_cache_of_codes_is_attention_over_keys_and_values_on_their_grid(
    layout: Layout, bits: int, then: Sequence[ModuleType]
) -> None:
    """Per channel, with scales so small that the largest values clip, so that clipping is compared too."""
    model = graph(layout)
    rows = sequences(layout, 2)
    scales = {
        f"layers.0.{part}_scale": RNG.uniform(0.005, 0.03, (layout.kv_heads, layout.head_size)).astype(np.float32)
        * 2 ** (8 - bits)
        for part in ("k", "v")
    }

    def on_grid(name: str, array: Array) -> Array:
        if name == "q":
            return array
        scale = scales[f"layers.0.{name}_scale"]
        by_head = array.reshape(MAX_TOKENS, layout.kv_heads, layout.head_size).transpose(1, 0, 2)
        back: Array = dequantize(quantize(by_head, scale, bits), scale)
        return np.ascontiguousarray(back.transpose(1, 0, 2)).reshape(MAX_TOKENS, -1)

    rounded = [{name: on_grid(name, array) for name, array in row.items()} for row in rows]
    expected = [exported(model, layout, row, MAX_TOKENS) for row in rounded]
    plain = [exported(model, layout, row, MAX_TOKENS) for row in rows]
    lower(layout, model, scales, kv_bits=bits, then=then)
    buffers = Buffers(model, layout, rows=2, dtype=np.int8 if bits == 8 else np.uint8)
    for row, length in enumerate((4, 9)):
        for start, count in ((0, 3), (3, length - 3)):
            actual = buffers.step([rows[row]], [start], count, first=row)[0]
            np.testing.assert_allclose(actual, expected[row][start : start + count], rtol=1e-3, atol=1e-3)
    for step in range(3):
        actual = buffers.step(rows, [4 + step, 9 + step], 1)[:, 0]
        np.testing.assert_allclose(actual, [expected[0][4 + step], expected[1][9 + step]], rtol=1e-3, atol=1e-3)
    for part, name in (("k", "key"), ("v", "value")):
        stored = buffers.past[f"past_key_values.0.{name}"][0, :, :7]
        codes = stored if bits == 8 else unpacked(stored)
        by_head = rows[0][part].reshape(MAX_TOKENS, layout.kv_heads, layout.head_size).transpose(1, 0, 2)[:, :7]
        np.testing.assert_array_equal(codes, quantize(by_head, scales[f"layers.0.{part}_scale"], bits))
        assert codes.min() == -(2 ** (bits - 1)) and codes.max() == 2 ** (bits - 1) - 1
    assert np.abs(expected[0] - plain[0]).max() > 0.1  # the grid is coarse enough to be told from none


def test_a_head_of_odd_size_has_no_4_bit_cache() -> None:
    layout = Layout(head_size=15, rotary="none")
    scales = {f"layers.0.{part}_scale": np.ones((layout.kv_heads, 15), np.float32) for part in ("k", "v")}
    with pytest.raises(BuildError, match="heads of 15 channels in layer 0") as caught:
        lower(layout, graph(layout), scales, kv_bits=4)
    assert "int8" in caught.value.remedy
    (note,) = lower(layout, graph(layout), scales)
    assert note.startswith("layer 0: no rotary node")
