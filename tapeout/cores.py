"""The processor's cores: how many there are to compute on, and which of them a thread keeps to."""

from __future__ import annotations

import os

import psutil


def physical_cores() -> int:
    """Physical cores this process may run on: hyper-threads share the units that matmuls need."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def usable() -> frozenset[int]:
    """Cores that the calling thread may run on; empty where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def keep_to(cores: frozenset[int]) -> None:
    """The calling thread, and threads and processes that it starts from now on, run on ``cores``; anywhere if empty."""
    if cores:
        os.sched_setaffinity(0, cores)
