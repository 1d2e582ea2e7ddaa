"""``tapeout::Attention``: the one operator attention is exported as, defined by a standard-opset function body.

Inputs: query ``[B, H, S, D]``, key and value ``[B, Hkv, S, D]`` (rotary already applied), attention_mask ``[B, P+S]``
(int64, 0 hides a position), past key and value ``[B, Hkv, P, D]``. Outputs: ``[B, H, S, D]`` and the grown cache.
Attributes: ``scale``; ``softcap`` (0: none); ``window`` (0: none; else a query sees itself and window-1 before it).
Causality is by index: query s has position P+s.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

_BODY = """
<opset_import: ["" : 23], domain: "tapeout">
Attention <scale, softcap, window> (query, key, value, attention_mask, past_key, past_value)
    => (output, present_key, present_value)
{
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
    output, present_key, present_value = Attention <scale: float = @scale, softcap: float = @softcap>
        (query, key, value, mask, past_key, past_value)
}
"""


def attention_function() -> ir.Function:
    """The function definition. A padded query still sees itself, so no row of the softmax is empty."""
    return ir.serde.deserialize_function(onnx.parser.parse_function(_BODY))
