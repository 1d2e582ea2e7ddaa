"""The default number of threads of an engine."""

from __future__ import annotations

import os

import psutil


def physical_cores() -> int:
    """Physical cores this process may run on: hyper-threads share the units that matmuls need."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))
