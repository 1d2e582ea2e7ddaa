"""Which cores the server and the engine run on where the engine has a thread for each core.

A message wakes its receiver on the core of its sender. So after each step the server took the core of the engine's main
thread, and the engine's other threads waited for that one. Instead the main thread leaves the last core to the server.
While the server runs there, the main thread computes what the thread of that core would have.

Where other processes have work, too, a thread that keeps to one core of two waits there while another process runs. So
the main thread runs anywhere for a while when it was interrupted often.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

from tapeout.cores import keep_to, usable

WINDOW_SECONDS = 0.1  # over which interruptions are counted
OFTEN = 40.0  # interruptions in a second: a process that computes without a pause makes a hundred
FREE_SECONDS = 10.0  # until the main thread leaves the core to the server again


def interruptions() -> int:
    """How often other threads took the core of the calling one, so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class SharedCores:
    """The division of cores. Made by the main thread of an engine, once its ``threads`` run, and called by it alone.

    ``servers``: the cores of the server; empty for any.
    """

    def __init__(self, threads: int, interrupted: Callable[[], int] = interruptions) -> None:
        self._cores, self._interrupted = usable(), interrupted
        shares = 1 < len(self._cores) <= threads
        self.servers = frozenset({max(self._cores)}) if shares else frozenset[int]()
        self._begin, self._before = 0.0, 0  # of the window
        self._free_until: float | None = None
        self._keep()

    def _keep(self) -> None:
        if self.servers:
            keep_to(self._cores - self.servers)
        self._free_until = None

    def stepped(self, now: float) -> None:
        """After each step; ``now`` is :func:`time.monotonic`."""
        if not self.servers or (seconds := now - self._begin) < WINDOW_SECONDS:
            return
        count = self._interrupted()
        often = count - self._before > OFTEN * seconds
        self._begin, self._before = now, count
        if self._free_until is None:
            if often:
                keep_to(self._cores)
                self._free_until = now + FREE_SECONDS
        elif now >= self._free_until:
            self._keep()
