"""Attention over a pool of KV blocks becomes PagedAttention, ONNX Runtime's own operator for CUDA.

    CachedAttention(q, k, v, caches, offsets, starts, block_table, cos, sin[, scales, norms])     [1, N, width]
        ->  PagedAttention(q, k, v, caches, offsets, starts, block_table, cos, sin,               [N, width]
                           slot_mapping, norms, scales, attention_metadata)

Rotary, norms of heads, window, soft cap and a packed input are what ``cached_attention`` made of them. Its caches are
``[blocks, KV, block_tokens, D]``, those of PagedAttention ``[blocks, block_tokens, KV, D]``; both are written in place.

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
    constant,
    dimension,
    new_value,
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
    for node in nodes:
        _lower(lowering, layer_of_node(node), node, slots, metadata)
    model.opset_imports[CONTRIB] = 1
    model.opset_imports.pop(DOMAIN, None)
    return PassResult(len(nodes))


def _input(model: ir.Model, name: str, shape: Sequence[str | int]) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.INT32))
    model.graph.inputs.append(value)
    return value


def _lower(lowering: Lowering, layer: int, node: ir.Node, slots: ir.Value, metadata: ir.Value) -> None:
    """Replace one node."""
    model = lowering.model
    query, key, value, *caches = node.inputs[:5]
    offsets, starts, table = node.inputs[5:8]
    cos, sin, key_scales, value_scales, query_norm, key_norm = [*node.inputs[8:], *[None] * 6][:6]
    heads, kv_heads = node.attributes["num_heads"].as_int(), node.attributes["kv_num_heads"].as_int()
    head_size = dimension(caches[0], 3)
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
        attributes["qk_norm_epsilon"] = ir.AttrFloat32("qk_norm_epsilon", attributes.pop("epsilon").as_float())
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


def _scale(model: ir.Model, scale: ir.Value | None, kv_heads: int, head_size: int) -> ir.Value | None:
    """``[KV, 1, D]``, as PagedAttention has the scales of channels."""
    if scale is None:
        return None
    tensor = scale.const_value
    assert tensor is not None
    values = np.ascontiguousarray(tensor.numpy().reshape(kv_heads, 1, head_size))
    return constant(model, f"{scale.name}.channels", values)
