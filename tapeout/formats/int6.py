"""6-bit codes, four in three bytes: codes lie across the bounds of bytes and words."""

from __future__ import annotations

import numpy as np

from tapeout.integers import Integers
from tapeout.number_format import CodeArray


def pack(codes: CodeArray) -> CodeArray:
    first, second, third, fourth = (codes[:, at::4] for at in range(4))
    octets = [first | (second << 6), (second >> 2) | (third << 4), (third >> 4) | (fourth << 2)]
    return np.stack(octets, axis=2, dtype=np.uint8, casting="no").reshape(len(codes), -1)


def unpack(octets: CodeArray) -> CodeArray:
    threes = octets.reshape(len(octets), -1, 3)
    low, middle, high = (threes[:, :, at] for at in range(3))
    unpacked = np.empty((*threes.shape[:2], 4), np.uint8)
    unpacked[:, :, 0] = low & 63
    unpacked[:, :, 1] = (low >> 6) | (middle & 15) << 2
    unpacked[:, :, 2] = (middle >> 4) | (high & 3) << 4
    unpacked[:, :, 3] = high >> 2
    return unpacked.reshape(len(octets), -1)


FORMAT = Integers("int6", 6, pack, unpack)
