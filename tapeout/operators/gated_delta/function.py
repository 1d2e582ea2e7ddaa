"""``tapeout::GatedDelta``: what a gated delta rule is exported as, defined by a standard-opset function body.

Inputs: value ``[B, S, Hv, Dv]``, query and key ``[B, S, Hk, Dk]``, decay ``[B, S, Hv]`` or one of each key channel
``[B, S, Hv, Dk]``, beta ``[B, S, Hv]``, attention_mask ``[B, P+S]`` (int64, 0 hides a token), past ``[B, Hv, Dk, Dv]``.
Outputs: ``[B, S, Hv, Dv]`` and the state after the last token. Queries and keys are divided by their norm,
``sqrt(sum of squares + 1e-6)``, and queries by ``sqrt(Dk)`` besides. ``decay`` is a logarithm. Then for each token and
each head of values, with the head of keys that serves it:

    state = exp(decay) * state      (each row of it by the decay of its key channel, where those have their own)
    state = state + key ⊗ (beta * (value - key · state))
    output = query · state

A hidden token neither lets the state decay nor corrects it.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

_BODY = """
<opset_import: ["" : 23], domain: "tapeout">
GatedDelta (value, query, key, decay, beta, attention_mask, past) => (output, present)
{
    axis1 = Constant <value_ints: ints = [1]> ()
    axis2 = Constant <value_ints: ints = [2]> ()
    axis3 = Constant <value_ints: ints = [3]> ()
    last = Constant <value_ints: ints = [9223372036854775807]> ()
    zero = Constant <value_ints: ints = [0]> ()
    one = Constant <value_ints: ints = [1]> ()
    steps = Shape <start: int = 1, end: int = 2> (value)
    first = Sub (zero, steps)
    seen_tokens = Slice (attention_mask, first, last, axis1)
    seen_float = CastLike (seen_tokens, value)
    seen = Unsqueeze (seen_float, axis2)
    rate = Mul (beta, seen)
    heads = Shape <start: int = 2, end: int = 3> (value)
    kept = Constant <value_ints: ints = [0, 0]> ()
    rest = Constant <value_ints: ints = [-1]> ()
    by_head = Concat <axis: int = 0> (kept, heads, rest)
    decay_channels = Reshape (decay, by_head)
    seen_channels = Unsqueeze (seen, axis3)
    decay_seen = Mul (decay_channels, seen_channels)
    factor = Exp (decay_seen)

    least = Constant <value_float: float = 1e-6> ()
    query_squares = ReduceSumSquare <keepdims: int = 1> (query, axis3)
    query_sum = Add (query_squares, least)
    query_norm = Sqrt (query_sum)
    key_squares = ReduceSumSquare <keepdims: int = 1> (key, axis3)
    key_sum = Add (key_squares, least)
    key_norm = Sqrt (key_sum)
    channels = Shape <start: int = 3, end: int = 4> (key)
    channels_float = CastLike (channels, value)
    root = Sqrt (channels_float)
    query_divisor = Mul (query_norm, root)
    query_scaled = Div (query, query_divisor)
    key_scaled = Div (key, key_norm)

    key_heads = Shape <start: int = 2, end: int = 3> (key)
    each = Div (heads, key_heads)
    repeats = Concat <axis: int = 0> (one, one, one, each, one)
    joined = Constant <value_ints: ints = [0, 0, -1]> ()
    flat = Concat <axis: int = 0> (joined, channels)
    query_apart = Unsqueeze (query_scaled, axis3)
    query_repeated = Tile (query_apart, repeats)
    query_heads = Reshape (query_repeated, flat)
    key_apart = Unsqueeze (key_scaled, axis3)
    key_repeated = Tile (key_apart, repeats)
    key_by_head = Reshape (key_repeated, flat)

    present, output = Scan <num_scan_inputs: int = 5, scan_input_axes: ints = [1, 1, 1, 1, 1],
                            scan_output_axes: ints = [1], body: graph = token
        (float[batch, value_heads, key_size, value_size] before, float[batch, value_heads, value_size] v,
         float[batch, value_heads, key_size] q, float[batch, value_heads, key_size] k,
         float[batch, value_heads, decays] f, float[batch, value_heads] b)
        => (float[batch, value_heads, key_size, value_size] after, float[batch, value_heads, value_size] read)
        {
            row_axis = Constant <value_ints: ints = [2]> ()
            column_axis = Constant <value_ints: ints = [3]> ()
            f_column = Unsqueeze (f, column_axis)
            decayed = Mul (before, f_column)
            k_column = Unsqueeze (k, column_axis)
            by_key = Mul (decayed, k_column)
            answer = ReduceSum <keepdims: int = 0> (by_key, row_axis)
            error = Sub (v, answer)
            b_channel = Unsqueeze (b, row_axis)
            correction = Mul (error, b_channel)
            correction_row = Unsqueeze (correction, row_axis)
            change = Mul (k_column, correction_row)
            after = Add (decayed, change)
            q_column = Unsqueeze (q, column_axis)
            by_query = Mul (after, q_column)
            read = ReduceSum <keepdims: int = 0> (by_query, row_axis)
        }> (past, value, query_heads, key_by_head, factor, rate)
}
"""


def gated_delta_function() -> ir.Function:
    return ir.serde.deserialize_function(onnx.parser.parse_function(_BODY))
