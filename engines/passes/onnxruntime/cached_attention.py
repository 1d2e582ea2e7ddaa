"""Attention becomes a native operator over a pool of KV blocks, with rotary inside where possible.

    Attention(Rotary(Transpose(Reshape(q))), Rotary(…k), Transpose(Reshape(v)), mask, past…)
        ->  CachedAttention(q, k, v, past…, offsets, starts, block_table, cos, sin[, scales])

Rotary of the first channels of heads, with the others as they are (Concat, Slice), an RMSNorm of each head of queries
and keys before it, and the sinks of AttentionWithSinks go into the operator, too. Where q, k and v are the parts of one
merged linear, its output is passed packed and the Split is removed. Queries may lie between gates, of each head a query
and a gate, and are read there. A constant factor of keys becomes one of the scores: the cache has keys without it, on a
grid as much finer.

The graph inputs change: the tokens of all sequences are packed one after the other, those of sequence b from
``offsets[b]`` to ``offsets[b + 1] - 1``, at positions from ``starts[b]``; ``block_table [B, M]`` says in which blocks
of the caches ``[blocks, KV, block_tokens, channels]`` a sequence lies; values may have other channels than keys. All
three are int32, and replace the padding mask. The caches are written in place: the graph has no outputs for them. The
60 outputs of the default model made a decode step 0.3 to 1.2 % longer. The output of a token is the same to the bit
however a prompt was cut and whatever else is in the step.

A quantized cache has its scales per channel as an input. Codes of 8 bits are int8 or E4M3. Codes of 4 bits are packed
two per byte of uint8, so blocks have half as many columns: channel 2i in the low half of byte i, channel 2i + 1 in
the high half, each as ``clip(round(x / scale), -8, 7) + 8``, ties to even.

:class:`BuildError` where the kernels have no attention for a layer: the target has no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from engines.bundle import BLOCK_TABLE, OFFSETS, STARTS
from engines.kernels.operators import DOMAIN
from engines.passes.base import (
    Lowering,
    PassResult,
    attribute,
    constant,
    dimension,
    last_axis_slice,
    new_value,
    only_use,
    producer_of,
    remove_dead,
    sizes,
)
from engines.passes.graph.linears import is_linear
from engines.passes.onnxruntime.step_inputs import drop_mask, step_inputs
from tapeout.errors import BuildError
from tapeout.operators import layer_of_node
from tapeout.operators.attention import NAME, NAME_WITH_SINKS, AttentionNode, is_attention

FLOAT_CACHES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}  # of caches without scales, by float type
CODES = {"int8": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN, "int4": ir.DataType.UINT8}
BEFORE_NORMS, BEFORE_SINKS = 12, 14  # inputs of the operator


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if is_attention(n)]
    if not nodes:
        return PassResult(0, ("no attention in the graph",))
    dtype = lowering.kv_dtype if lowering.kv_scales else FLOAT_CACHES[lowering.float_type].numpy().name
    for node in nodes:
        fixed = AttentionNode.of(node)
        for size in (fixed.head_size, fixed.value_size):
            _require_kernel(lowering, layer_of_node(node), dtype, size)
    where = step_inputs(model, OFFSETS, STARTS, BLOCK_TABLE)
    notes: list[str] = []
    for node in nodes:
        layer = layer_of_node(node)
        notes += (f"layer {layer}: {note}" for note in _lower(lowering, layer, node, where))
    drop_mask(model)
    for name in (NAME, NAME_WITH_SINKS):
        model.functions.pop(("tapeout", name, ""), None)
    model.opset_imports[DOMAIN] = 1
    return PassResult(len(nodes), tuple(notes))


def _require_kernel(lowering: Lowering, layer: int, dtype: str, head_size: int) -> None:
    kernels = lowering.kernels
    if reason := kernels.unsupported("CachedAttention") or kernels.unsupported_cache(dtype, head_size):
        raise BuildError(
            f"no attention for layer {layer}: {reason}",
            expected="attention that a kernel of the target computes (docs/native-kernels.md, docs/cuda-kernels.md)",
            remedy="build this model for another target, or on another machine if it is the processor that is named",
        )


def _lower(lowering: Lowering, layer: int, node: ir.Node, where: Sequence[ir.Value]) -> list[str]:
    """Replace one node. Returns what could not be folded into it."""
    model = lowering.model
    query, key, value, _, *sinks, past_key, past_value = node.inputs
    assert query is not None and key is not None and value is not None
    assert past_key is not None and past_value is not None
    fixed = AttentionNode.of(node)
    heads, kv_heads, head_size, value_size = fixed.heads, fixed.kv_heads, fixed.head_size, fixed.value_size

    cos = sin = None
    note = "no rotary node right before it; what turns its queries and keys, if anything, stays in the graph"
    if lowering.graph.rotary == "none":
        note = ""
    turned_q, turned_k = _rotary(query), _rotary(key)
    interleaved = 0
    if turned_q is not None and turned_k is not None:
        (rotary_q, source_q), (rotary_k, source_k) = turned_q, turned_k
        note = _not_foldable(lowering, rotary_q, rotary_k, head_size)
        if not note:
            cos, sin, interleaved = *rotary_q.inputs[1:3], attribute(rotary_q, "interleaved", 0)
            query, key = source_q, source_k
    key, key_factor = _factored(key)
    norms = [norm for value4d in (query, key) if (norm := _norm(value4d, head_size)) is not None]
    norm_note = ""
    if len(norms) != 2 or norms[0].epsilon != norms[1].epsilon:
        norms = []
    elif reason := lowering.kernels.unsupported_in_attention("head norms"):
        norms, norm_note = [], f"{reason}; norms of queries and keys stay nodes"
    created: list[ir.Node] = []
    sources = [(norm.source, norm.by_token) for norm in norms] or [(query, False), (key, False)]
    between, period = _between_gates(*sources[0], heads, head_size), head_size
    if between is not None and (reason := lowering.kernels.unsupported_in_attention("gates between queries")):
        between, norm_note = (
            None,
            "; ".join(filter(None, (norm_note, f"{reason}; queries are taken from between them"))),
        )
    if between is not None:
        period = 2 * head_size
    flat = [
        between or _flatten(model, *sources[0], heads * head_size, created),
        _flatten(model, *sources[1], kv_heads * head_size, created),
        _flatten(model, value, False, kv_heads * value_size, created),
    ]
    notes = [found for found in (note, norm_note) if found]
    packed = _packed(flat)
    if packed is None and any(_is_part_of_linear(part) for part in flat):
        notes.append("more happens to queries or keys than rotation, so one linear is split before attention")
    inputs: list[ir.Value | None] = [packed, None, None] if packed is not None else [*flat]
    inputs += [past_key, past_value, *where, cos, sin]
    attributes = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "scale": fixed.scale * key_factor,
        "do_rotary": int(cos is not None),
        "rotary_interleaved": int(interleaved),
    }
    if period != head_size:
        attributes["query_period"] = period
    if fixed.softcap:
        attributes["softcap"] = fixed.softcap
    if fixed.window:
        attributes["local_window_size"] = fixed.window
    element, packed_codes = FLOAT_CACHES[lowering.float_type], 1
    if lowering.kv_scales:
        for part, size in (("k_scale", head_size), ("v_scale", value_size)):
            name = f"layers.{layer}.{part}"
            scale = lowering.kv_scales[name].reshape(1, kv_heads, 1, size).astype(np.float32)
            scale /= np.float32(key_factor if part == "k_scale" else 1)
            inputs.append(constant(model, name, np.ascontiguousarray(scale)))
        element, packed_codes = CODES[lowering.kv_dtype], 2 if lowering.kv_dtype == "int4" else 1
    if norms:
        inputs += [*[None] * (BEFORE_NORMS - len(inputs)), *(norm.weight for norm in norms)]
        attributes["epsilon"] = norms[0].epsilon
    if sinks:
        inputs += [*[None] * (BEFORE_SINKS - len(inputs)), *sinks]
    for past, size in ((past_key, head_size), (past_value, value_size)):
        past.shape = ir.Shape(["blocks", kv_heads, "block_tokens", size // packed_codes])
        past.type = ir.TensorType(element)
    output = new_value(f"layers.{layer}.attention")
    created.append(ir.node("CachedAttention", inputs, attributes=attributes, domain=DOMAIN, outputs=[output]))
    model.graph.insert_before(node, created)
    _unflatten(model, node, output, heads, value_size)
    for present in node.outputs[1:]:
        model.graph.outputs.remove(present)
    remove_dead(model, [node])
    return notes


def _rotary(value: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """The rotary node behind a value ``[B, H, S, D]``, and what it or its first channels turn."""
    node = producer_of(value, "RotaryEmbedding")
    if node is not None and node.inputs[0] is not None:
        return node, node.inputs[0]
    joined = producer_of(value, "Concat")
    if joined is None or len(joined.inputs) != 2 or attribute(joined, "axis", 0) not in (-1, 3):
        return None
    node = producer_of(joined.inputs[0], "RotaryEmbedding")
    first, rest = (
        producer_of(part, "Slice") for part in (node.inputs[0] if node is not None else None, joined.inputs[1])
    )
    if node is None or first is None or rest is None or first.inputs[0] is not rest.inputs[0]:
        return None
    source, width = first.inputs[0], dimension(node.inputs[0], 3)
    if source is None or last_axis_slice(first) != (0, width) or last_axis_slice(rest) != (width, dimension(source, 3)):
        return None
    return node, source


def _factored(key: ir.Value) -> tuple[ir.Value, float]:
    """What keys are a positive constant times of, and the constant."""
    product = producer_of(key, "Mul")
    for x, other in (product.inputs, product.inputs[::-1]) if product is not None else ():
        factor = other.const_value if other is not None and other.is_initializer() else None
        if x is not None and x.shape == key.shape and factor is not None and factor.size == 1:
            number = float(factor.numpy().ravel()[0])
            return (x, number) if 0 < number < np.inf else (key, 1.0)
    return key, 1.0


def _between_gates(query: ir.Value, by_token: bool, heads: int, head_size: int) -> ir.Value | None:
    """The tensor ``[B, S, H·2D]`` of which each head has a query and then a gate, if that is all that it has."""
    exchange = producer_of(query, "Transpose")
    rows = query if by_token or exchange is None else exchange.inputs[0]
    reshape = producer_of(rows, "Reshape")
    if reshape is not None and reshape.inputs[0] is not None and len(reshape.inputs[0].shape or ()) == 4:
        rows = reshape.inputs[0]  # the same shape, said again
    split = producer_of(rows, "Split")
    apart = producer_of(split.inputs[0], "Reshape") if split is not None and split.outputs[0] is rows else None
    flat = apart.inputs[0] if apart is not None else None
    if split is None or apart is None or flat is None or attribute(split, "axis", 0) not in (-1, 3):
        return None
    if [dimension(part, -1) for part in split.outputs] != [head_size] * 2 or dimension(apart.outputs[0], 2) != heads:
        return None
    return flat if len(flat.shape or ()) == 3 and dimension(flat, 2) == 2 * heads * head_size else None


@dataclass(frozen=True)
class _HeadNorm:
    """``source``: what is normalized, ``[B, H, S, D]`` or, where it is ``by_token``, ``[B, S, H, D]``."""

    source: ir.Value
    by_token: bool
    weight: ir.Value
    epsilon: float


def _norm(value: ir.Value, head_size: int) -> _HeadNorm | None:
    """The RMSNorm of each head that a value ``[B, H, S, D]`` is, before or after its axes are exchanged."""
    exchange = producer_of(value, "Transpose")
    if exchange is not None and list(exchange.attributes["perm"].as_ints()) != [0, 2, 1, 3]:
        return None
    norm = producer_of(value if exchange is None else exchange.inputs[0], "RMSNormalization")
    if norm is None or attribute(norm, "axis", -1) not in (-1, 3):
        return None
    source, weight = norm.inputs[:2]
    if source is None or weight is None or weight.shape is None or list(weight.shape) != [head_size]:
        return None
    return _HeadNorm(source, exchange is not None, weight, attribute(norm, "epsilon", 1e-5))


def _not_foldable(lowering: Lowering, rotary_q: ir.Node, rotary_k: ir.Node, head_size: int) -> str:
    (cos, other), turned = (rotary_q.inputs[1], rotary_k.inputs[1]), dimension(rotary_q.inputs[0], 3)
    if cos is not other:
        return "queries and keys use different rotary tables; rotary stays a node"
    if cos is None or not cos.is_initializer():
        return "its rotary table is not constant; rotary stays a node"
    if attribute(rotary_q, "rotary_embedding_dim", 0) not in (0, turned):
        return "rotary covers part of the head; rotary stays a node"
    reason = lowering.kernels.unsupported_in_attention("partial rotary") if turned < head_size else ""
    return reason and f"{reason}; rotary stays a node"


def _flatten(model: ir.Model, value: ir.Value, by_token: bool, width: int, created: list[ir.Node]) -> ir.Value:
    """``[B, H, S, D]``, or ``[B, S, H, D]`` where it is ``by_token``, as ``[B, S, H·D]``: what it was reshaped from."""
    transpose = producer_of(value, "Transpose")
    rows = value
    if not by_token and transpose is not None and list(transpose.attributes["perm"].as_ints()) == [0, 2, 1, 3]:
        (source,) = transpose.inputs
        assert source is not None
        rows, by_token = source, True
    if by_token:
        reshape = producer_of(rows, "Reshape")
        if reshape is not None:
            source = reshape.inputs[0]
            if source is not None and source.shape is not None and len(source.shape) == 3 and source.shape[2] == width:
                return source
    else:
        back = ir.node("Transpose", [value], attributes={"perm": [0, 2, 1, 3]})
        created.append(back)
        rows = back.outputs[0]
    shape = sizes(model, 0, 0, width)
    flat = ir.node("Reshape", [rows, shape])
    created.append(flat)
    return flat.outputs[0]


def _packed(flat: list[ir.Value]) -> ir.Value | None:
    """The output of the merged linear whose three parts are exactly q, k and v."""
    split = producer_of(flat[0], "Split")
    if split is None or len(split.outputs) != 3 or any(a is not b for a, b in zip(split.outputs, flat, strict=True)):
        return None
    return split.inputs[0] if _is_part_of_linear(flat[0]) else None


def _is_part_of_linear(value: ir.Value) -> bool:
    split = producer_of(value, "Split")
    product = split.inputs[0] if split is not None else None
    return product is not None and is_linear(product.producer())


def _unflatten(model: ir.Model, node: ir.Node, flat: ir.Value, heads: int, size: int) -> None:
    """Hand ``[B, S, H·E]`` to the consumers of the node's ``[B, H, S, E]`` output. ``size``: E, of a value."""
    transpose = only_use(node.outputs[0])
    assert transpose is not None and transpose.op_type == "Transpose"
    rows = transpose.outputs[0]  # [B, S, H, E]
    reshape = only_use(rows)
    if reshape is not None and reshape.op_type == "Reshape":
        shape = reshape.outputs[0].shape
        if shape is not None and len(shape) == 3 and shape[2] == heads * size:
            flat.shape, flat.type = shape, reshape.outputs[0].type
            ir.convenience.replace_all_uses_with(reshape.outputs[0], flat)
            remove_dead(model, [reshape])
            return
    flat.type = rows.type
    if rows.shape is not None:
        flat.shape = ir.Shape([*rows.shape[:2], heads * size])
    target = sizes(model, 0, 0, heads, size)
    restored = ir.node("Reshape", [flat, target], outputs=[new_value(f"{flat.name}.heads", rows)])
    model.graph.insert_after(transpose, restored)
    ir.convenience.replace_all_uses_with(rows, restored.outputs[0])
    remove_dead(model, [transpose])
