"""A release whose plan is in PostgreSQL: its command and a gateway are killed, and it ends all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.cli.gateway import find_plans
from pipeline.cli.main import main
from runtime.gateway.fleet.discovery import FleetFile
from runtime.gateway.fleet.release import ReleasePlan
from tests import command
from tests.command import COMMAND, ROOT, Running
from tests.exported import build_float, tiny_graph
from tests.integration.test_fleet_release import load, ready
from tests.integration.test_serve_elsewhere import Engine
from tests.native import own_cache
from tests.postgres import running_postgres
from tests.waiting import wait_for

ENGINES = 3
FLEET = "engines-of-all-departments-in-the-northern-and-the-southern-building"  # longer than many names of rows


@pytest.fixture
def bundles(tmp_path: Path) -> list[Path]:
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, tmp_path / "cache")
        return [build_float(tiny_graph(), tmp_path / name, slots).folder for name, slots in (("old", 8), ("new", 7))]


class Place:
    """A machine with a gateway: its own copy of the file and the key."""

    def __init__(self, folder: Path, listed: str, key: Path, stack: ExitStack) -> None:
        folder.mkdir()
        self.file = folder / f"{FLEET}.yaml"
        self.file.write_text(listed)
        shutil.copy(key, folder / "engine.key")
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
        served = command.served(str(self.file), variables=variables, folder=folder, command="gateway")
        self.gateway: Running = stack.enter_context(served)
        wait_for(lambda: len(ready(self.gateway)) == ENGINES)

    @property
    def plan(self) -> ReleasePlan | None:
        return find_plans(self.file, FleetFile.read(self.file)).read()

    def words(self, bundle: Path, *gateways: Running) -> list[str]:
        named = [word for gateway in gateways for word in ("--gateway", gateway.url)]
        bounds = ["--max-failed", "0.3", "--max-slow", "0.9", "--min-calls", "20", "--share", "0.4"]
        return ["fleet", "release", str(self.file), str(bundle), *named, *bounds]


@pytest.fixture
def places(tmp_path: Path, bundles: list[Path]) -> Iterator[list[Place]]:
    key = tmp_path / "engine.key"
    key.write_text("c" * 64)
    engines = [Engine(tmp_path, key) for _ in range(ENGINES)]
    for engine in engines:
        engine.start(bundles[0])
    with running_postgres() as postgres, ExitStack() as stack:
        listed = "engines:\n" + "".join(f"  - {engine.address}\n" for engine in engines)
        listed += f"key: engine.key\nreleases: {postgres.url}\n"
        yield [Place(tmp_path / name, listed, key, stack) for name in ("here", "there")]
    for engine in engines:
        assert engine.stop() == 0


def test_another_machine_ends_what_a_dead_one_has_begun(places: list[Place], bundles: list[Path]) -> None:
    """Planted: each machine has its plan in a file of its own."""
    here, there = places
    (old,) = set(ready(there.gateway))
    with load(there.gateway) as seen:
        begun = subprocess.Popen(
            [*COMMAND, *here.words(bundles[1], here.gateway, there.gateway)],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        wait_for(lambda: here.plan is not None and here.plan.phase == "rolling")
        begun.kill()
        here.gateway.process.kill()
        begun.wait()
        assert len(set(ready(there.gateway))) > 0 and there.plan is not None and there.plan.candidate
        assert main(there.words(bundles[1], there.gateway)) == 0
        (new,) = set(ready(there.gateway))
        assert new != old and len(ready(there.gateway)) == ENGINES
    assert not seen.wrong and min(seen.ready) >= ENGINES - 1
    assert there.plan is not None and (there.plan.stable, there.plan.phase) == (new, "done")
