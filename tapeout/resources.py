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


def require(stage: str, needs: Needs, folder: Path, progress: Callable[[str], None] = lambda _: None) -> None:
    """Say what a stage takes; :class:`ResourceError` where ``folder``'s disk or the memory has less."""
    free, available = free_disk(folder), available_memory()
    progress(f"takes about {_gb(needs.disk_bytes)} of disk and {_gb(needs.memory_bytes)} of memory")
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
    left = [group.limit - max(0, group.used - group.cached) for group in _limited_groups()]
    return max(0, min([psutil.virtual_memory().available, *left]))


def container_limit() -> int | None:
    """The memory limit of this process, as in a container: ``/proc/meminfo`` does not show it. None without one."""
    return min((group.limit for group in _limited_groups()), default=None)


class _Group(NamedTuple):
    """Bytes of a control group. ``cached``: of files, which the system drops where memory is short."""

    limit: int
    used: int
    cached: int


class _Version(NamedTuple):
    """Where a version of control groups keeps what it counts. ``prefix``: of numbers that include the groups below."""

    base: Path
    limit: str
    used: str
    prefix: str


def _limited_groups() -> list[_Group]:
    """The control groups that hold this process and have a memory limit: its own, and those above it.

    One that cannot be read counts as one without a limit.
    """
    found: list[_Group] = []
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = CGROUP / "unified" if (CGROUP / "unified").is_dir() else CGROUP  # beside folders of version 1
            version = _Version(base, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            version = _Version(CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        for folder in _folders(version.base, path):
            try:
                group = _read(folder, version)
            except (OSError, ValueError):
                continue
            if group is not None:
                found.append(group)
    return found


def _folders(base: Path, path: str) -> list[Path]:
    """Of the group and those above it. A container may see a group of the host's path as ``base``."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # of a process that was moved out of what it sees
        return [base]
    own = next((parts[skipped:] for skipped in range(len(parts)) if base.joinpath(*parts[skipped:]).is_dir()), [])
    return [base.joinpath(*own[:depth]) for depth in range(len(own), -1, -1)]


def _read(folder: Path, version: _Version) -> _Group | None:
    """None without a limit. ``hierarchical_memory_limit``: of groups above, which a container does not see."""
    text = (folder / version.limit).read_text().strip()
    statistics = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
    limit = UNLIMITED if text == "max" else int(text)
    limit = min(limit, int(statistics.get("hierarchical_memory_limit", UNLIMITED)))
    if limit >= UNLIMITED:
        return None
    cached = sum(int(statistics.get(f"{version.prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return _Group(limit, int((folder / version.used).read_text()), cached)


def _gb(count: int) -> str:
    """
    >>> _gb(1_234_000_000)
    '1.2 GB'
    """
    return f"{count / 1e9:.1f} GB"
