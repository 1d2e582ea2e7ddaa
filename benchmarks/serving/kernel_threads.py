"""When a thread of the kernel had a core for long, while something else was measured.

It is hardly ever interrupted, so a program that needs that core waits until it is done.
"""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

PROC = Path("/proc")
KTHREADD = 2  # all threads of the Linux kernel are its children
WATCHED = 5  # those that have had most time since the machine started: reading all would cost too much
READ_SECONDS = 0.02

_Reading = tuple[float, tuple[float, ...]]  # when, in seconds since the epoch; seconds that each thread has had


class KernelThreads:
    """Watches while it is entered. Where the system does not show them there is nothing to see."""

    def __init__(self) -> None:
        self._files = _busiest()
        self._readings: list[_Reading] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def held(self, least_ms: float) -> list[tuple[float, float]]:
        """When one of them had a core for so long between two readings: begin and end, seconds since the epoch."""
        return [
            (before[0], after[0])
            for before, after in pairwise(self._readings)
            if max((1000 * (b - a) for a, b in zip(before[1], after[1], strict=True)), default=0.0) >= least_ms
        ]

    def _watch(self) -> None:
        while True:
            self._readings.append((time.time(), tuple(map(_seconds, self._files))))
            if self._ended.wait(READ_SECONDS):
                return


def _busiest() -> list[Path]:
    """None in a container that does not see the threads of the kernel: process 2 is another program there."""
    try:
        if (PROC / str(KTHREADD) / "comm").read_text().strip() != "kthreadd":
            return []
    except OSError:
        return []
    files = [stat.with_name("schedstat") for stat in PROC.glob("[0-9]*/stat") if _parent(stat) == KTHREADD]
    return sorted(files, key=_seconds, reverse=True)[:WATCHED]


def _parent(stat: Path) -> int:
    """Of a process; 0 if it has ended. The name, in parentheses, may hold anything."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _seconds(schedstat: Path) -> float:
    """That a thread has had a core; 0 if it has ended."""
    try:
        return int(schedstat.read_text().split()[0]) / 1e9
    except OSError:
        return 0.0
