"""E4M3, the 8-bit float of FP8: a sign, four bits of exponent with bias 7, three of mantissa, no infinities.

P. Micikevicius et al., FP8 Formats for Deep Learning (arXiv:2209.05433), as ONNX and torch call ``float8_e4m3fn``. The
largest value is 448, the smallest above zero 2^-9. Codes 0x7f and 0xff are NaN.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tapeout.number_format import AnyArray, CodeArray, FloatArray

LARGEST = np.float32(448)


def encoded(values: FloatArray) -> CodeArray:
    """The nearest codes, ties to even; what is beyond the largest value saturates, NaN stays NaN.

    >>> [hex(code) for code in encoded(np.array([1, -1.0625, 448, 1e9, 2**-9, 0], np.float32))]
    ['0x38', '0xb8', '0x7e', '0x7e', '0x1', '0x0']
    """
    return np.clip(values, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def decoded(codes: AnyArray) -> FloatArray:
    """
    >>> decoded(np.array([0x38, 0xb8, 0x7e, 0x01], np.uint8)).tolist()
    [1.0, -1.0, 448.0, 0.001953125]
    """
    return _VALUES[codes.astype(np.uint8)]


_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
