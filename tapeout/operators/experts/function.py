"""``tapeout::Experts``: what the experts of a layer are exported as, defined by a standard-opset function body.

Inputs: x ``[T, H]``, the tokens of all sequences; index ``[T, k]`` (int64) of the experts of each token, and their
weight ``[T, k]``; up ``[E, 2I, H]`` of gates and ups, or ``[E, I, H]`` of experts without a gate; down ``[E, H, I]``;
up_bias ``[E, 2I]`` or ``[E, I]`` and down_bias ``[E, H]``, or ``[1, 1]`` zeros for experts without biases. Output
``[T, H]``: the sum of ``weight * (down · inner(up · x + up_bias) + down_bias)`` over the experts of a token. ``inner``
and the attributes are those of :class:`tapeout.operators.experts.ExpertGate`; without a gate, up is 1 and gates are
all.

The body goes through the experts and computes the tokens of each, so it holds one expert's weights and their tokens.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

_BODY = """
<opset_import: ["" : 23], domain: "tapeout">
Experts <activation, alpha, limit, offset, interleaved> (x, index, weight, up, down, up_bias, down_bias) => (output)
{
    zero = Constant <value_float: float = 0.0> ()
    one = Constant <value_float: float = 1.0> ()
    first = Constant <value_ints: ints = [0]> ()
    single = Constant <value_ints: ints = [1]> ()
    last = Constant <value_ints: ints = [-1]> ()
    largest = Constant <value_float: float = 3.0e38> ()
    limit_float = Constant <value_float: float = @limit> ()
    offset_float = Constant <value_float: float = @offset> ()
    alpha_float = Constant <value_float: float = @alpha> ()
    unlimited = LessOrEqual (limit_float, zero)
    bound = Where (unlimited, largest, limit_float)
    lower_bound = Neg (bound)
    named = Constant <value_string: string = @activation> ()
    named_gelu = Constant <value_string: string = "gelu"> ()
    named_gelu_tanh = Constant <value_string: string = "gelu_tanh"> ()
    named_relu2 = Constant <value_string: string = "relu2"> ()
    is_gelu = Equal (named, named_gelu)
    is_gelu_tanh = Equal (named, named_gelu_tanh)
    is_relu2 = Equal (named, named_relu2)
    interleaved_int = Constant <value_int: int = @interleaved> ()
    beside = Unsqueeze (interleaved_int, first)
    step = Add (single, beside)
    inner = Shape <start: int = 2, end: int = 3> (down)
    inner_beside = Mul (inner, beside)
    gate_end = Add (inner, inner_beside)
    skipped = Sub (inner, inner_beside)
    up_start = Add (skipped, beside)
    up_end = Add (inner, inner)
    up_biases = Shape <start: int = 0, end: int = 1> (up_bias)
    last_up_bias = Sub (up_biases, single)
    down_biases = Shape <start: int = 0, end: int = 1> (down_bias)
    last_down_bias = Sub (down_biases, single)
    experts_1d = Shape <start: int = 0, end: int = 1> (up)
    experts = Squeeze (experts_1d, first)
    shape = Shape (x)
    nothing = ConstantOfShape (shape)
    output = Loop (experts, , nothing) <body: graph = one_expert (int64 number, bool going, float[T, H] sum)
        => (bool go_on, float[T, H] next_sum)
    {
        go_on = Identity (going)
        up_weight = Gather <axis: int = 0> (up, number)
        down_weight = Gather <axis: int = 0> (down, number)
        up_bias_number = Min (number, last_up_bias)
        up_bias_row = Gather <axis: int = 0> (up_bias, up_bias_number)
        down_bias_number = Min (number, last_down_bias)
        down_bias_row = Gather <axis: int = 0> (down_bias, down_bias_number)
        chosen = Equal (index, number)
        weight_here = Where (chosen, weight, zero)
        weight_of_token = ReduceSum <keepdims: int = 1> (weight_here, single)
        times = Cast <to: int = 7> (chosen)
        times_of_token = ReduceSum <keepdims: int = 0> (times, single)
        found = NonZero (times_of_token)
        tokens_2d = Transpose <perm: ints = [1, 0]> (found)
        tokens = Squeeze (found, first)
        rows = Gather <axis: int = 0> (x, tokens)
        row_weights = Gather <axis: int = 0> (weight_of_token, tokens)
        projected = Gemm <transB: int = 1> (rows, up_weight, up_bias_row)
        gate_all = Slice (projected, first, gate_end, last, step)
        gate = Min (gate_all, bound)
        gate_shape = Shape (gate)
        ones = Expand (one, gate_shape)
        with_ones = Concat <axis: int = -1> (projected, ones)
        up_all = Slice (with_ones, up_start, up_end, last, step)
        up_clipped = Clip (up_all, lower_bound, bound)
        up_part = Add (up_clipped, offset_float)
        sharpened = Mul (gate, alpha_float)
        sigmoid = Sigmoid (sharpened)
        silu = Mul (gate, sigmoid)
        gelu = Gelu (gate)
        gelu_tanh = Gelu <approximate: string = "tanh"> (gate)
        relu = Relu (gate)
        relu2 = Mul (relu, relu)
        if_relu2 = Where (is_relu2, relu2, silu)
        if_gelu = Where (is_gelu, gelu, if_relu2)
        active = Where (is_gelu_tanh, gelu_tanh, if_gelu)
        between = Mul (active, up_part)
        answer = Gemm <transB: int = 1> (between, down_weight, down_bias_row)
        weighted = Mul (answer, row_weights)
        next_sum = ScatterND <reduction: string = "add"> (sum, tokens_2d, weighted)
    }>
}
"""


def experts_function() -> ir.Function:
    return ir.serde.deserialize_function(onnx.parser.parse_function(_BODY))
