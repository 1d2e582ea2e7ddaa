"""The pass from attention as it is exported to CachedAttention: against the exported function, on ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.bundle import BLOCK_TABLE, OFFSETS, STARTS
from engines.kernels import cpu as native
from engines.kernels.cpu.kernel_set import CpuKernels
from engines.kernels.operators import DOMAIN
from engines.passes.onnxruntime import cached_attention, gated_norms
from quantization.kv_cache import dequantize, quantize
from tapeout.errors import BuildError
from tests.attention_graph import (
    LAYOUTS,
    MAX_TOKENS,
    RNG,
    Array,
    Blocks,
    Layout,
    exported,
    graph,
    lower,
    sequences,
    unpacked,
)
from tests.lowering import apply, lowering, model_of, named, op, operators, run, value

pytestmark = pytest.mark.usefixtures("level")


def scales_of(layout: Layout, scale: float = 0.02) -> dict[str, Array]:
    return {
        f"layers.0.{part[0]}_scale": np.full((layout.kv_heads, size), scale, np.float32)
        for part, size in layout.sizes.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_prefill_chunks_and_ragged_decode_equal_the_exported_function(layout: Layout) -> None:
    model = graph(layout)
    rows = sequences(layout, 3)
    lengths = [2, 7, 15]
    expected = [exported(model, layout, row, MAX_TOKENS) for row in rows]
    declined = lower(layout, model)
    blocks = Blocks(model, layout, rows=3)
    for row, length in enumerate(lengths):
        split = max(1, length // 3)
        for start, count in ((0, split), (split, length - split)):  # a second chunk has a past
            actual = blocks.step([rows[row]], [start], count, first=row)[0]
            np.testing.assert_allclose(actual, expected[row][start : start + count], rtol=1e-4, atol=1e-5)
    for count in (1, 1, 3):
        together = blocks.step(rows, lengths, count)
        for actual, whole, start in zip(together, expected, lengths, strict=True):
            np.testing.assert_allclose(actual, whole[start : start + count], rtol=1e-4, atol=1e-5)
        lengths = [length + count for length in lengths]
    reason = {"partial": "rotary covers part of the head", "none": "no rotary node right before it"}.get(layout.rotary)
    assert [reason in text for text in declined] == [True] if reason else declined == ()


def test_a_merged_projection_is_handed_over_packed() -> None:
    layout = Layout(merged=True)
    model = graph(layout)
    lower(layout, model)
    assert operators(model) == ["MatMul", "CachedAttention", "Neg"]
    attention = next(n for n in model.graph if n.op_type == "CachedAttention")
    assert attention.inputs[1] is None and attention.inputs[2] is None


@pytest.mark.parametrize("kv_bits", [0, 8])
def test_queries_are_read_from_between_their_gates_and_keys_without_their_factor(kv_bits: int) -> None:
    """Nothing is taken apart; the gates are read there, too, and the cache has keys on a grid as much finer."""
    layout = Layout(merged=True, gated=True, key_factor=0.25)
    model = graph(layout)
    assert lower(layout, model, scales_of(layout) if kv_bits else None, kv_bits=kv_bits or 8) == ()
    assert apply(lowering(model), gated_norms).matched == 1
    assert operators(model) == ["MatMul", "CachedAttention", "GatedNorm", "Neg"]
    attention = next(n for n in model.graph if n.op_type == "CachedAttention")
    assert attention.attributes["query_period"].as_int() == 2 * layout.head_size
    assert attention.attributes["scale"].as_float() == pytest.approx(layout.scale / 4)
    if kv_bits:
        found = [model.graph.initializers[f"layers.0.{part}_scale"].const_value for part in "kv"]
        assert [tensor.numpy().max() for tensor in found if tensor is not None] == [np.float32(0.08), np.float32(0.02)]


def test_kernels_that_read_no_gates_get_queries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuKernels, "unsupported_in_attention", lambda _self, part: f"there is no {part}")
    layout = Layout(gated=True)
    model = graph(layout)
    (reason,) = lower(layout, model)
    assert reason == "layer 0: there is no gates between queries; queries are taken from between them"
    attention = next(n for n in model.graph if n.op_type == "CachedAttention")
    assert "query_period" not in attention.attributes and "Split" in operators(model)


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
        OFFSETS: np.array([0, 5], np.int32),
        STARTS: np.array([0], np.int32),
        BLOCK_TABLE: np.array([[0]], np.int32),
        **{f"past_key_values.0.{part}": np.zeros((1, 2, MAX_TOKENS, 16), np.float32) for part in ("key", "value")},
    }
    np.testing.assert_allclose(run(model, feeds | arrays)["y"][0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(rotary="none"), Layout(rotary="none", softcap=2.0, window=4)),
        *(Layout(rotary="none", head_size=48, values=32), Layout(rotary="none", values=32, window=4)),
    ],
    ids=str,
)
def test_a_cache_of_codes_is_attention_over_keys_and_values_on_their_grid(layout: Layout, bits: int) -> None:
    """Per channel, with scales so small that the largest values clip, so that clipping is compared too."""
    model = graph(layout)
    rows = sequences(layout, 2)
    scales = {
        f"layers.0.{part[0]}_scale": RNG.uniform(0.005, 0.03, (layout.kv_heads, size)).astype(np.float32)
        * 2 ** (8 - bits)
        for part, size in layout.sizes.items()
    }

    def on_grid(name: str, array: Array) -> Array:
        if name == "q":
            return array
        scale = scales[f"layers.0.{name}_scale"]
        by_head = array.reshape(MAX_TOKENS, layout.kv_heads, -1).transpose(1, 0, 2)
        back: Array = dequantize(quantize(by_head, scale, f"int{bits}"), scale, f"int{bits}")
        return np.ascontiguousarray(back.transpose(1, 0, 2)).reshape(MAX_TOKENS, -1)

    rounded = [{name: on_grid(name, array) for name, array in row.items()} for row in rows]
    expected = [exported(model, layout, row, MAX_TOKENS) for row in rounded]
    plain = [exported(model, layout, row, MAX_TOKENS) for row in rows]
    lower(layout, model, scales, kv_bits=bits)
    blocks = Blocks(model, layout, rows=2, dtype=np.int8 if bits == 8 else np.uint8)
    for row, length in enumerate((4, 9)):
        for start, count in ((0, 3), (3, length - 3)):
            actual = blocks.step([rows[row]], [start], count, first=row)[0]
            np.testing.assert_allclose(actual, expected[row][start : start + count], rtol=1e-3, atol=1e-3)
    for step in range(3):
        actual = blocks.step(rows, [4 + step, 9 + step], 1)[:, 0]
        np.testing.assert_allclose(actual, [expected[0][4 + step], expected[1][9 + step]], rtol=1e-3, atol=1e-3)
    for part, name in (("k", "key"), ("v", "value")):
        stored = blocks.past[f"past_key_values.0.{name}"][0, :, :7]
        codes = stored if bits == 8 else unpacked(stored)
        by_head = rows[0][part].reshape(MAX_TOKENS, layout.kv_heads, -1).transpose(1, 0, 2)[:, :7]
        np.testing.assert_array_equal(codes, quantize(by_head, scales[f"layers.0.{part}_scale"], f"int{bits}"))
        assert codes.min() == -(2 ** (bits - 1)) and codes.max() == 2 ** (bits - 1) - 1
    assert np.abs(expected[0] - plain[0]).max() > 0.1  # the grid is coarse enough to be told from none


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(window=3), Layout(rotary="interleaved", softcap=2.0), Layout(values=48)], ids=str
)
def test_tokens_at_once_and_one_by_one_write_the_same_codes(layout: Layout, bits: int) -> None:
    model = graph(layout)
    (row,) = sequences(layout, 1)
    lower(layout, model, scales_of(layout), kv_bits=bits)
    together, apart = (Blocks(model, layout, rows=1, dtype=np.int8 if bits == 8 else np.uint8) for _ in range(2))
    whole = together.step([row], [0], 9)
    single = np.concatenate([apart.step([row], [at], 1) for at in range(9)], axis=1)
    np.testing.assert_array_equal(whole, single)
    for name, cache in together.past.items():
        np.testing.assert_array_equal(cache, apart.past[name])
        assert cache[:, :, :9].any() and not cache[:, :, 9:].any()


@pytest.mark.parametrize(
    ("kv_bits", "element", "packed"),
    [(0, ir.DataType.FLOAT, 1), (8, ir.DataType.INT8, 1), (4, ir.DataType.UINT8, 2)],
)
@pytest.mark.parametrize("layout", [Layout(), Layout(values=48)], ids=str)
def test_the_graph_takes_blocks_and_has_no_output_for_them(
    layout: Layout, kv_bits: int, element: ir.DataType, packed: int
) -> None:
    model = graph(layout)
    lower(layout, model, scales_of(layout) if kv_bits else None, kv_bits=kv_bits)
    inputs = {value.name: value for value in model.graph.inputs}
    assert "attention_mask" not in inputs and {OFFSETS, STARTS, BLOCK_TABLE} <= inputs.keys()
    assert [value.name for value in model.graph.outputs] == ["y"]
    for part, size in layout.sizes.items():
        cache = inputs[f"past_key_values.0.{part}"]
        assert cache.shape == ir.Shape(["blocks", layout.kv_heads, "block_tokens", size // packed])
        assert cache.dtype == element
    assert model.opset_imports[DOMAIN] == 1 and not model.functions


@pytest.mark.parametrize("kv_bits", [0, 8, 4])
@pytest.mark.parametrize(
    ("head_size", "reason"),
    [(15, "heads of 15 channels"), (24, "heads of 24 channels"), (528, "heads of 528 channels")],
)
@pytest.mark.parametrize("of_values", [False, True])
def test_heads_that_no_kernel_takes_are_refused_and_the_graph_is_left(
    head_size: int, reason: str, kv_bits: int, of_values: bool
) -> None:
    layout = Layout(values=head_size) if of_values else Layout(head_size=head_size, rotary="none")
    refused(layout, f"no attention for layer 0: {reason}, where kernels take multiples of 16 up to 512", kv_bits)


def test_a_processor_without_a_level_is_refused_and_the_graph_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "level", lambda: None)
    monkeypatch.setattr(native, "cpu_features", lambda: ("avx", "fma", "f16c", "neon"))
    refused(Layout(), "no attention for layer 0: native kernels need .*, which this processor lacks", 0)


def refused(layout: Layout, found: str, kv_bits: int) -> None:
    model = graph(layout)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(BuildError, match=found) as caught:
        lower(layout, model, scales_of(layout) if kv_bits else None, kv_bits=kv_bits)
    assert "another target" in caught.value.remedy and "docs/native-kernels.md" in caught.value.expected
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_graph_without_attention_is_left_and_says_so() -> None:
    x = value("x", ["rows", 4])
    outcome = apply(lowering(model_of([x], [named("y", op("Neg", [x], ["rows", 4]))])), cached_attention)
    assert (outcome.matched, outcome.declined) == (0, ("no attention in the graph",))
