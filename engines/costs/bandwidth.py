"""The read bandwidth of the memory, which every share of the roofline is relative to: ``source/bandwidth.c``."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np

from engines.costs.timing import last_level_cache_bytes
from engines.kernels.cpu import compiler, level
from tapeout.errors import EvidenceError

BYTES = 256 << 20  # several times the last-level cache of one socket
TRIALS = 5  # of each prefetch distance, unless told otherwise


def read_bandwidth(threads: int, trials: int = TRIALS) -> float:
    """Bytes per second that ``threads`` cores read from memory together: the best of several reads of a large array.

    Each of five distances of the prefetch is tried ``trials`` times. Where native kernels cannot run, numpy reads.
    :class:`tapeout.errors.BuildError` without the kernels' compiler.
    """
    here = level()
    if here is None:
        return _numpy_bandwidth(threads, trials)
    probe = ctypes.CDLL(str(compiler.library(here))).tapeout_read_bandwidth
    probe.argtypes, probe.restype = [ctypes.c_int64] * 3, ctypes.c_double
    found = probe(BYTES, threads, trials)
    if not found:
        raise EvidenceError(
            "the read bandwidth cannot be measured", expected=f"{BYTES >> 20} MiB of memory and {threads} threads"
        )
    return found


def roofline_share(step_bytes: int, step_seconds: float, bandwidth: float) -> float:
    """The bandwidth of a decode step at batch 1, as a share of the memory's ``bandwidth`` in bytes per second.

    :class:`EvidenceError` for a share above one, unless the last-level cache holds the weights: no kernel reads memory
    faster than the probe, so one of the two figures is wrong.

    >>> roofline_share(10**9, 0.04, 50e9)
    0.5
    """
    share = step_bytes / step_seconds / bandwidth
    if share > 1 and step_bytes > last_level_cache_bytes():
        raise EvidenceError(
            f"a step reads {step_bytes / step_seconds / 1e9:.1f} GB/s of weights, {share:.0%} of the bandwidth",
            expected=f"at most the {bandwidth / 1e9:.1f} GB/s that the probe read",
            remedy="measure again while nothing else runs; if it stays, the probe of engines/kernels/cpu is too slow",
        )
    return share


def _numpy_bandwidth(threads: int, trials: int) -> float:
    arrays = [np.ones(BYTES // 4 // threads, np.float32) for _ in range(threads)]
    best = 0.0
    for _ in range(5 * trials):
        workers = [threading.Thread(target=np.max, args=(array,)) for array in arrays]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, sum(array.nbytes for array in arrays) / (time.perf_counter() - start))
    return best
