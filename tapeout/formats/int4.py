"""4-bit codes, two a byte."""

from __future__ import annotations

import numpy as np

from tapeout.integers import Integers
from tapeout.number_format import CodeArray


def pack(codes: CodeArray) -> CodeArray:
    """
    >>> pack(np.array([[1, 2, 3, 4]], np.uint8)).tolist() == [[0x21, 0x43]]
    True
    """
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))


def unpack(octets: CodeArray) -> CodeArray:
    codes = np.empty((octets.shape[0], octets.shape[1] * 2), np.uint8)
    codes[:, 0::2] = octets & np.uint8(0x0F)
    codes[:, 1::2] = octets >> np.uint8(4)
    return codes


FORMAT = Integers("int4", 4, pack, unpack)
