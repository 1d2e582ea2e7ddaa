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


@pytest.fixture(params=[V1, V2, "hybrid"])
def groups(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """The folder of the root group, and its version. Limits are those of groups alone: the system has 16 GiB."""
    folders = {V1: tmp_path / "memory", V2: tmp_path, "hybrid": tmp_path / "unified"}
    version = V2 if request.param == "hybrid" else request.param
    folders[request.param].mkdir(exist_ok=True)
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    monkeypatch.setattr(resources, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * GIB))
    return folders[request.param], version


@pytest.mark.parametrize(
    ("path", "own", "above", "expected"),
    [
        ("/a/b", (4, 3), (8, 3), (4, 3)),
        ("/a/b", (8, 3), (4, 3), (4, 3)),
        ("/a/b", (4, 3), (8, 8), (4, 2)),  # the group of the larger limit leaves less
        ("/a/b", (4, 3), (None, 9), (4, 3)),
        ("/a/b", (None, 3), (None, 3), (None, 16)),
        ("/a/b", (4, 9), (8, 9), (4, 0)),  # more used than allowed: the limit was lowered
        ("/../a/b", (4, 3), (8, 3), (8, 7)),
        ("/docker/0ab1", (4, 3), (8, 3), (8, 7)),  # a container that sees its own group as the root
        ("/docker/a/b", (4, 3), (8, 3), (4, 3)),  # and a process of it in a group of its own
    ],
)
def test_the_smallest_limit_of_its_control_groups_counts(
    path: str,
    own: tuple[int | None, int],
    above: tuple[int | None, int],
    expected: tuple[int | None, int],
    groups: tuple[Path, str],
) -> None:
    """In GiB. Planted: a limit of version 1, or of another group than the root, was not seen; a stage was killed."""
    base, version = groups
    for folder, (limit, used) in ((base, above), (base / "a/b", own)):
        control_group(folder, version, limit * GIB if limit else NO_LIMIT[version], used * GIB)
    resources.OWN_CGROUPS.write_text(version.format(path))
    limit = container_limit()
    assert (limit and limit // GIB, available_memory() // GIB) == expected


def test_limits_above_what_a_container_sees_count(groups: tuple[Path, str]) -> None:
    base, version = groups
    control_group(base, version, NO_LIMIT[version], GIB)
    with (base / "memory.stat").open("a") as stream:
        stream.write(f"hierarchical_memory_limit {2 * GIB}\n")
    resources.OWN_CGROUPS.write_text(version.format("/"))
    assert container_limit() == 2 * GIB


def test_a_group_that_cannot_be_read_has_no_limit(groups: tuple[Path, str]) -> None:
    base, version = groups
    resources.OWN_CGROUPS.write_text(version.format("/"))
    for name in ("memory.stat", "memory.current" if version == V2 else "memory.usage_in_bytes"):
        control_group(base, version, GIB, GIB)
        assert container_limit() == GIB
        (base / name).write_text("odd and longer lines\n")
        assert container_limit() is None and available_memory() == 16 * GIB
        (base / name).unlink()
        assert container_limit() is None and available_memory() == 16 * GIB


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "OWN_CGROUPS", tmp_path / "none")
    assert container_limit() is None and available_memory() > 0
