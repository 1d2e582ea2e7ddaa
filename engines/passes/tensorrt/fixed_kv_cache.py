"""Attention becomes standard opset-24 operators over fixed KV buffers, which TensorRT turns into native layers.

    tapeout::Attention(q, k, v, mask, past_key, past_value)
        ->  present_key   = TensorScatter(past_key, k, write_positions)        KV_CACHE_UPDATE, in place
            present_value = TensorScatter(past_value, v, write_positions)
            Attention(q, present_key, present_value, seen)                     ATTENTION

The graph inputs change: ``write_positions [B]`` (int64: where each batch entry's first token is written) replaces the
padding mask, and caches become buffers ``[B, kv_heads, max_tokens, head_size]``. Batch entries are right padded, each
with its own length, so causality and length are one condition: a query at position p sees keys ``0 .. p``, or
``p-window+1 .. p`` in a sliding window. ``seen`` is that mask; all layers of one window share it.

Attention-24 can express the same by ``nonpad_kv_seqlen`` and ``is_causal``, and ONNX Runtime computes that correctly.
The parser of TensorRT-RTX 1.7.1 accepts it without a warning, drops the lengths and aligns the causal mask to the upper
left (``IAttention.key_value_lengths`` is None, ``causal_kind`` UPPER_LEFT): with such an engine each decoded token sees
only the first key.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from engines.passes.base import Lowering, PassResult, attribute, constant, dimension, remove_dead, sizes
from tapeout.operators import layer_of_node
from tapeout.operators.attention import is_attention

OPSET = 24  # of TensorScatter, and of Attention with nonpad_kv_seqlen
WRITE_POSITIONS = "write_positions"
HIDDEN = -3e4  # a score far below any soft cap, within float16


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if is_attention(n)]
    write = ir.Value(name=WRITE_POSITIONS, shape=ir.Shape(["batch"]), type=ir.TensorType(ir.DataType.INT64))
    mask = next(i for i in model.graph.inputs if i.name == "attention_mask")
    model.graph.inputs[model.graph.inputs.index(mask)] = write
    masks: dict[int, ir.Value] = {}
    notes = [_lower(lowering, layer_of_node(node), node, write, masks) for node in nodes]
    del model.functions[("tapeout", "Attention", "")]
    model.opset_imports[""] = OPSET
    return PassResult(len(nodes), tuple(note for note in notes if note))


def _lower(lowering: Lowering, layer: int, node: ir.Node, write: ir.Value, masks: dict[int, ir.Value]) -> str:
    """Replace one node. Returns what prevents a native layer, if anything."""
    model = lowering.model
    query, key, value, _, past_key, past_value = node.inputs
    assert past_key is not None and past_value is not None
    kv_heads, head_size = dimension(past_key, 1), dimension(past_key, 3)
    buffer = ["batch", kv_heads, "max_tokens", head_size]
    window, softcap = int(attribute(node, "window", 0)), float(attribute(node, "softcap", 0.0))
    scatters: list[ir.Node] = []
    for past, fresh, before in zip((past_key, past_value), (key, value), node.outputs[1:], strict=True):
        past.shape = ir.Shape(buffer)
        scatter = ir.node("TensorScatter", [past, fresh, write], attributes={"axis": -2, "mode": "linear"})
        after = scatter.outputs[0]
        after.name, before.name = before.name, f"{before.name}.exported"
        after.shape, after.type = ir.Shape(buffer), before.type
        model.graph.outputs[model.graph.outputs.index(before)] = after
        scatters.append(scatter)
    if window >= lowering.max_tokens:
        window = 0
    if window not in masks:
        masks[window] = _seen(model, node, write, window)
    scale = float(attribute(node, "scale", head_size**-0.5))
    caches = [scatter.outputs[0] for scatter in scatters]
    if softcap:
        # IAttention has no soft cap, and the parser refuses one.
        created = _written_out(model, layer, query, caches, masks[window], kv_heads, head_size, scale, softcap)
    else:
        created = [ir.node("Attention", [query, *caches, masks[window]], attributes={"scale": scale})]
    lowered = created[-1]
    output = lowered.outputs[0]
    output.name, output.shape, output.type = f"layers.{layer}.attention", node.outputs[0].shape, node.outputs[0].type
    model.graph.insert_before(node, [*scatters, *created])
    ir.convenience.replace_all_uses_with(node.outputs[0], output)
    remove_dead(model, [node])
    return f"layer {layer}: soft cap {softcap:g}, so its attention is written out" if softcap else ""


def _written_out(
    model: ir.Model,
    layer: int,
    query: ir.Value | None,
    caches: list[ir.Value],
    seen: ir.Value,
    kv_heads: int,
    head_size: int,
    scale: float,
    softcap: float,
) -> list[ir.Node]:
    """``softmax(softcap * tanh(scale / softcap * q kᵀ), where seen) v``, key heads shared by groups of query heads."""
    assert query is not None
    heads = dimension(query, 1)
    nodes: list[ir.Node] = []

    def add(op: str, *inputs: ir.Value | None, **attributes: int | list[int]) -> ir.Value:
        nodes.append(ir.node(op, inputs, attributes=attributes))
        nodes[-1].outputs[0].name = f"layers.{layer}.attention.{len(nodes)}"
        nodes[-1].outputs[0].type = query.type
        return nodes[-1].outputs[0]

    def number(name: str, value: float) -> ir.Value:
        return constant(model, f"attention.{name}.{value:g}", np.array(value, np.float32))

    group_axis = constant(model, "axes.2", np.array([2], np.int64))
    grouped = add("Reshape", query, sizes(model, 0, kv_heads, heads // kv_heads, -1, head_size))  # [B, Hkv, g, S, D]
    keys, values = (add("Unsqueeze", cache, group_axis) for cache in caches)
    scores = add("MatMul", add("Mul", grouped, number("scale", scale / softcap)),
                 add("Transpose", keys, perm=[0, 1, 2, 4, 3]))  # fmt: skip
    capped = add("Mul", add("Tanh", scores), number("softcap", softcap))
    visible = add("Unsqueeze", seen, group_axis)
    visible.type = seen.type
    weights = add("Softmax", add("Where", visible, capped, number("hidden", HIDDEN)), axis=-1)
    add("Reshape", add("MatMul", weights, values), sizes(model, 0, heads, -1, head_size))
    return nodes


def _seen(model: ir.Model, before: ir.Node, write: ir.Value, window: int) -> ir.Value:
    """Which keys each query sees, bool ``[B, 1, S, max_tokens]``: ``0 <= query position - key position < window``."""
    ids = next(i for i in model.graph.inputs if i.name == "input_ids")
    past = before.inputs[4]
    zero, one = (constant(model, f"scalar.{n}", np.array(n, np.int64)) for n in (0, 1))
    first, second = (constant(model, f"axes.{n}", np.array([n], np.int64)) for n in (0, 1))
    axes_query = constant(model, "axes.1.3", np.array([1, 3], np.int64))
    nodes: list[ir.Node] = []

    def add(op: str, inputs: list[ir.Value | None], **attributes: int) -> ir.Value:
        nodes.append(ir.node(op, inputs, attributes=attributes))
        return nodes[-1].outputs[0]

    steps = add("Squeeze", [add("Shape", [ids], start=1, end=2), first])
    positions = add("Add", [add("Unsqueeze", [write, second]), add("Range", [zero, steps, one])])
    total = add("Squeeze", [add("Shape", [past], start=2, end=3), first])
    distance = add("Sub", [add("Unsqueeze", [positions, axes_query]), add("Range", [zero, total, one])])
    seen = add("GreaterOrEqual", [distance, zero])
    if window:
        size = constant(model, f"window.{window}", np.array(window, np.int64))
        seen = add("And", [seen, add("Less", [distance, size])])
    seen.name, seen.type = f"seen.{window or 'all'}", ir.TensorType(ir.DataType.BOOL)
    seen.shape = ir.Shape(["batch", 1, "steps", "max_tokens"])
    model.graph.insert_before(before, nodes)
    return seen
