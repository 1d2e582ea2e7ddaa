"""Floats of 16 bits in numpy, which has no bfloat16 of its own: importing this module makes the type known to it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


def as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Floats of any type in float32; no copy where they are.

    A bfloat16 is the upper half of a float32, which is several times faster to say with integers than by a cast.

    >>> as_float32(np.array([1.5, -2.0], ml_dtypes.bfloat16)).tolist()
    [1.5, -2.0]
    """
    if array.dtype == ml_dtypes.bfloat16:
        return np.left_shift(array.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    return array.astype(np.float32, copy=False)
