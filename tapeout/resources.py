"""What a stage will take of disk and memory, compared with what there is, before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tapeout.errors import ResourceError

CGROUP = Path("/sys/fs/cgroup")  # of a container, with a limit of its own


@dataclass(frozen=True)
class Needs:
    """Estimates in bytes: what a stage writes, and the most it holds in memory. Mapped files do not count."""

    disk_bytes: int
    memory_bytes: int


def require(stage: str, needs: Needs, folder: Path, say: Callable[[str], None] = lambda _: None) -> None:
    """Say what a stage takes; :class:`ResourceError` where ``folder``'s disk or the memory has less."""
    free, available = free_disk(folder), available_memory()
    say(f"takes about {_gb(needs.disk_bytes)} of disk and {_gb(needs.memory_bytes)} of memory")
    if needs.disk_bytes > free:
        raise ResourceError(
            f"{_gb(free)} of disk free at {folder}",
            expected=f"about {_gb(needs.disk_bytes)} for {stage}",
            remedy="free disk space, or run in a folder on a larger disk",
        )
    if needs.memory_bytes > available:
        raise ResourceError(
            f"{_gb(available)} of memory available",
            expected=f"about {_gb(needs.memory_bytes)} for {stage}",
            remedy="end other programs, or run on a machine with more memory",
        )


def free_disk(folder: Path) -> int:
    """Bytes on the disk of ``folder``, or of its first parent that exists."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def available_memory() -> int:
    """Bytes that can be taken without swapping: the system's, or what the container's limit leaves."""
    available, limit = psutil.virtual_memory().available, container_limit()
    if limit is None:
        return available
    used = int((CGROUP / "memory.current").read_text())
    statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    return min(available, limit - used + int(statistics.get("inactive_file", 0)))  # files that are only cached


def container_limit() -> int | None:
    """The memory limit of a container (cgroup 2), which ``/proc/meminfo`` does not show."""
    limit = CGROUP / "memory.max"
    text = limit.read_text().strip() if limit.is_file() else "max"
    return None if text == "max" else int(text)


def _gb(count: int) -> str:
    """
    >>> _gb(1_234_000_000)
    '1.2 GB'
    """
    return f"{count / 1e9:.1f} GB"
