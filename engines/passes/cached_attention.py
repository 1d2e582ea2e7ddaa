"""GroupQueryAttention becomes a native operator, one for prompts and single tokens alike.

    GroupQueryAttention(qkv, past…, seqlens_k, total_sequence_length, cos, sin[, scales])
        ->  CachedAttention(qkv, past…, seqlens_k, cos, sin[, scales])

ONNX Runtime 1.31 dequantizes an int8 cache again for every block of queries; engines/native/source/cached_attention.c
multiplies codes by codes. It takes any number of tokens of any number of batch entries, so a prompt needs no branch of
its own (prompt_attention.py), and the output of a token is the same to the bit however a prompt was cut and whatever
else was in the batch.
"""

from __future__ import annotations

import onnx_ir as ir

from engines.native import DOMAIN, unsupported
from engines.passes.base import Lowering, PassResult, attribute, dimension, take_over

HEAD_SIZES, LARGEST_HEAD = 16, 512  # a head is a multiple of the first: the lanes of a vector
CACHE_ATTRIBUTES = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")  # the cache itself says as much
ATTRIBUTES = ("num_heads", "kv_num_heads", "scale", "do_rotary", "rotary_interleaved", "softcap", "local_window_size")


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    nodes = [n for n in model.graph if n.op_type == "GroupQueryAttention"]
    if not nodes:
        return PassResult(0, ("no GroupQueryAttention in the graph",))
    machine = unsupported()
    if machine:
        return PassResult(0, (f"every layer: {machine}; GroupQueryAttention stays",))
    declined: list[str] = []
    for layer, node in enumerate(nodes):
        reason = _unfit(node)
        if reason:
            declined.append(f"layer {layer}: {reason}; GroupQueryAttention stays")
        else:
            _replace(model, node)
    if len(declined) < len(nodes):
        model.opset_imports[DOMAIN] = 1
    return PassResult(len(nodes) - len(declined), tuple(declined))


def _unfit(node: ir.Node) -> str:
    unknown = sorted(node.attributes.keys() - {*ATTRIBUTES, *CACHE_ATTRIBUTES})
    if unknown or any(extra is not None for extra in node.inputs[9:12]):  # positions, a bias, sinks
        return f"inputs or attributes that there is no kernel for{': ' * bool(unknown)}{', '.join(unknown)}"
    past = node.inputs[3]
    assert past is not None
    if past.dtype not in (ir.DataType.FLOAT, ir.DataType.INT8):
        bits = attribute(node, "kv_cache_bit_width", 8)
        return f"a cache of {bits}-bit codes, where there are kernels for float and int8"
    size = dimension(past, 3)
    if size % HEAD_SIZES or size > LARGEST_HEAD:
        return f"heads of {size} channels, where kernels take multiples of {HEAD_SIZES} up to {LARGEST_HEAD}"
    return ""


def _replace(model: ir.Model, node: ir.Node) -> None:
    query, key, value, past_key, past_value, seqlens, _, cos, sin, *rest = node.inputs
    scales = rest[3:5]  # after position_ids, attention_bias and head_sink
    lowered = ir.node(
        "CachedAttention",
        [query, key, value, past_key, past_value, seqlens, cos, sin, *scales],
        attributes={name: node.attributes[name] for name in ATTRIBUTES if name in node.attributes},
        domain=DOMAIN,
        num_outputs=len(node.outputs),
    )
    take_over(node.outputs, lowered.outputs)
    model.graph.insert_before(node, lowered)
    model.graph.remove(node, safe=True)
