"""``tapeout::DecodeMxfp4``: a parameter that a portable graph holds as codes in MXFP4, in standard operators.

Inputs: blocks ``[E, N, K/32, 16]``, two codes a byte, the first in the low bits; scales ``[E, N, K/32]``; bytes both.
Output: float32 ``[E, K, N]``, exactly. Values are looked up in the tables of the format.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from tapeout.formats.mxfp4 import VALUES, decode_scales

NAME = "DecodeMxfp4"
_TABLES = {"values": VALUES, "powers": decode_scales(np.arange(256, dtype=np.uint8))}
_BODY = """
<opset_import: ["" : 23], domain: "tapeout">
DecodeMxfp4 (blocks, scales) => (weight)
{
    values = Constant <value_float: float = 0.0> ()
    powers = Constant <value_float: float = 0.0> ()
    last = Constant <value_ints: ints = [-1]> ()
    low_bits = Constant <value_int: int = 15> ()
    low_byte = Cast <to: int = 2> (low_bits)
    four = Constant <value_int: int = 4> ()
    four_byte = Cast <to: int = 2> (four)
    first = BitwiseAnd (blocks, low_byte)
    second = BitShift <direction: string = "RIGHT"> (blocks, four_byte)
    first_beside = Unsqueeze (first, last)
    second_beside = Unsqueeze (second, last)
    codes = Concat <axis: int = -1> (first_beside, second_beside)
    code_index = Cast <to: int = 6> (codes)
    elements = Gather (values, code_index)
    by_block = Constant <value_ints: ints = [0, 0, 0, -1]> ()
    blocked = Reshape (elements, by_block)
    scale_index = Cast <to: int = 6> (scales)
    scale = Gather (powers, scale_index)
    scale_beside = Unsqueeze (scale, last)
    scaled = Mul (blocked, scale_beside)
    by_row = Constant <value_ints: ints = [0, 0, -1]> ()
    rows = Reshape (scaled, by_row)
    weight = Transpose <perm: ints = [0, 2, 1]> (rows)
}
"""


def decode_function() -> ir.Function:
    function = ir.serde.deserialize_function(onnx.parser.parse_function(_BODY))
    for node in function:
        table = _TABLES.get(node.outputs[0].name or "")
        if table is not None:
            node.attributes.clear()
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(table))
    return function
