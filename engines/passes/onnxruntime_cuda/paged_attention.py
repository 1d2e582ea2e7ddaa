"""Attention over a pool of KV blocks becomes PagedAttention, ONNX Runtime's own operator for CUDA.

    CachedAttention(q, k, v, caches, offsets, starts, block_table, cos, sin[, scales])     [1, N, width]
        ->  PagedAttention(q, k, v, caches, offsets, starts, block_table, cos, sin,        [N, width]
                           slot_mapping, scales, attention_metadata)

Rotary, window, soft cap and a packed input are what ``cached_attention`` made of them. Norms of query and key heads
are fused, and what is packed before them stays so. Its caches are ``[blocks, KV, block_tokens, D]``, those of
PagedAttention ``[blocks, block_tokens, KV, D]``; both are written in place.

Two inputs are new. ``slot_mapping [N]`` says where each token's key and value are written, ``block * block_tokens +
offset``, and -1 for a row that pads a step. ``attention_metadata [3]`` lies in CPU memory: bounds on the new tokens of
a sequence, on its tokens, and from below on those of the longest one. Without it every node would copy lengths back
from the device, which no CUDA graph can hold. A bound that is too small omits attention without an error, so the
engine checks them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from engines.bundle import ATTENTION_METADATA, SLOT_MAPPING
from engines.kernels.operators import DOMAIN
from engines.passes.base import (
    CONTRIB,
    Lowering,
    PassResult,
    attribute,
    constant,
    dimension,
    new_value,
    producer_of,
    replace,
    sizes,
)
from tapeout.errors import BuildError
from tapeout.operators import layer_of_node

METADATA_BOUNDS = 3  # of new tokens, of tokens, and of tokens from below


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if (n.domain, n.op_type) == (DOMAIN, "CachedAttention")]
    if not nodes:
        return PassResult(0, ("no attention in the graph",))
    if written := [n for n in model.graph if n.op_type in ("Cos", "Sin")]:
        raise BuildError(
            f"{written[0].op_type} {written[0].outputs[0].name} computes rotary angles in the graph, and float16 holds "
            "no position beyond 2,048 exactly",
            expected="a rotary embedding that is a table over positions",
            remedy="build for a target that computes in float32, such as ort-cpu",
        )
    slots = _input(model, SLOT_MAPPING, ["tokens"])
    metadata = _input(model, ATTENTION_METADATA, [METADATA_BOUNDS])
    notes: list[str] = []
    for node in nodes:
        layer = layer_of_node(node)
        notes += (f"layer {layer}: {note}" for note in _lower(lowering, layer, node, slots, metadata))
    model.opset_imports[CONTRIB] = 1
    model.opset_imports.pop(DOMAIN, None)
    return PassResult(len(nodes), tuple(notes))


def _input(model: ir.Model, name: str, shape: Sequence[str | int]) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.INT32))
    model.graph.inputs.append(value)
    return value


def _lower(lowering: Lowering, layer: int, node: ir.Node, slots: ir.Value, metadata: ir.Value) -> list[str]:
    """Replace one node. Returns what could not be fused into it."""
    model = lowering.model
    query, key, value, *caches = node.inputs[:5]
    offsets, starts, table = node.inputs[5:8]
    cos, sin, key_scales, value_scales = [*node.inputs[8:], None, None, None, None][:4]
    heads, kv_heads = node.attributes["num_heads"].as_int(), node.attributes["kv_num_heads"].as_int()
    head_size = dimension(caches[0], 3)
    query_norm = key_norm = None
    epsilon, notes = 0.0, list[str]()
    if query is not None and key is not None and (_norm(query) or _norm(key)):
        found = _norms(query, key, heads, kv_heads, head_size)
        if isinstance(found, str):
            notes.append(found)
        else:
            query, key, query_norm, key_norm, epsilon = found
            if (packed := _packed(query, key, value)) is not None:
                query, key, value = packed, None, None
    widths = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
    if key is None:
        widths[0] = sum(widths)
    created: list[ir.Node] = []
    rows: list[ir.Value | None] = []
    for part, width in zip((query, key, value), widths, strict=True):
        if part is None:
            rows.append(None)
            continue
        created.append(ir.node("Reshape", [part, sizes(model, -1, width)]))
        rows.append(created[-1].outputs[0])
        created[-1].outputs[0].type = part.type
    for cache in caches:
        assert cache is not None
        cache.shape = ir.Shape(["blocks", "block_tokens", kv_heads, head_size])
    scales = [_scale(model, scale, kv_heads, head_size) for scale in (key_scales, value_scales)]
    attributes = {name: node.attributes[name] for name in node.attributes}
    for part, scale in zip("kv", scales, strict=True):
        if scale is not None:
            attributes[f"{part}_quant_type"] = ir.AttrString(f"{part}_quant_type", "PER_CHANNEL")
    if query_norm is not None:
        attributes["qk_norm_epsilon"] = ir.AttrFloat32("qk_norm_epsilon", epsilon)
    # The missing one is a sink a head.
    inputs = [*rows, *caches, offsets, starts, table, cos, sin, slots, None, query_norm, key_norm, *scales, metadata]
    attention = ir.Node(CONTRIB, "PagedAttention", inputs, attributes=list(attributes.values()))
    created.append(attention)
    result = attention.outputs[0]
    result.name, result.type = f"layers.{layer}.attention.rows", node.outputs[0].type
    result.shape = ir.Shape(["tokens", heads * head_size])
    created.append(
        ir.node(
            "Reshape",
            [result, sizes(model, 1, -1, heads * head_size)],
            outputs=[new_value(f"layers.{layer}.attention.packed", node.outputs[0])],
        )
    )
    replace(model, [node], created, {node.outputs[0]: created[-1].outputs[0]})
    return notes


def _norm(flat: ir.Value) -> ir.Node | None:
    """The RMSNorm of every head that ``[.., heads * D]`` is the result of."""
    reshape = producer_of(flat, "Reshape")
    return producer_of(reshape.inputs[0], "RMSNormalization") if reshape is not None else None


def _norms(
    query: ir.Value, key: ir.Value, query_heads: int, kv_heads: int, head_size: int
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value, float] | str:
    """Queries and keys before their norms, the weights of these and their epsilon; or why they are not fused."""
    found = [_norm(query), _norm(key)]
    sources: list[ir.Value] = []
    weights: list[ir.Value] = []
    epsilons: list[float] = []
    for norm, count in zip(found, (query_heads, kv_heads), strict=True):
        if norm is None:
            return "a norm of only one of queries and keys; it stays a node"
        heads, weight = norm.inputs
        reshape = producer_of(heads, "Reshape")
        source = reshape.inputs[0] if reshape is not None else None
        if weight is None or weight.shape is None or list(weight.shape) != [head_size]:
            return "the norm of queries or keys has other weights than one for each channel; it stays a node"
        rank = len(heads.shape) if heads is not None and heads.shape is not None else 0
        if attribute(norm, "axis", -1) not in (-1, rank - 1):
            return "the norm of queries or keys is over more than a head; it stays a node"
        if source is None or source.shape is None or source.shape[-1] != count * head_size:
            return "what is normed are not the heads of a linear; the norm stays a node"
        sources.append(source)
        weights.append(weight)
        epsilons.append(float(attribute(norm, "epsilon", 1e-5)))
    if epsilons[0] != epsilons[1]:
        return "the norms of queries and keys have different epsilons; they stay nodes"
    return (*sources, *weights, epsilons[0])  # type: ignore[return-value]


def _packed(*parts: ir.Value | None) -> ir.Value | None:
    """What all three are the parts of, in order."""
    split = producer_of(parts[0], "Split")
    whole = split is not None and all(a is b for a, b in zip(split.outputs, parts, strict=False))
    return split.inputs[0] if split is not None and whole and len(split.outputs) == len(parts) else None


def _scale(model: ir.Model, scale: ir.Value | None, kv_heads: int, head_size: int) -> ir.Value | None:
    """``[KV, 1, D]``, as PagedAttention has the scales of channels."""
    if scale is None:
        return None
    tensor = scale.const_value
    assert tensor is not None
    values = np.ascontiguousarray(tensor.numpy().reshape(kv_heads, 1, head_size))
    return constant(model, f"{scale.name}.channels", values)
