"""How kernels for GPUs read a weight ``[N, K]`` (``source/weights.cuh``).

tile   16 output channels; N is padded to whole pairs of tiles
chunk  64 input channels; K is padded to whole chunks
lane   4 g + t of a warp: rows g and g + 8 of a tile
step   4 channels of a chunk for each t, from 32 (step / 2) + 8 t + 4 (step % 2) on; a chunk has four
code   of a step: number h of pair p is channel 2 (p / 2) + h of row g + 8 (p % 2)

A chunk of a tile is 128 bytes for each bit: the low four bits of all codes, 16 bytes a lane, then the others. Of a
weight in float16 it is a lane's eight values of a step, 16 bytes, step after step. Scales
and zero points follow tile by tile, those of rows g and g + 8 together, ``[tiles, groups, 8, 2]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE, CHUNK = 16, 64  # output channels, input channels
PIECE_TILES = 64  # packed at a time


def tiles_of(outputs: int) -> int:
    return 2 * -(-outputs // (2 * TILE))


def chunks_of(columns: int) -> int:
    return -(-columns // CHUNK)


def packed(codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """``[N, K]`` codes as the kernels read them, ``[tiles, chunks · 128 · bits]``. 16 bits: values in float16.

    >>> packed(np.arange(64, dtype=np.uint8).reshape(1, 64) % 16, 4).shape
    (2, 512)
    """
    outputs, columns = codes.shape
    written = np.empty((tiles_of(outputs), chunks_of(columns) * 128 * bits), np.uint8)
    for first in range(0, len(written), PIECE_TILES):
        piece = written[first : first + PIECE_TILES]
        piece[:] = _packed(codes[first * TILE : (first + len(piece)) * TILE], len(piece), bits)
    return written


def _packed(codes: NDArray[Any], tiles: int, bits: int) -> NDArray[np.uint8]:
    """Some tiles of :func:`packed`; what is not there has the code of zero."""
    outputs, columns = codes.shape
    chunks = chunks_of(columns)
    padded = np.full((tiles * TILE, chunks * CHUNK), 0 if bits == 16 else 1 << (bits - 1), codes.dtype)
    padded[:outputs, :columns] = codes
    # rows 8 r + g; channels 32 i + 8 t + 4 j + 2 q + h of a chunk: step 2 i + j, pair 2 q + r
    split = padded.reshape(tiles, 2, 8, chunks, 2, 4, 2, 2, 2)  # tile, r, g, chunk, i, t, j, q, h
    if bits == 16:
        steps = split.transpose(0, 3, 4, 6, 2, 5, 7, 1, 8)  # .., step, lane, pair, h
        return np.ascontiguousarray(steps, "<f2").view(np.uint8).reshape(tiles, -1)
    lanes = split.transpose(0, 3, 2, 5, 4, 6, 7, 1, 8).reshape(tiles, chunks, 32, 4, 4, 2)  # .., lane, step, pair, h
    low = _words(lanes & np.uint8(15), 4 * np.arange(4)[:, None] + 16 * np.arange(2), axes=2)
    planes = [low.reshape(tiles, chunks, -1)]
    high = lanes >> np.uint8(4)
    if bits == 8:
        planes.append(_words(high, 4 * np.arange(4)[:, None] + 16 * np.arange(2), axes=2).reshape(tiles, chunks, -1))
    elif bits == 6:
        steps = high.reshape(tiles, chunks, 32, 2, 2, 4, 2)
        places = 8 * np.arange(2)[:, None, None] + 2 * np.arange(4)[:, None] + 16 * np.arange(2)
        planes.append(_words(steps, places, axes=3).reshape(tiles, chunks, -1))
    elif bits == 5:
        places = 4 * np.arange(4)[:, None, None] + np.arange(4)[:, None] + 16 * np.arange(2)
        planes.append(_words(high, places, axes=3).reshape(tiles, chunks, -1))
    return np.concatenate(planes, axis=2).reshape(tiles, -1)


def _words(parts: NDArray[np.integer[Any]], places: NDArray[Any], axes: int) -> NDArray[np.uint8]:
    """Little-endian words of 32 bits as bytes: each part of the last ``axes`` at its place."""
    words = np.bitwise_or.reduce(
        (parts.astype(np.uint32) << places.astype(np.uint32)).reshape(*parts.shape[:-axes], -1), axis=-1
    )
    return np.ascontiguousarray(words, "<u4").view(np.uint8)


def by_row_pair(values: NDArray[Any]) -> NDArray[Any]:
    """``[N, groups]`` as ``[tiles, groups, 16]``, rows 0, 8, 1, 9, ... of a tile; rows beyond N have the number one."""
    outputs, groups = values.shape
    tiles = tiles_of(outputs)
    padded = np.ones((tiles * TILE, groups), values.dtype)
    padded[:outputs] = values
    return np.ascontiguousarray(padded.reshape(tiles, 2, 8, groups).transpose(0, 3, 2, 1)).reshape(tiles, groups, TILE)
