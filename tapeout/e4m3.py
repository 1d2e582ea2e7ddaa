"""E4M3, the 8-bit float of FP8: a sign, four bits of exponent with bias 7, three of mantissa, no infinities.

P. Micikevicius et al., FP8 Formats for Deep Learning (arXiv:2209.05433), as ONNX and torch call ``float8_e4m3fn``. The
largest value is 448, the smallest above zero 2^-9. Codes 0x7f and 0xff are NaN. In numpy alone, since engines read it
on machines that have no ``ml_dtypes`` (``benchmarks/gpu/prepare.py``).
"""

from __future__ import annotations

import numpy as np

from tapeout.number_format import AnyArray, CodeArray, FloatArray

LARGEST = np.float32(448)
SMALLEST_NORMAL = np.float32(2.0**-6)
NAN, SIGN = 0x7F, 0x80
_EXPONENTS = (127 - 7) << 3  # what the bias of float32 is more, in steps of three bits of mantissa


def encoded(values: FloatArray) -> CodeArray:
    """The nearest codes, ties to even; what is beyond the largest value saturates, NaN stays NaN.

    >>> [hex(code) for code in encoded(np.array([1, -1.0625, 448, 1e9, 2**-9, 0], np.float32))]
    ['0x38', '0xb8', '0x7e', '0x7e', '0x1', '0x0']
    """
    magnitude = np.minimum(np.abs(values, dtype=np.float32), LARGEST)
    bits = magnitude.view(np.uint32)
    codes = np.minimum(((bits + np.uint32(0x7FFFF) + (bits >> 20 & 1)) >> 20) - np.uint32(_EXPONENTS), NAN)
    small = magnitude < SMALLEST_NORMAL
    codes[small] = np.rint(magnitude[small] * 512)
    return codes.astype(np.uint8) | np.signbit(values).astype(np.uint8) * np.uint8(SIGN)


def decoded(codes: AnyArray) -> FloatArray:
    """
    >>> decoded(np.array([0x38, 0xb8, 0x7e, 0x01], np.uint8)).tolist()
    [1.0, -1.0, 448.0, 0.001953125]
    """
    return _VALUES[codes.astype(np.uint8)]


def _values() -> FloatArray:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.ldexp(np.where(exponent, 8 + mantissa, mantissa).astype(np.float32), np.maximum(exponent, 1) - 10)
    magnitude[codes & 127 == NAN] = np.nan
    return np.where(codes & SIGN, -magnitude, magnitude).astype(np.float32)


_VALUES = _values()
