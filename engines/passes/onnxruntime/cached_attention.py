"""GroupQueryAttention becomes a native operator over a pool of KV blocks, for any mix of prompts and single tokens.

    y, present… = GroupQueryAttention(qkv, past…, seqlens_k, total_sequence_length, cos, sin[, scales])
        ->  y = CachedAttention(qkv, past…, offsets, starts, block_table, cos, sin[, scales])

The graph inputs change: the tokens of all sequences are packed one after the other, those of sequence b from
``offsets[b]`` to ``offsets[b + 1] - 1``, at positions from ``starts[b]``; ``block_table [B, M]`` says in which blocks
of the caches ``[blocks, KV, block_tokens, D]``, or ``D / 2`` bytes of 4-bit codes, a sequence lies. All three are
int32. The caches are written in place: the graph has no outputs for them. The 60 outputs of the default model made a
decode step 0.3 to 1.2 % longer. A layer that there is no kernel for keeps all layers as they are, since the two
operators take different inputs.

ONNX Runtime 1.31 dequantizes an int8 cache again for every block of queries; cached_attention.c in
engines/kernels/cpu/source multiplies codes by codes. The output of a token is the same to the bit however a prompt was
cut and whatever else is in the step.
"""

from __future__ import annotations

import onnx_ir as ir

from engines.bundle import BLOCK_TABLE, OFFSETS, STARTS
from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, dimension, take_over

CACHE_ATTRIBUTES = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")  # the cache itself says as much
ATTRIBUTES = ("num_heads", "kv_num_heads", "scale", "do_rotary", "rotary_interleaved", "softcap", "local_window_size")


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if n.op_type == "GroupQueryAttention"]
    if not nodes:
        return PassResult(0, ("no GroupQueryAttention in the graph",))
    missing = lowering.kernels.unsupported("CachedAttention")
    if missing:
        return PassResult(0, (f"every layer: {missing}; GroupQueryAttention stays",))
    declined = [
        f"layer {layer}: {reason}; GroupQueryAttention stays in every layer"
        for layer, node in enumerate(nodes)
        if (reason := _unfit(lowering, node))
    ]
    if declined:
        return PassResult(0, tuple(declined))
    shapes = {OFFSETS: ["offsets"], STARTS: ["sequences"], BLOCK_TABLE: ["sequences", "columns"]}
    inputs = [
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.INT32))
        for name, shape in shapes.items()
    ]
    before = nodes[0].inputs[5:7]  # seqlens_k and total_sequence_length
    model.graph.inputs.extend(inputs)
    for node in nodes:
        _replace(model, node, inputs)
    for replaced in before:
        assert replaced is not None
        model.graph.inputs.remove(replaced)
    model.opset_imports[DOMAIN] = 1
    return PassResult(len(nodes))


def _unfit(lowering: Lowering, node: ir.Node) -> str:
    unknown = sorted(node.attributes.keys() - {*ATTRIBUTES, *CACHE_ATTRIBUTES})
    if unknown or any(extra is not None for extra in node.inputs[9:12]):  # positions, a bias, sinks
        return f"inputs or attributes that there is no kernel for{': ' * bool(unknown)}{', '.join(unknown)}"
    past = node.inputs[3]
    assert past is not None
    dtype = f"int{lowering.kv_bits}" if lowering.kv_scales else "float32"
    return lowering.kernels.unsupported_cache(dtype, dimension(past, 3) * (2 if dtype == "int4" else 1))


def _replace(model: ir.Model, node: ir.Node, inputs: list[ir.Value]) -> None:
    query, key, value, past_key, past_value, _, _, cos, sin, *rest = node.inputs
    scales = rest[3:5]  # after position_ids, attention_bias and head_target
    lowered = ir.node(
        "CachedAttention",
        [query, key, value, past_key, past_value, *inputs, cos, sin, *scales],
        attributes={name: node.attributes[name] for name in ATTRIBUTES if name in node.attributes},
        domain=DOMAIN,
    )
    y, *present = node.outputs
    take_over([y], lowered.outputs)
    for cache in present:
        model.graph.outputs.remove(cache)
    for cache in (past_key, past_value):
        assert cache is not None and cache.shape is not None
        cache.shape = ir.Shape(["blocks", cache.shape[1], "block_tokens", cache.shape[3]])
    model.graph.insert_before(node, lowered)
    model.graph.remove(node, safe=True)
