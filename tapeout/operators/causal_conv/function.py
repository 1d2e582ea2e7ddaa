"""``tapeout::CausalConv``: what a short convolution is exported as, defined by a standard-opset function body.

Inputs: x ``[B, S, C]``, weight ``[C, K]``, bias ``[C]`` or none, attention_mask ``[B, P+S]`` (int64, 0 hides a token),
past ``[B, K-1, C]``: the x of the K - 1 tokens before, zeros where there were none. Outputs: ``y [B, S, C]`` with
``y[s] = bias + sum over k of weight[k] * x[s - (K-1) + k]``, and the x of the last K - 1 tokens. A hidden token's x is
zero. Attribute ``channels``: C.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

_BODY = """
<opset_import: ["" : 23], domain: "tapeout">
CausalConv <channels> (x, weight, bias, attention_mask, past) => (output, present)
{
    axis1 = Constant <value_ints: ints = [1]> ()
    axis2 = Constant <value_ints: ints = [2]> ()
    last = Constant <value_ints: ints = [9223372036854775807]> ()
    zero = Constant <value_ints: ints = [0]> ()
    steps = Shape <start: int = 1, end: int = 2> (x)
    first = Sub (zero, steps)
    seen = Slice (attention_mask, first, last, axis1)
    seen_float = CastLike (seen, x)
    seen_channels = Unsqueeze (seen_float, axis2)
    visible = Mul (x, seen_channels)
    inputs = Concat <axis: int = 1> (past, visible)
    by_channel = Transpose <perm: ints = [0, 2, 1]> (inputs)
    kernel = Unsqueeze (weight, axis1)
    convolved = Conv <group: int = @channels> (by_channel, kernel, bias)
    output = Transpose <perm: ints = [0, 2, 1]> (convolved)
    kept = Shape <start: int = 1, end: int = 2> (past)
    tail = Sub (zero, kept)
    present = Slice (inputs, tail, last, axis1)
}
"""


def causal_conv_function() -> ir.Function:
    return ir.serde.deserialize_function(onnx.parser.parse_function(_BODY))
