"""Attention of prompts becomes float matmuls over the cache; a few tokens at once stay in GroupQueryAttention.

    GroupQueryAttention(qkv, past, …)   ->   If(more than a few tokens, prompt, GroupQueryAttention(qkv, past, …))
    prompt:  TensorScatter(past, rotated and rounded k, v);  Attention(rotated q, cast of all of it, causal mask)

ONNX Runtime 1.31 dequantizes an int8 cache again for every block of queries: on the default model 1,024 tokens take
1,040 ms in GroupQueryAttention and 145 ms here, 128 tokens 21 and 4 (docs/negative-results.md). Both branches compute
the same function of the same cache, so it does not matter how a prompt is cut into pieces. Scales are not applied to
the cache: those of keys are applied to the queries, those of values to the output. GroupQueryAttention is as slow over
4-bit codes as over 8-bit ones; packing and unpacking them here with elementary operators is two to three times as fast
(grouped_query_attention.py describes the bytes). An ``If`` costs under a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.passes.base import CONTRIB, Lowering, PassResult, attribute, constant, dimension, sizes, take_over

OPSET = 24  # of TensorScatter
# Up to here the branch's many small nodes cost more than they save: after 60 positions, 4 tokens of the default model
# take 8.1 ms in GroupQueryAttention and 9.1 here, 16 take 15.0 and 15.1, 64 take 40 and 34.
FEW_TOKENS = 16
MASKED = -1e9  # added to a score: exp() of it is zero, and no sum of it overflows


class _Branch:
    """Nodes of one branch of an If, in order."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.nodes = prefix, list[ir.Node]()

    def __call__(
        self, name: str, op_type: str, inputs: Sequence[ir.Value | None], *, domain: str = "", **attributes: Any
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes=attributes, domain=domain)
        node.outputs[0].name = f"{self.prefix}.{name}"
        self.nodes.append(node)
        return node.outputs[0]

    def graph(self, outputs: Sequence[ir.Value], types: Sequence[ir.TypeProtocol | None]) -> ir.Graph:
        for output, kind in zip(outputs, types, strict=True):
            output.type = kind
        return ir.Graph([], outputs, nodes=self.nodes, name=self.prefix)


class _AttentionStep:
    """What all layers share: whether this is a prompt, where it starts and ends, positions, and a mask per window."""

    def __init__(self, lowering: Lowering, nodes: Sequence[ir.Node]) -> None:
        model = lowering.model
        self.model = model
        self.windows = sorted({attribute(n, "local_window_size", 0) for n in nodes})
        self.zero, self.one, self.two = (self.integers(f"index.{n}", [n]) for n in range(3))
        first = _Branch("prompt")
        query, total_sequence_length = nodes[0].inputs[0], nodes[0].inputs[6]
        count = first("tokens", "Squeeze", [first("token_axis", "Shape", [query], start=1, end=2)])
        self.is_prompt = first("is_prompt", "Greater", [count, self.integers("few", FEW_TOKENS)])
        total = first("total", "Cast", [total_sequence_length], to=ir.DataType.INT64)
        start = first("start", "Sub", [total, count])
        self.start = first("start_axis", "Unsqueeze", [start, self.zero])
        self.total = first("total_axis", "Unsqueeze", [total, self.zero])
        shared = ir.node(
            "If",
            [self.is_prompt],
            attributes={"then_branch": self._prompt(start, total), "else_branch": self._nothing()},
            num_outputs=1 + len(self.windows),
        )
        for name, output in zip(("positions", *(f"mask.{w}" for w in self.windows)), shared.outputs, strict=True):
            output.name = f"prompt.{name}"
        self.positions, *self.masks = shared.outputs
        model.graph.insert_before(nodes[0], [*first.nodes, shared])

    def integers(self, name: str, numbers: int | list[int]) -> ir.Value:
        return constant(self.model, f"prompt.{name}", np.array(numbers, np.int64))

    def mask(self, window: int) -> ir.Value:
        """``[S, T]`` float, zero where query i of the prompt may see position j, else :data:`MASKED`."""
        return self.masks[self.windows.index(window)]

    def _types(self) -> list[ir.TypeProtocol | None]:
        return [ir.TensorType(ir.DataType.INT64), *([ir.TensorType(ir.DataType.FLOAT)] * len(self.windows))]

    def _prompt(self, start: ir.Value, total: ir.Value) -> ir.Graph:
        branch, one, scalar = _Branch("prompt.shared"), self.integers("one", 1), self.integers("zero", 0)
        tokens = branch("range", "Range", [start, total, one])
        columns = branch("columns", "Range", [scalar, total, one])
        rows = branch("rows", "Unsqueeze", [tokens, self.one])
        causal = branch("causal", "LessOrEqual", [columns, rows])
        seen = constant(self.model, "prompt.seen", np.array(0, np.float32))
        hidden = constant(self.model, "prompt.hidden", np.array(MASKED, np.float32))
        outputs = [branch("positions", "Unsqueeze", [tokens, self.zero])]
        for window in self.windows:
            visible = causal
            if window:
                first = branch(f"first.{window}", "Sub", [rows, self.integers(f"window.{window}", window)])
                near = branch(f"near.{window}", "Greater", [columns, first])
                visible = branch(f"visible.{window}", "And", [causal, near])
            outputs.append(branch(f"mask.{window}", "Where", [visible, seen, hidden]))
        return branch.graph(outputs, self._types())

    def _nothing(self) -> ir.Graph:
        branch = _Branch("prompt.none")
        empty: dict[str, NDArray[np.generic]] = {"positions": np.zeros((1, 1), np.int64)}
        empty |= {f"mask.{window}": np.zeros((1, 1), np.float32) for window in self.windows}
        outputs = [
            branch(name, "Identity", [constant(self.model, f"prompt.no.{name}", array)])
            for name, array in empty.items()
        ]
        return branch.graph(outputs, self._types())


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if n.op_type == "GroupQueryAttention"]
    if not nodes:
        return PassResult(0, ("no GroupQueryAttention in the graph",))
    model.opset_imports[""] = max(OPSET, model.opset_imports[""])
    step = _AttentionStep(lowering, nodes)
    for layer, node in enumerate(nodes):
        _branch(lowering, step, layer, node)
    return PassResult(len(nodes))


def _branch(lowering: Lowering, step: _AttentionStep, layer: int, node: ir.Node) -> None:
    graph, types = lowering.model.graph, [output.type for output in node.outputs]
    single = ir.node(
        node.op_type, node.inputs, attributes=dict(node.attributes), domain=node.domain, num_outputs=len(types)
    )
    for output, name in zip(single.outputs, ("attention", "key", "value"), strict=True):
        output.name = f"layers.{layer}.single.{name}"
    prompt, outputs = _prompt(lowering, step, layer, node)
    alone = _Branch(f"layers.{layer}.single")
    alone.nodes.append(single)
    chosen = ir.node(
        "If",
        [step.is_prompt],
        attributes={
            "then_branch": prompt.graph(outputs, types),
            "else_branch": alone.graph(single.outputs, types),
        },
        num_outputs=len(types),
    )
    take_over(node.outputs, chosen.outputs)
    graph.insert_before(node, chosen)
    graph.remove(node, safe=True)


def _prompt(lowering: Lowering, step: _AttentionStep, layer: int, node: ir.Node) -> tuple[_Branch, list[ir.Value]]:
    """The branch for many tokens of one sequence, and its outputs: attention and both caches, as of ``node``."""
    model, branch = lowering.model, _Branch(f"layers.{layer}.prompt")
    heads, kv_heads = attribute(node, "num_heads", 0), attribute(node, "kv_num_heads", 0)
    query, key, value, past_key, past_value, _, _, cos, sin, *_ = (*node.inputs, None, None)
    assert query is not None and past_key is not None
    four_bits = past_key.dtype == ir.DataType.UINT8
    size = dimension(past_key, 3) * (2 if four_bits else 1)
    if key is None:
        parts = constant(model, f"split.{heads}.{kv_heads}.{size}", size * np.array([heads, kv_heads, kv_heads]))
        split = ir.node("Split", [query, parts], attributes={"axis": 2}, num_outputs=3)
        for output, name in zip(split.outputs, ("query", "key", "value"), strict=True):
            output.name = f"{branch.prefix}.{name}"
        branch.nodes.append(split)
        query, key, value = split.outputs
    if attribute(node, "do_rotary", 0):
        interleaved = attribute(node, "rotary_interleaved", 0)
        query, key = (
            branch(
                f"{name}.rotated",
                "RotaryEmbedding",
                [rows, step.positions, cos, sin],
                domain=CONTRIB,
                num_heads=count,
                interleaved=interleaved,
            )
            for name, rows, count in (("query", query, heads), ("key", key, kv_heads))
        )

    def per_head(name: str, count: int, scale: NDArray[np.float32] | None) -> ir.Value | None:
        """Scales ``[KV heads, head size]`` for ``count`` heads: each is repeated for the queries of its group."""
        if scale is None:
            return None
        repeated = np.repeat(scale.reshape(kv_heads, size), count // kv_heads, axis=0).astype(np.float32)
        return constant(model, f"layers.{layer}.{name}", np.ascontiguousarray(repeated))

    def split_heads(name: str, rows: ir.Value | None, count: int) -> ir.Value:
        return branch(f"{name}.heads", "Reshape", [rows, sizes(model, 0, 0, count, size)])

    def cached(name: str, rows: ir.Value | None, past: ir.Value | None, scale: ir.Value | None) -> list[ir.Value]:
        """The cache with the new tokens, and all of it so far as float codes ``[1, heads, T, size]``."""
        states = split_heads(name, rows, kv_heads)
        if scale is not None:
            states = branch(f"{name}.scaled", "Div", [states, scale])
            unit = constant(model, "prompt.unit", np.array(1, np.float32))
            middle = np.array(8, ml_dtypes.uint4) if four_bits else np.array(0, np.int8)
            states = branch(
                f"{name}.rounded", "QuantizeLinear", [states, unit, constant(model, "prompt.middle", middle)]
            )
        if four_bits:
            states = _packed(lowering, branch, name, states, kv_heads, size)
        states = branch(f"{name}.states", "Transpose", [states], perm=[0, 2, 1, 3])
        present = branch(f"{name}.present", "TensorScatter", [past, states, step.start], axis=2)
        seen = branch(f"{name}.seen", "Slice", [present, step.zero, step.total, step.two])
        if four_bits:
            seen = _unpacked(lowering, branch, name, seen, kv_heads, size)
        elif scale is not None:
            seen = branch(f"{name}.floats", "Cast", [seen], to=ir.DataType.FLOAT)
        return [present, seen]

    k_scale, v_scale = (lowering.kv_scales.get(f"layers.{layer}.{part}") for part in ("k_scale", "v_scale"))
    present_key, keys = cached("key", key, past_key, per_head("key_scale", kv_heads, k_scale))
    present_value, values = cached("value", value, past_value, per_head("value_scale", kv_heads, v_scale))
    queries = split_heads("query", query, heads)
    if k_scale is not None:
        queries = branch("query.scaled", "Mul", [queries, per_head("query_scale", heads, k_scale)])
    queries = branch("query.states", "Transpose", [queries], perm=[0, 2, 1, 3])
    mask = step.mask(attribute(node, "local_window_size", 0))
    limits = {"scale": attribute(node, "scale", size**-0.5), "softcap": attribute(node, "softcap", 0.0)}
    attention = branch("attention.states", "Attention", [queries, keys, values, mask], **limits)
    attention = branch("attention.heads", "Transpose", [attention], perm=[0, 2, 1, 3])
    if v_scale is not None:
        attention = branch("attention.scaled", "Mul", [attention, per_head("result_scale", heads, v_scale)])
    attention = branch("attention", "Reshape", [attention, sizes(model, 0, 0, heads * size)])
    return branch, [attention, present_key, present_value]


def _packed(lowering: Lowering, branch: _Branch, name: str, codes: ir.Value, heads: int, size: int) -> ir.Value:
    """uint4 codes ``[1, S, heads, size]`` as bytes ``[1, S, heads, size / 2]``: the first plus 16 times the second."""
    model = lowering.model
    floats = branch(f"{name}.codes", "Cast", [codes], to=ir.DataType.FLOAT)
    # Two axes only: with more, MatMul runs once for every head of every token.
    pairs = branch(f"{name}.pairs", "Reshape", [floats, sizes(model, -1, 2)])
    places = constant(model, "prompt.places", np.array([[1], [16]], np.float32))
    sums = branch(f"{name}.sums", "MatMul", [pairs, places])
    codes = branch(f"{name}.bytes", "Cast", [sums], to=ir.DataType.UINT8)
    return branch(f"{name}.packed", "Reshape", [codes, sizes(model, 1, -1, heads, size // 2)])


def _unpacked(lowering: Lowering, branch: _Branch, name: str, packed: ir.Value, heads: int, size: int) -> ir.Value:
    """Bytes ``[1, heads, T, size / 2]`` as float codes ``[1, heads, T, size]``, from -8 to 7."""
    model = lowering.model
    mask, shift, eight = (constant(model, f"prompt.byte.{n}", np.array(n, np.uint8)) for n in (15, 4, 8))
    low = branch(f"{name}.low", "BitwiseAnd", [packed, mask])
    high = branch(f"{name}.high", "BitShift", [packed, shift], direction="RIGHT")
    last = constant(model, "prompt.last", np.array([4], np.int64))
    halves = [
        branch(f"{name}.{half}.column", "Unsqueeze", [value, last]) for half, value in (("low", low), ("high", high))
    ]
    joined = branch(f"{name}.halves", "Concat", halves, axis=4)
    codes = branch(f"{name}.unsigned", "Reshape", [joined, sizes(model, 0, heads, -1, size)])
    unit = constant(model, "prompt.unit", np.array(1, np.float32))
    return branch(f"{name}.floats", "DequantizeLinear", [codes, unit, eight])
