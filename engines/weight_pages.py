"""Weights that an engine leaves in their file: which pages are in memory, and how often a process waited for one.

The system keeps pages of a mapped file as long as there is room, and reads them again when they are needed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAPPINGS = Path("/proc/self/maps")
SAMPLED = 1024  # pages that an estimate looks at, in 1 to 2 ms: half of them resident is known to 2 %


class Extent(NamedTuple):
    """Bytes of a file from ``start`` on."""

    start: int
    size: int


def shared_extents(path: Path) -> tuple[Extent, ...]:
    """What this process has mapped of a file, and shares with others. ONNX Runtime's own mappings are private."""
    found, name = set[Extent](), str(path.resolve())
    for line in MAPPINGS.read_text(errors="replace").splitlines() if MAPPINGS.is_file() else []:
        span, access, offset, _, _, *rest = line.split(None, 5)
        if access.endswith("s") and rest == [name]:
            first, end = (int(address, 16) for address in span.split("-"))
            found.add(Extent(int(offset, 16), end - first))
    return tuple(sorted(found))


class WeightPages:
    """Pages of ``extents`` of a file, whoever has read them: it is mapped once more."""

    def __init__(self, path: Path, extents: Sequence[Extent]) -> None:
        self.size = sum(extent.size for extent in extents)
        self._extents = tuple(extents)
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        self._first: int = np.frombuffer(self._memory, np.uint8).ctypes.data
        # To others Linux says that all pages are resident.
        self._told = path.stat().st_uid == os.geteuid() or os.access(path, os.W_OK)
        self._look: Any = getattr(ctypes.CDLL(None), "mincore", None)
        if self._look is not None:
            self._look.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)

    def resident(self, *, exact: bool = False) -> int | None:
        """Bytes in memory; an estimate from :data:`SAMPLED` pages unless ``exact``.

        None where the system does not tell: who neither owns the file nor may write to it is told nothing.
        """
        if self._look is None or not self._told or self._memory.closed:
            return None
        pages = sum(_pages(extent) for extent in self._extents)
        if exact or pages <= SAMPLED:
            places = [(extent.start, _pages(extent)) for extent in self._extents]
        else:
            places, pages = [(start, 1) for start in self._sample(pages)], SAMPLED
        found, looked = np.zeros(pages, np.uint8), 0
        first = found.ctypes.data
        for start, count in places:
            self._look(self._first + start, count * mmap.PAGESIZE, first + looked)
            looked += count
        return round(self.size * int((found & 1).sum()) / pages) if pages else 0

    def close(self) -> None:
        self._memory.close()

    def _sample(self, pages: int) -> Iterator[int]:
        """Where pages start that lie evenly among all."""
        wanted, before = iter((2 * number + 1) * pages // (2 * SAMPLED) for number in range(SAMPLED)), 0
        at = next(wanted)
        for extent in self._extents:
            while at is not None and at < before + _pages(extent):
                yield extent.start + (at - before) * mmap.PAGESIZE
                at = next(wanted, None)
            before += _pages(extent)


def _pages(extent: Extent) -> int:
    return -(-extent.size // mmap.PAGESIZE)


def major_faults() -> int:
    """How often this process has waited for a page that was read from a disk, since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
