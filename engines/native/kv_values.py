"""How many keys and values an engine wrote to its int8 cache, and how many of them its scales clipped.

The scales are those of calibration. Other text may have larger keys and values, which are then stored as the largest
that there is. ``source/cached_attention.c`` counts them where it writes them, at any level, in one count per process.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple


class KVCounts(NamedTuple):
    """``clipped`` of the ``stored`` values lay beyond what their scale reaches."""

    stored: int = 0
    clipped: int = 0


class KVValues:
    """``library``: of a bundle, as :func:`engines.sessions.library_of` gives it.

    Counts begin at 0 here, and are of all sessions of the process that use this library. They stay 0 without a library,
    with one of an older build, and for a cache of floats.
    """

    def __init__(self, library: Path | None) -> None:
        try:
            self._counted = ctypes.CDLL(str(library)).tapeout_kv_values if library is not None else None
        except AttributeError:
            self._counted = None
        self._before = KVCounts()
        self._before = self.read()

    def read(self) -> KVCounts:
        if self._counted is None:
            return KVCounts()
        stored, clipped = ctypes.c_uint64(), ctypes.c_uint64()
        self._counted(ctypes.byref(stored), ctypes.byref(clipped))
        return KVCounts(stored.value - self._before.stored, clipped.value - self._before.clipped)
