"""How the kernels for processors read a weight (``source/codes.h``).

tile   16 output channels, the lanes of a vector; N is padded to whole pairs of tiles
step   4 input channels: a step of a tile is 64 codes, lane by lane
8 bits   64 bytes a step
4 bits   64 bytes a pair of steps, the first in the low nibbles
6 bits   192 bytes four steps: 64 with the low four bits of the first two, 64 of the others, 64 with all high bits
5 bits   320 bytes eight steps: 64 with the low four bits of each two, 64 with all high bits. Groups of 16 channels
         have only four steps and are stored in 6 bits

Scales and zero points follow tile by tile, ``[tiles, blocks, 16]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE, STEP = 16, 4  # output channels, input channels
PIECE_TILES = 64  # packed at a time


def joined_steps(bits: int) -> int:
    """Steps whose codes lie together. A group has whole ones; 5-bit codes of smaller groups are stored in 6 bits."""
    return 8 if bits == 5 else 4


def packed(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """``[N, K]`` codes as the kernels read them, ``[tiles, 16 · K · bits / 8]``. K is a multiple of 16.

    >>> packed(np.arange(32, dtype=np.uint8).reshape(2, 16) % 16, 4).shape
    (2, 128)
    """
    outputs, columns = codes.shape
    written = np.empty((tiles_of(outputs), TILE * columns * bits // 8), np.uint8)
    for first in range(0, len(written), PIECE_TILES):
        piece = written[first : first + PIECE_TILES]
        piece[:] = _packed(codes[first * TILE : (first + len(piece)) * TILE], len(piece), bits)
    return written


def _packed(codes: NDArray[np.uint8], tiles: int, bits: int) -> NDArray[np.uint8]:
    """Some tiles of :func:`packed`; rows that are not there have the code of zero."""
    outputs, columns = codes.shape
    padded = np.full((tiles * TILE, columns), 1 << (bits - 1), np.uint8)
    padded[:outputs] = codes
    steps = padded.reshape(tiles, TILE, columns // STEP, STEP).transpose(0, 2, 1, 3).reshape(tiles, -1, TILE * STEP)
    if bits == 8:
        return np.ascontiguousarray(steps).reshape(tiles, -1)
    if bits == 4:
        return _joined(steps[:, 0::2], steps[:, 1::2], 4).reshape(tiles, -1)
    together, width = joined_steps(bits), bits - 4  # width: high bits of a code
    steps = steps.reshape(tiles, columns // (together * STEP), together, TILE * STEP)
    low, high = (steps & np.uint8(15)).astype(np.uint8), (steps >> np.uint8(4)).astype(np.uint8)
    top = np.bitwise_or.reduce(high << (width * np.arange(together, dtype=np.uint8))[:, None], axis=2, keepdims=True)
    return np.concatenate([_joined(low[:, :, 0::2], low[:, :, 1::2], 4), top], axis=2).reshape(tiles, -1)


def _joined(low: NDArray[np.uint8], high: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Bytes of both, ``high`` above the lowest ``bits``."""
    return np.bitwise_or(low, np.left_shift(high, np.uint8(bits)), dtype=np.uint8)


def tiles_of(outputs: int) -> int:
    return 2 * -(-outputs // (2 * TILE))


def by_tile(values: NDArray[Any]) -> NDArray[Any]:
    """``[N, blocks]`` as ``[tiles, blocks, 16]``; lanes beyond N have the number one."""
    outputs, blocks = values.shape
    tiles = tiles_of(outputs)
    padded = np.ones((tiles * TILE, blocks), values.dtype)
    padded[:outputs] = values
    return np.ascontiguousarray(padded.reshape(tiles, TILE, blocks).transpose(0, 2, 1))
