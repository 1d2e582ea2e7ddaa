"""Which cores the server and the engine run on where the engine has a thread for each core.

A message wakes its receiver on the core of its sender. So after each step the server took the core of the engine's main
thread, and the engine's other threads waited for that one. Instead the main thread leaves the last core to the server.
While the server runs there, the main thread computes what the thread of that core would have.
"""

from __future__ import annotations

import os


def usable() -> frozenset[int]:
    """Cores that the calling thread may run on; empty where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def keep_to(cores: frozenset[int]) -> None:
    """The calling thread, and threads and processes that it starts from now on, run on ``cores``; anywhere if empty."""
    if cores:
        os.sched_setaffinity(0, cores)


def share_cores(threads: int) -> frozenset[int]:
    """The cores of the server; empty for any. Called by the main thread of an engine, once its ``threads`` run."""
    cores = usable()
    if not 1 < len(cores) <= threads:
        return frozenset()
    servers = frozenset({max(cores)})
    keep_to(cores - servers)
    return servers
