"""GroupQueryAttention over fixed buffers against the exported function over a growing cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from engines.passes import grouped_query_attention, linear_kernels, linears, merge_linears
from pipeline.attention_function import ATTENTION_DOMAIN
from quantization.kv_cache import dequantize, quantize
from tests.lowering import apply, group, linear, lowering, model_of, named, op, operators, parameter, run, value

RNG = np.random.default_rng(0)
MAX_TOKENS = 24
Array = NDArray[np.float32]


@dataclass(frozen=True)
class Layout:
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    rotary: str = "half"  # half, interleaved, partial, none
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.2
    merged: bool = False

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size


def random(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def graph(layout: Layout) -> ir.Model:
    """One attention block as exported: projections (where ``merged``), rotary, attention, back to rows."""
    past_shape = ["batch", layout.kv_heads, "past", layout.head_size]
    past = [value(f"past_key_values.0.{part}", past_shape) for part in ("key", "value")]
    mask = value("attention_mask", ["batch", "total"], ir.DataType.INT64)
    positions = value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    widths = {"q": layout.width, "k": layout.kv_width, "v": layout.kv_width}
    if layout.merged:
        x = value("x", ["batch", "tokens", 32])
        inputs = [x]
        flat = {name: linear(x, f"block.{name}", random(width, 32) * 0.3) for name, width in widths.items()}
    else:
        inputs = [value(name, ["batch", "tokens", width]) for name, width in widths.items()]
        flat = dict(zip(widths, inputs, strict=True))
    heads = {name: _heads(flat[name], name, width // layout.head_size, layout) for name, width in widths.items()}
    if layout.rotary != "none":
        pairs = layout.head_size // (4 if layout.rotary == "partial" else 2)
        angles = np.arange(MAX_TOKENS)[:, None] * 50.0 ** -np.linspace(0, 1, pairs)
        tables = [parameter(f"table_{f.__name__}", f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
        attributes = {"rotary_embedding_dim": 2 * pairs} if layout.rotary == "partial" else {}
        for name in ("q", "k"):
            heads[name] = op(
                "RotaryEmbedding",
                [heads[name], *tables, positions],
                heads[name].shape,
                interleaved=int(layout.rotary == "interleaved"),
                **attributes,
            )
    output = op(
        "Attention",
        [heads["q"], heads["k"], heads["v"], mask, *past],
        ["batch", layout.heads, "tokens", layout.head_size],
        domain=ATTENTION_DOMAIN,
        outputs=3,
        scale=layout.scale,
        softcap=layout.softcap,
        window=layout.window,
    )
    node = output.producer()
    assert node is not None
    for part, present in zip(("key", "value"), node.outputs[1:], strict=True):
        present.name, present.shape = f"present.0.{part}", ir.Shape(past_shape)
    rows = op("Transpose", [output], ["batch", "tokens", layout.heads, layout.head_size], perm=[0, 2, 1, 3])
    back = op("Reshape", [rows, parameter("rows", np.array([0, 0, layout.width], np.int64))])
    back.shape = ir.Shape(["batch", "tokens", layout.width])
    result = named("y", op("Neg", [back], back.shape))
    return model_of([*inputs, mask, positions, *past], [result, *node.outputs[1:]])


def _heads(flat: ir.Value, name: str, count: int, layout: Layout) -> ir.Value:
    sizes = parameter(f"heads_{name}", np.array([0, 0, count, layout.head_size], np.int64))
    rows = op("Reshape", [flat, sizes], ["batch", "tokens", count, layout.head_size])
    return op("Transpose", [rows], ["batch", count, "tokens", layout.head_size], perm=[0, 2, 1, 3])


def exported(model: ir.Model, layout: Layout, rows: dict[str, Array], length: int) -> Array:
    """Outputs for every token of one sequence, computed at once from an empty cache."""
    empty = np.zeros((1, layout.kv_heads, 0, layout.head_size), np.float32)
    feeds = {name: array[None, :length] for name, array in rows.items()} | {
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length)[None],
        "past_key_values.0.key": empty,
        "past_key_values.0.value": empty,
    }
    return run(model, feeds)["y"][0]


class Buffers:
    """The lowered graph over fixed buffers, one row a sequence."""

    def __init__(self, model: ir.Model, layout: Layout, rows: int, dtype: type = np.float32) -> None:
        self.model = model
        shape = (rows, layout.kv_heads, MAX_TOKENS, layout.head_size)
        self.past = {f"past_key_values.0.{part}": np.zeros(shape, dtype) for part in ("key", "value")}

    def step(self, sequences: list[dict[str, Array]], starts: list[int], count: int, *, first: int = 0) -> Array:
        """Feed ``count`` tokens of each sequence from its start; ``[rows, count, width]``."""
        part = slice(first, first + len(sequences))
        feeds = {
            name: np.stack([s[name][start : start + count] for s, start in zip(sequences, starts, strict=True)])
            for name in sequences[0]
        } | {
            "position_ids": np.stack([np.arange(start, start + count) for start in starts]),
            "seqlens_k": np.array([start + count - 1 for start in starts], np.int32),
            "total_sequence_length": np.array(max(starts) + count, np.int32),
            **{name: np.ascontiguousarray(buffer[part]) for name, buffer in self.past.items()},
        }
        results = run(self.model, feeds)
        for name, buffer in self.past.items():
            buffer[part] = results[name.replace("past_key_values", "present")]
        return results["y"]


LAYOUTS = {
    "plain": Layout(),
    "merged": Layout(merged=True),
    "interleaved": Layout(rotary="interleaved"),
    "partial rotary": Layout(rotary="partial"),
    "no rotary": Layout(rotary="none"),
    "short window": Layout(window=3),
    "long window": Layout(window=20),
    "soft cap": Layout(softcap=2.0),
    "soft cap and window": Layout(softcap=2.0, window=4, merged=True),
    "one key head": Layout(kv_heads=1),
    "group of 8, head of 128": Layout(heads=8, kv_heads=1, head_size=128),
    "no groups": Layout(kv_heads=4),
}


def lower(layout: Layout, model: ir.Model, kv_scales: dict[str, Array] | None = None) -> tuple[str, ...]:
    groups = [group("layers.0.qkv", "block.q", "block.k", "block.v")] if layout.merged else []
    lowered = lowering(model, groups=groups, max_tokens=MAX_TOKENS, kv_scales=kv_scales)
    if layout.merged:
        apply(lowered, linears, merge_linears)
    outcome = apply(lowered, grouped_query_attention)
    assert outcome.matched == 1
    if layout.merged:
        apply(lowered, linear_kernels)
    return outcome.declined


def sequences(layout: Layout, count: int) -> list[dict[str, Array]]:
    widths = {"x": 32} if layout.merged else {"q": layout.width, "k": layout.kv_width, "v": layout.kv_width}
    return [{name: random(MAX_TOKENS, width) for name, width in widths.items()} for _ in range(count)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_prefill_chunks_and_ragged_decode_equal_the_exported_function(layout: Layout) -> None:
    model = graph(layout)
    rows = sequences(layout, 3)
    lengths = [2, 7, 15]
    expected = [exported(model, layout, row, MAX_TOKENS) for row in rows]
    declined = lower(layout, model)
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
    reason = {"partial": "rotary covers part of the head", "none": "no rotary node before it"}.get(layout.rotary)
    assert [reason in text for text in declined] == [True] if reason else declined == ()


def test_a_merged_projection_is_handed_over_packed() -> None:
    layout = Layout(merged=True)
    model = graph(layout)
    lower(layout, model)
    assert operators(model) == ["MatMul", "GroupQueryAttention", "Neg"]
    attention = next(n for n in model.graph if n.op_type == "GroupQueryAttention")
    assert attention.inputs[1] is None and attention.inputs[2] is None


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


@pytest.mark.parametrize("layout", [Layout(rotary="none"), Layout(rotary="none", softcap=2.0, window=4)], ids=str)
def test_an_int8_cache_is_attention_over_keys_and_values_on_their_grid(layout: Layout) -> None:
    """Per channel, with scales so small that the largest values clip, so that clipping is compared too."""
    model = graph(layout)
    rows = sequences(layout, 2)
    scales = {
        f"layers.0.{part}_scale": RNG.uniform(0.005, 0.03, (layout.kv_heads, layout.head_size)).astype(np.float32)
        for part in ("k", "v")
    }

    def on_grid(name: str, array: Array) -> Array:
        if name == "q":
            return array
        scale = scales[f"layers.0.{name}_scale"]
        by_head = array.reshape(MAX_TOKENS, layout.kv_heads, layout.head_size).transpose(1, 0, 2)
        back: Array = dequantize(quantize(by_head, scale), scale)
        return np.ascontiguousarray(back.transpose(1, 0, 2)).reshape(MAX_TOKENS, -1)

    rounded = [{name: on_grid(name, array) for name, array in row.items()} for row in rows]
    expected = [exported(model, layout, row, MAX_TOKENS) for row in rounded]
    plain = [exported(model, layout, row, MAX_TOKENS) for row in rows]
    lower(layout, model, scales)
    buffers = Buffers(model, layout, rows=2, dtype=np.int8)
    for row, length in enumerate((4, 9)):
        for start, count in ((0, 3), (3, length - 3)):
            actual = buffers.step([rows[row]], [start], count, first=row)[0]
            np.testing.assert_allclose(actual, expected[row][start : start + count], rtol=1e-3, atol=1e-3)
    for step in range(3):
        actual = buffers.step(rows, [4 + step, 9 + step], 1)[:, 0]
        np.testing.assert_allclose(actual, [expected[0][4 + step], expected[1][9 + step]], rtol=1e-3, atol=1e-3)
    codes = buffers.past["past_key_values.0.key"][0, :, :7]
    assert codes.min() == -128 and codes.max() == 127
    assert np.abs(expected[0] - plain[0]).max() > 0.1  # the grid is coarse enough to be told from none
