"""Percentiles of the last minutes, in constant memory and at the cost of one addition per value."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

GROWTH = 2 ** (1 / 8)  # from one bucket to the next: a percentile is at most 5 % off
SMALLEST = 1e-4  # seconds
BUCKETS = 200  # up to 1e-4 * 2**(200 / 8) seconds: nothing is above
SLICE_SECONDS = 5.0
_SCALE = 1 / math.log(GROWTH)
_OFFSET = math.log(SMALLEST)


class Window:
    """Durations in seconds, in buckets that grow by a constant factor, one row of buckets for each five seconds.

    >>> window = Window(seconds=60)
    >>> for milliseconds in range(1, 101):
    ...     window.add(milliseconds / 1000, now=7.0)
    >>> [round(value, 2) for value in window.percentiles((50, 99), now=8.0)]
    [0.05, 0.1]
    >>> window.percentiles((50,), now=100.0)
    [None]
    """

    def __init__(self, seconds: float) -> None:
        self._slices: deque[tuple[int, list[int]]] = deque(maxlen=math.ceil(seconds / SLICE_SECONDS))

    def add(self, value: float, now: float) -> None:
        """``now``: of one clock that never goes back, as in :meth:`percentiles`."""
        current = int(now / SLICE_SECONDS)
        if not self._slices or self._slices[-1][0] != current:
            self._slices.append((current, [0] * BUCKETS))
        bucket = int((math.log(value) - _OFFSET) * _SCALE) if value > SMALLEST else 0
        self._slices[-1][1][min(bucket, BUCKETS - 1)] += 1

    def percentiles(self, percents: Sequence[float], now: float) -> list[float | None]:
        """The geometric middle of the bucket that holds each percentile; None without values."""
        oldest = int(now / SLICE_SECONDS) - (self._slices.maxlen or 0)
        counts = [sum(column) for column in zip(*(row for at, row in self._slices if at > oldest), strict=True)]
        total = sum(counts)
        return [self._percentile(counts, total * percent / 100) if total else None for percent in percents]

    @staticmethod
    def _percentile(counts: list[int], rank: float) -> float:
        seen = 0
        for bucket, count in enumerate(counts):
            seen += count
            if count and seen >= rank:
                return SMALLEST * GROWTH ** (bucket + 0.5)
        raise AssertionError("a rank above the number of values")
