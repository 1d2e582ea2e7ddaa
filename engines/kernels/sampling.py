"""What chooses tokens from logits is given and gives back: the server's numpy code, or a kernel of a target.

V  vocabulary size

A kernel computes what ``runtime/engine/draw.py`` does, to the bit: which of the two is used changes no response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.protocol import Filters, FloatArray

ONE_BITS = 30
ONE = 1 << ONE_BITS  # weight of the likeliest token
NOT_FINITE = "the logits hold NaN or infinity"
NONE_LEFT = "no token may be chosen: the constraint, the logit bias and the stop tokens exclude all"


class Adjustments:
    """The few tokens whose logits a request changes: the first ``count`` of arrays with room for more.

    A logit becomes ``penalize(logit + bias) + shift``, where ``penalize`` divides a positive number by ``factor`` and
    multiplies another. A bias of minus infinity excludes the token.
    """

    def __init__(self, room: int) -> None:
        self.count = 0
        self.tokens = np.zeros(room, np.int32)
        self.bias = np.zeros(room, np.float32)
        self.factor = np.ones(room, np.float32)
        self.shift = np.zeros(room, np.float32)
        arrays = (self.tokens, self.bias, self.factor, self.shift)
        self.addresses = tuple(array.ctypes.data for array in arrays)

    def add(self, token: int) -> int:
        """The place of another token, which nothing changes yet."""
        self.tokens[self.count] = token
        self.count += 1
        return self.count - 1

    def apply(self, logits: FloatArray) -> FloatArray:
        """Changed logits ``[V]``, in new memory."""
        changed, used = logits.copy(), slice(self.count)
        tokens, factor = self.tokens[used], self.factor[used]
        values = logits[tokens] + self.bias[used]
        changed[tokens] = np.where(values > 0, values / factor, values * factor) + self.shift[used]
        return changed


class SamplingRow(NamedTuple):
    """What one draw depends on.

    ``random``: 64 random bits. ``mask``: a bit for each token, set where it is allowed. ``top``: how many of the
    likeliest tokens are wanted; None if no log-probabilities are.
    """

    logits: FloatArray
    filters: Filters
    random: int = 0
    adjustments: Adjustments | None = None
    mask: NDArray[np.uint32] | None = None
    top: int | None = None


class Drawn(NamedTuple):
    """``token``: or why there is none. A log-probability is a logit less the ``normalizer``.

    ``likeliest``: the ``top`` tokens of the logits as they are, from the likeliest on.
    """

    token: int | str
    normalizer: float = math.nan
    likeliest: Sequence[int] = ()


class Sampler(Protocol):
    """Not for several threads at once."""

    def draw(self, rows: Sequence[SamplingRow]) -> list[Drawn]:
        """One token of each row, whose logits are float32 ``[V]`` and are not changed."""
        ...


def normalizer(max_logit: float, total: int) -> float:
    """Logarithm of the sum of exponentials of logits, from the sum of their weights."""
    return max_logit + math.log(total / ONE)
