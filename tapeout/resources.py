"""What a stage will take of disk and memory, compared with what there is, before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from tapeout.errors import ResourceError

CGROUP = Path("/sys/fs/cgroup")  # control groups: version 2, or the folder `memory` of version 1
OWN_CGROUPS = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # version 1 writes a number near 2**63


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
    """Bytes that can be taken without swapping: the system's, or what the limits of control groups leave."""
    left = [group.limit - group.used + group.cached for group in _limited_groups()]
    return min([psutil.virtual_memory().available, *left])


def container_limit() -> int | None:
    """The memory limit of this process, as in a container: ``/proc/meminfo`` does not show it. None without one."""
    return min((group.limit for group in _limited_groups()), default=None)


class _Group(NamedTuple):
    """Bytes of a control group. ``cached``: of files, which the system drops where memory is short."""

    limit: int
    used: int
    cached: int


def _limited_groups() -> list[_Group]:
    """The control groups that hold this process and have a memory limit: its own, and those above it."""
    found: list[_Group] = []
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, (limit, used), prefix = CGROUP, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            base, (limit, used), prefix = (
                CGROUP / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
                "total_",
            )
        else:
            continue
        own = base / path.lstrip("/")
        # A container may see its own group as the base, and the path of the host's.
        for folder in [own, *own.parents] if own.is_relative_to(base) and own.is_dir() else [base]:
            if folder.is_relative_to(base) and (most := _bytes(folder / limit)) is not None:
                statistics = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                cached = sum(int(statistics.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
                found.append(_Group(most, int((folder / used).read_text()), cached))
    return found


def _bytes(limit: Path) -> int | None:
    """None where the file is not there, or says that there is no limit."""
    text = limit.read_text().strip() if limit.is_file() else "max"
    return None if text == "max" or int(text) >= UNLIMITED else int(text)


def _gb(count: int) -> str:
    """
    >>> _gb(1_234_000_000)
    '1.2 GB'
    """
    return f"{count / 1e9:.1f} GB"
