"""Weights as blocks of GGUF: 32 input channels with one float16 scale.

Our weights are ``scale * level``, where a level is a code less its zero point. Three types are that too: Q4_0 (levels
-8 to 7), Q5_0 (-16 to 15) and Q8_0 (-128 to 127). Groups larger than 32 repeat their scale in each of their blocks. Not
used: Q4_1, whose offset ``scale * zero point`` is rounded to float16, and the K types, whose scales are products of two
rounded numbers. Layouts: ggml-common.h of llama.cpp (``block_q4_0``, ``block_q5_0``, ``block_q8_0``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.quantized import QuantizedWeight, format_of

BLOCK = 32  # input channels
LEVELS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}  # levels lie in [-n, n)
BLOCK_BYTES = {"Q4_0": 18, "Q5_0": 22, "Q8_0": 34}


def encode(linear: QuantizedWeight, kind: str) -> NDArray[np.uint8]:
    """The bytes ``[N, K / 32 * block bytes]`` of a linear ``[N, K]`` in groups of a multiple of 32 with float16 scales.

    >>> from tapeout.quantized import round_to_nearest
    >>> from tapeout.schemes import Scheme
    >>> weight = np.arange(-8, 24, dtype=np.float32)[None] / 8
    >>> encode(round_to_nearest(weight, Scheme(bits=8, symmetric=True)), "Q8_0").shape
    (1, 34)
    """
    rows, columns = linear.codes.shape
    blocks, repeat = columns // BLOCK, linear.group_size // BLOCK
    zeros = (
        format_of(linear.scheme).midpoint
        if linear.zero_points is None
        else _spread(linear.zero_points, repeat)[:, :, None]
    )
    levels = linear.codes.reshape(rows, blocks, BLOCK).astype(np.int16) - np.asarray(zeros, np.int16)
    if levels.min() < -LEVELS[kind] or levels.max() >= LEVELS[kind]:
        raise ValueError(f"levels {levels.min()} to {levels.max()} do not fit {kind}")
    scales = _spread(linear.scales, repeat).astype("<f2")[:, :, None].view(np.uint8)
    if kind == "Q8_0":
        parts = [scales, levels.astype(np.int8).view(np.uint8)]
    else:
        codes = (levels + LEVELS[kind]).astype(np.uint8)
        parts = [
            scales,
            *([np.packbits(codes >> 4, axis=2, bitorder="little")] if kind == "Q5_0" else []),
            _halves(codes),
        ]
    return np.concatenate(parts, axis=2).reshape(rows, -1)


def _spread(parts: NDArray[Any], repeat: int) -> NDArray[Any]:
    return np.repeat(parts, repeat, axis=1)


def _halves(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The low 4 bits: channel i of a block shares a byte with channel i + 16."""
    low, high = codes[:, :, :16] & np.uint8(15), codes[:, :, 16:] & np.uint8(15)
    return low | (high << np.uint8(4))
