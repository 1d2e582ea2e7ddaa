"""``tapeout::SelectiveScan``: what Mamba2's scan is exported as, defined by a standard-opset function body.

Inputs: value ``[B, S, H, P]`` (x times its time step), query and key ``[B, S, G, N]`` (C and B), decay ``[B, S, H]`` (A
times the time step), attention_mask ``[B, P+S]`` (int64, 0 hides a token), past ``[B, H, N, P]``. Outputs:
``[B, S, H, P]`` and the state after the last token. For each token and each head, with the group that serves it:

    state = exp(decay) * state + key ⊗ value
    output = query · state

A hidden token neither lets the state decay nor adds to it.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

_BODY = """
<opset_import: ["" : 23], domain: "tapeout">
SelectiveScan (value, query, key, decay, attention_mask, past) => (output, present)
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
    decay_seen = Mul (decay, seen)
    factor = Exp (decay_seen)
    seen_channels = Unsqueeze (seen, axis3)
    added = Mul (value, seen_channels)

    heads = Shape <start: int = 2, end: int = 3> (value)
    groups = Shape <start: int = 2, end: int = 3> (key)
    each = Div (heads, groups)
    repeats = Concat <axis: int = 0> (one, one, one, each, one)
    joined = Constant <value_ints: ints = [0, 0, -1]> ()
    channels = Shape <start: int = 3, end: int = 4> (key)
    flat = Concat <axis: int = 0> (joined, channels)
    query_apart = Unsqueeze (query, axis3)
    query_repeated = Tile (query_apart, repeats)
    query_heads = Reshape (query_repeated, flat)
    key_apart = Unsqueeze (key, axis3)
    key_repeated = Tile (key_apart, repeats)
    key_by_head = Reshape (key_repeated, flat)

    present, output = Scan <num_scan_inputs: int = 4, scan_input_axes: ints = [1, 1, 1, 1],
                            scan_output_axes: ints = [1], body: graph = token
        (float[batch, heads, key_size, value_size] before, float[batch, heads, value_size] v,
         float[batch, heads, key_size] q, float[batch, heads, key_size] k, float[batch, heads] f)
        => (float[batch, heads, key_size, value_size] after, float[batch, heads, value_size] read)
        {
            matrix_axes = Constant <value_ints: ints = [2, 3]> ()
            row_axis = Constant <value_ints: ints = [2]> ()
            column_axis = Constant <value_ints: ints = [3]> ()
            f_matrix = Unsqueeze (f, matrix_axes)
            decayed = Mul (before, f_matrix)
            k_column = Unsqueeze (k, column_axis)
            v_row = Unsqueeze (v, row_axis)
            change = Mul (k_column, v_row)
            after = Add (decayed, change)
            q_column = Unsqueeze (q, column_axis)
            by_query = Mul (after, q_column)
            read = ReduceSum <keepdims: int = 0> (by_query, row_axis)
        }> (past, added, query_heads, key_by_head, factor)
}
"""


def selective_scan_function() -> ir.Function:
    return ir.serde.deserialize_function(onnx.parser.parse_function(_BODY))
