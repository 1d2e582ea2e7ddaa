"""Too little disk or memory is said before a stage starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tapeout import resources
from tapeout.errors import ResourceError
from tapeout.resources import Needs, available_memory, container_limit, free_disk, require


def test_what_is_there_is_enough_for_little(tmp_path: Path) -> None:
    said: list[str] = []
    require("export", Needs(10_000_000, 20_000_000), tmp_path / "not" / "yet", said.append)
    assert said == ["takes about 0.0 GB of disk and 0.0 GB of memory"]
    assert free_disk(tmp_path / "not" / "yet") > 0 and available_memory() > 0


def test_too_little_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="of disk free at") as caught:
        require("export", Needs(1 << 60, 1), tmp_path)
    assert caught.value.expected == "about 1152921504.6 GB for export"
    with pytest.raises(ResourceError, match="of memory available") as caught:
        require("export", Needs(1, 1 << 60), tmp_path)
    assert caught.value.remedy


GIB = 1 << 30
V1, V2 = "4:cpu,cpuacct:/other\n3:memory:{}\n0::/\n", "0::{}\n"
NO_LIMIT = {V1: 0x7FFFFFFFFFFFF000, V2: "max"}


def control_group(folder: Path, version: str, limit: int | str, used: int) -> None:
    """One that holds 1 GiB of files that are used, and 1 GiB of others."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {V1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), V2: ("memory.max", "memory.current")}[version]
    for name, number in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{number}\n")
    prefix = "total_" if version == V1 else ""
    (folder / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file {GIB}\n{prefix}active_file {GIB}\n")


@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize(
    ("path", "own", "above", "expected"),
    [
        ("/a/b", 4 * GIB, 8 * GIB, (4 * GIB, 3 * GIB)),
        ("/a/b", 8 * GIB, 4 * GIB, (4 * GIB, 3 * GIB)),
        ("/a/b", 4 * GIB, None, (4 * GIB, 3 * GIB)),
        ("/a/b", None, None, (None, 16 * GIB)),
        ("/../host/b", 8 * GIB, 4 * GIB, (4 * GIB, 3 * GIB)),  # of a container that sees its own group as the root
        ("/docker/0ab1", 8 * GIB, 4 * GIB, (4 * GIB, 3 * GIB)),
    ],
)
def test_the_smallest_limit_of_its_control_groups_counts(
    version: str,
    path: str,
    own: int | None,
    above: int | None,
    expected: tuple[int | None, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: a limit of version 1, or of another group than the root, was not seen, and a stage was killed."""
    base = tmp_path / "memory" if version == V1 else tmp_path
    control_group(base, version, above or NO_LIMIT[version], 3 * GIB)
    control_group(base / "a/b", version, own or NO_LIMIT[version], 3 * GIB)
    (tmp_path / "own").write_text(version.format(path))
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    monkeypatch.setattr(resources, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * GIB))
    assert (container_limit(), available_memory()) == expected


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "OWN_CGROUPS", tmp_path / "none")
    assert container_limit() is None and available_memory() > 0
