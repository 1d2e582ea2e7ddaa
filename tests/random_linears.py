"""Linears of any codes, and what rounding changes: all that tests of kernels need on a machine that builds nothing."""

from __future__ import annotations

import numpy as np

from tapeout.quantized import QuantizedWeight
from tapeout.schemes import Scheme

MXFP4 = Scheme(bits=4, format="mxfp4")
ROUNDING = 2.0**-24  # of one float32 operation, relative


def random_linear(rows: int, columns: int, fmt: Scheme, *, half: bool = True, seed: int = 0) -> QuantizedWeight:
    """Any codes, scales of either sign and any zero points. Not ``half``: scales that float16 cannot hold.

    Scales of 4-bit floats are powers of two.
    """
    rng = np.random.default_rng(seed)
    groups = columns // fmt.group_size
    scales = (rng.uniform(0.01, 0.03, (rows, groups)) * rng.choice([-1, 1], (rows, groups))).astype(np.float32)
    if fmt == MXFP4:
        scales = np.ldexp(np.float32(1), rng.integers(-9, -4, (rows, groups)))
    elif half:
        scales = scales.astype(np.float16).astype(np.float32)
    zero_points = None if fmt.symmetric else rng.integers(0, 1 << fmt.bits, (rows, groups)).astype(np.uint8)
    codes = rng.integers(0, 1 << fmt.bits, (rows, columns)).astype(np.uint8)
    return QuantizedWeight(codes, scales, zero_points, fmt)
