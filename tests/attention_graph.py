"""One attention block as exported, lowered and run: over a growing cache, or over blocks of a pool, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.graph import linears, merge_linears
from engines.passes.onnxruntime import cached_attention, linear_kernels
from tapeout.operators import DOMAIN
from tapeout.operators.attention import NAME, NAME_WITH_SINKS
from tests.lowering import apply, group, linear, lowering, model_of, named, op, parameter, run, value

RNG = np.random.default_rng(0)
MAX_TOKENS = 24
Array = NDArray[np.float32]


@dataclass(frozen=True)
class Layout:
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    values: int = 0  # channels of a value; 0: as many as a key has
    rotary: str = "half"  # half, interleaved, partial, none
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    scale: float = 0.2
    merged: bool = False
    gated: bool = False  # what a query attends to is gated by what follows it in its projection
    key_factor: float = 1.0
    normed: bool = False  # all heads of queries together, and of keys

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @property
    def widths(self) -> dict[str, int]:
        """Columns of each projection."""
        kv = self.kv_heads * self.head_size, self.kv_heads * self.value_size
        return {"q": self.width * (2 if self.gated else 1), "k": kv[0], "v": kv[1]}

    @property
    def value_size(self) -> int:
        return self.values or self.head_size

    @property
    def sizes(self) -> dict[str, int]:
        """Channels of a head in each cache."""
        return {"key": self.head_size, "value": self.value_size}

    def past_shape(self, part: str) -> list[str | int]:
        return ["batch", self.kv_heads, "past", self.sizes[part]]


def random(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def graph(layout: Layout) -> ir.Model:
    """One attention block as exported: projections (where ``merged``), rotary, attention, back to rows."""
    past = [value(f"past_key_values.0.{part}", layout.past_shape(part)) for part in layout.sizes]
    mask = value("attention_mask", ["batch", "total"], ir.DataType.INT64)
    positions = value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    widths = layout.widths
    if layout.merged:
        x = value("x", ["batch", "tokens", 32])
        inputs = [x]
        flat = {name: linear(x, f"block.{name}", random(width, 32) * 0.3) for name, width in widths.items()}
    else:
        inputs = [value(name, ["batch", "tokens", width]) for name, width in widths.items()]
        flat = dict(zip(widths, inputs, strict=True))
    gate = None
    if layout.normed:
        for name in ("q", "k"):
            weight = parameter(f"block.{name}_norm", 1 + 0.1 * random(widths[name]))
            flat[name] = op("RMSNormalization", [flat[name], weight], flat[name].shape, axis=-1, epsilon=0.03)
    if layout.gated:
        flat["q"], gate = _query_and_gate(flat["q"], layout)
    counts = {"q": layout.heads, "k": layout.kv_heads, "v": layout.kv_heads}
    channels = {"q": layout.head_size, "k": layout.head_size, "v": layout.value_size}
    heads = {name: _heads(flat[name], name, count, channels[name]) for name, count in counts.items()}
    if layout.key_factor != 1:
        factor = parameter("key_factor", np.array(layout.key_factor, np.float32))
        heads["k"] = op("Mul", [heads["k"], factor], heads["k"].shape)
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
    sinks = [parameter("block.sinks", np.linspace(-1, 2, layout.heads, dtype=np.float32))] if layout.sinks else []
    output = op(
        NAME_WITH_SINKS if layout.sinks else NAME,
        [heads["q"], heads["k"], heads["v"], mask, *sinks, *past],
        ["batch", layout.heads, "tokens", layout.value_size],
        domain=DOMAIN,
        outputs=3,
        scale=layout.scale,
        softcap=layout.softcap,
        window=layout.window,
    )
    node = output.producer()
    assert node is not None
    for part, present in zip(layout.sizes, node.outputs[1:], strict=True):
        present.name, present.shape = f"present.0.{part}", ir.Shape(layout.past_shape(part))
    rows = op("Transpose", [output], ["batch", "tokens", layout.heads, layout.value_size], perm=[0, 2, 1, 3])
    width = layout.heads * layout.value_size
    back = op("Reshape", [rows, parameter("rows", np.array([0, 0, width], np.int64))])
    back.shape = ir.Shape(["batch", "tokens", width])
    if gate is not None:
        back = op("Mul", [back, op("Sigmoid", [gate], back.shape)], back.shape)
    result = named("y", op("Neg", [back], back.shape))
    return model_of([*inputs, mask, positions, *past], [result, *node.outputs[1:]])


def _query_and_gate(flat: ir.Value, layout: Layout) -> tuple[ir.Value, ir.Value]:
    """``[B, S, H, D]`` and ``[B, S, H·D]``, as transformers takes them from one projection."""
    apart = ["batch", "tokens", layout.heads, 2 * layout.head_size]
    pairs = op("Reshape", [flat, parameter("pairs", np.array([0, 0, *apart[2:]], np.int64))], apart)
    halves = parameter("halves", np.array([layout.head_size] * 2, np.int64))
    query = op("Split", [pairs, halves], [*apart[:3], layout.head_size], outputs=2, axis=-1)
    node = query.producer()
    assert node is not None
    rows = parameter("gates", np.array([0, 0, layout.width], np.int64))
    return query, op("Reshape", [node.outputs[1], rows], ["batch", "tokens", layout.width])


def _heads(flat: ir.Value, name: str, count: int, channels: int) -> ir.Value:
    sizes = parameter(f"heads_{name}", np.array([0, 0, count, channels], np.int64))
    rows = op("Reshape", [flat, sizes], ["batch", "tokens", count, channels])
    return op("Transpose", [rows], ["batch", count, "tokens", channels], perm=[0, 2, 1, 3])


def exported(model: ir.Model, layout: Layout, rows: dict[str, Array], length: int) -> Array:
    """Outputs for every token of one sequence, computed at once from an empty cache."""
    feeds = {name: array[None, :length] for name, array in rows.items()} | {
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length)[None],
        **{
            f"past_key_values.0.{part}": np.zeros((1, layout.kv_heads, 0, size), np.float32)
            for part, size in layout.sizes.items()
        },
    }
    return run(model, feeds)["y"][0]


class Blocks:
    """The lowered graph over a pool of KV blocks, one for each sequence."""

    def __init__(self, model: ir.Model, layout: Layout, rows: int, dtype: type = np.float32) -> None:
        """``dtype``: float32, int8, or uint8 for two codes of 4 bits a byte."""
        self.model = model
        packed = 2 if dtype is np.uint8 else 1
        self.past = {
            f"past_key_values.0.{part}": np.zeros((rows, layout.kv_heads, MAX_TOKENS, size // packed), dtype)
            for part, size in layout.sizes.items()
        }

    def step(self, sequences: list[dict[str, Array]], starts: list[int], count: int, *, first: int = 0) -> Array:
        """Feed ``count`` tokens of each sequence from its start; ``[rows, count, width]``."""
        feeds = {
            name: np.stack([s[name][start : start + count] for s, start in zip(sequences, starts, strict=True)])
            for name in sequences[0]
        } | {
            "position_ids": np.stack([np.arange(start, start + count) for start in starts]),
            "offsets": np.arange(len(starts) + 1, dtype=np.int32) * count,
            "starts": np.array(starts, np.int32),
            "block_table": np.arange(first, first + len(starts), dtype=np.int32)[:, None],
            **self.past,  # ONNX Runtime does not copy its inputs, which attention writes
        }
        return run(self.model, feeds)["y"]


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
    "sinks": Layout(sinks=True),
    "sinks, window and merged": Layout(sinks=True, window=4, merged=True),
    "one key head": Layout(kv_heads=1),
    "group of 8, head of 128": Layout(heads=8, kv_heads=1, head_size=128),
    "no groups": Layout(kv_heads=4),
    "gates between queries": Layout(gated=True),
    "gates between queries, merged": Layout(gated=True, merged=True, rotary="none"),
    "a factor of keys": Layout(key_factor=0.3, merged=True),
    "keys larger than values": Layout(head_size=48, values=32),
    "values larger than keys, merged": Layout(values=64, merged=True, rotary="interleaved"),
    "heads of two sizes, sinks and window": Layout(head_size=32, values=16, sinks=True, window=4, merged=True),
}


def lower(
    layout: Layout,
    model: ir.Model,
    kv_scales: dict[str, Array] | None = None,
    *,
    kv_bits: int = 8,
) -> tuple[str, ...]:
    """Attention in place, and what it declined."""
    groups = [group("layers.0.qkv", "block.q", "block.k", "block.v")] if layout.merged else []
    lowered = lowering(model, groups=groups, max_tokens=MAX_TOKENS, kv_scales=kv_scales, kv_dtype=f"int{kv_bits}")
    if layout.merged:
        apply(lowered, linears, merge_linears)
    outcome = apply(lowered, cached_attention)
    assert outcome.matched == 1
    if layout.merged:
        apply(lowered, linear_kernels)
    return outcome.declined


def unpacked(buffer: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Codes ``[…, D]`` of bytes ``[…, D / 2]``: low half first, each its code + 8."""
    halves = np.stack([buffer & 15, buffer >> 4], axis=-1).astype(np.int8)
    return halves.reshape(*buffer.shape[:-1], -1) - 8


def sequences(layout: Layout, count: int) -> list[dict[str, Array]]:
    widths = {"x": 32} if layout.merged else layout.widths
    return [{name: random(MAX_TOKENS, width) for name, width in widths.items()} for _ in range(count)]
