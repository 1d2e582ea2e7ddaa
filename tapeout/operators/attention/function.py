"""``tapeout::Attention`` and ``AttentionWithSinks``: what attention is exported as, defined by standard-opset bodies.

Inputs: query ``[B, H, S, D]`` and key ``[B, Hkv, S, D]`` (rotary already applied), value ``[B, Hkv, S, E]``,
attention_mask ``[B, P+S]`` (int64, 0 hides a position), past key and value ``[B, Hkv, P, D]`` and ``[B, Hkv, P, E]``.
Outputs: ``[B, H, S, E]`` and the grown cache.
Attributes: ``scale``; ``softcap`` (0: none); ``window`` (0: none; else a query sees itself and window-1 before it).
Causality is by index: query s has position P+s.

``AttentionWithSinks`` has sinks ``[H]`` before the caches: in each softmax of a head one more score, of a key and a
value that are zeros. Its ``softcap`` is 0.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

# What a query sees, [B, 1, S, P+S].
_MASK = """
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    axis0 = Constant <value_ints: ints = [0]> ()
    axis1 = Constant <value_ints: ints = [1]> ()
    axes_head = Constant <value_ints: ints = [1, 2]> ()
    axes_batch = Constant <value_ints: ints = [0, 1]> ()
    steps_1d = Shape <start: int = 2, end: int = 3> (query)
    past_1d = Shape <start: int = 2, end: int = 3> (past_key)
    steps = Squeeze (steps_1d, axis0)
    past = Squeeze (past_1d, axis0)
    total = Add (past, steps)
    query_range = Range (past, total, one)
    key_range = Range (zero, total, one)
    query_position = Unsqueeze (query_range, axis1)
    key_position = Unsqueeze (key_range, axis0)
    distance = Sub (query_position, key_position)
    causal = GreaterOrEqual (distance, zero)
    window_size = Constant <value_int: int = @window> ()
    near = Less (distance, window_size)
    unlimited = LessOrEqual (window_size, zero)
    inside = Or (near, unlimited)
    band = And (causal, inside)
    itself = Equal (distance, zero)
    real = Cast <to: int = 9> (attention_mask)
    real_4d = Unsqueeze (real, axes_head)
    band_4d = Unsqueeze (band, axes_batch)
    itself_4d = Unsqueeze (itself, axes_batch)
    seen = Or (real_4d, itself_4d)
    mask = And (band_4d, seen)
"""

_BODY = f"""
<opset_import: ["" : 23], domain: "tapeout">
Attention <scale, softcap, window> (query, key, value, attention_mask, past_key, past_value)
    => (output, present_key, present_value)
{{{_MASK}
    output, present_key, present_value = Attention <scale: float = @scale, softcap: float = @softcap>
        (query, key, value, mask, past_key, past_value)
}}
"""

_WITH_SINKS = f"""
<opset_import: ["" : 23], domain: "tapeout">
AttentionWithSinks <scale, softcap, window> (query, key, value, attention_mask, sinks, past_key, past_value)
    => (output, present_key, present_value)
{{{_MASK}
    present_key = Concat <axis: int = 2> (past_key, key)
    present_value = Concat <axis: int = 2> (past_value, value)
    batch = Shape <start: int = 0, end: int = 1> (key)
    kv_heads = Shape <start: int = 1, end: int = 2> (key)
    single = Constant <value_ints: ints = [1]> ()
    channels = Shape <start: int = 3, end: int = 4> (key)
    value_channels = Shape <start: int = 3, end: int = 4> (value)
    key_shape = Concat <axis: int = 0> (batch, kv_heads, single, channels)
    value_shape = Concat <axis: int = 0> (batch, kv_heads, single, value_channels)
    no_key = ConstantOfShape (key_shape)
    no_value = ConstantOfShape (value_shape)
    keys = Concat <axis: int = 2> (present_key, no_key)
    values = Concat <axis: int = 2> (present_value, no_value)
    no_score = Constant <value_float: float = 0.0> ()
    hidden_score = Constant <value_float: float = -3.0e38> ()
    heads = Shape <start: int = 1, end: int = 2> (query)
    seen_or_hidden = Where (mask, no_score, hidden_score)
    total_1d = Unsqueeze (total, axis0)
    mask_shape = Concat <axis: int = 0> (batch, heads, steps_1d, total_1d)
    of_keys = Expand (seen_or_hidden, mask_shape)
    sink_axes = Constant <value_ints: ints = [0, 2, 3]> ()
    sinks_4d = Unsqueeze (sinks, sink_axes)
    sink_shape = Concat <axis: int = 0> (batch, heads, steps_1d, single)
    of_sinks = Expand (sinks_4d, sink_shape)
    added = Concat <axis: int = 3> (of_keys, of_sinks)
    output = Attention <scale: float = @scale> (query, keys, values, added)
}}
"""


def attention_function() -> ir.Function:
    """The function definition. A padded query still sees itself, so no row of the softmax is empty."""
    return ir.serde.deserialize_function(onnx.parser.parse_function(_BODY))


def function_with_sinks() -> ir.Function:
    return ir.serde.deserialize_function(onnx.parser.parse_function(_WITH_SINKS))
