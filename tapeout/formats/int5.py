"""5-bit codes, eight in five bytes: codes lie across the bounds of bytes and words."""

from __future__ import annotations

import numpy as np

from tapeout.integers import Integers
from tapeout.number_format import CodeArray


def pack(codes: CodeArray) -> CodeArray:
    first, second, third, fourth, fifth, sixth, seventh, eighth = (codes[:, at::8] for at in range(8))
    octets = [
        first | (second << 5),
        (second >> 3) | (third << 2) | (fourth << 7),
        (fourth >> 1) | (fifth << 4),
        (fifth >> 4) | (sixth << 1) | (seventh << 6),
        (seventh >> 2) | (eighth << 3),
    ]
    return np.stack(octets, axis=2, dtype=np.uint8, casting="no").reshape(len(codes), -1)


def unpack(octets: CodeArray) -> CodeArray:
    fives = octets.reshape(len(octets), -1, 5)
    first, second, third, fourth, fifth = (fives[:, :, at] for at in range(5))
    unpacked = np.empty((*fives.shape[:2], 8), np.uint8)
    unpacked[:, :, 0] = first & 31
    unpacked[:, :, 1] = (first >> 5) | (second & 3) << 3
    unpacked[:, :, 2] = (second >> 2) & 31
    unpacked[:, :, 3] = (second >> 7) | (third & 15) << 1
    unpacked[:, :, 4] = (third >> 4) | (fourth & 1) << 4
    unpacked[:, :, 5] = (fourth >> 1) & 31
    unpacked[:, :, 6] = (fourth >> 6) | (fifth & 7) << 2
    unpacked[:, :, 7] = fifth >> 3
    return unpacked.reshape(len(octets), -1)


FORMAT = Integers("int5", 5, pack, unpack)
