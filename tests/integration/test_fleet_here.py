"""``tapeout fleet run``: a fleet of one machine without Ray, scaled by its load, of which no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from evals.check import Outcome
from pipeline.cli.release import FleetRelease
from tests import web
from tests.command import COMMAND, ROOT
from tests.fleet_load import RELEASE, Load, answers, build_tiny, by_pool, digests, free_port, lost, ready, replicas
from tests.waiting import wait_for

SCALING = "scaling: {least: 1, most: 2, hold_seconds: 1}"


class Here:
    def __init__(self, folder: Path, scaling: str = SCALING) -> None:
        self.file, self.port = folder / "fleet.yaml", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.file.write_text(
            f"""
key: engine.key
up:
  bundle: tiny
  engines: {{options: [--unsafe, --threads, "1", --max-running, "2"]}}
  gateways: {{port: {self.port}, options: [--served-model-name, tiny]}}
{scaling}
"""
        )
        self.process = subprocess.Popen(
            [*COMMAND, "fleet", "run", str(self.file)],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        wait_for(self.is_open)

    def is_open(self) -> bool:
        assert self.process.poll() is None, "it has ended"
        try:
            return len(ready(self.url)) > 0
        except httpx2.TransportError:
            return False

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engines(self) -> set[int]:
        """Their processes."""
        return {one.pid for one in self.children() if "engine" in one.cmdline()}

    def child(self, command: str) -> psutil.Process:
        return next(one for one in self.children() if command in one.cmdline())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("fleet")
    build_tiny(found)
    return found


@pytest.fixture
def here(folder: Path) -> Iterator[Here]:
    found = Here(folder)
    yield found
    found.process.kill()
    found.process.wait()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def test_engines_follow_the_load_and_one_that_dies_is_started_again(here: Here) -> None:
    wanted: list[Any] = answers(here.url)
    with Load(here.url, wanted, clients=6, pause=0) as load:
        wait_for(lambda: len(ready(here.url)) == 2)
        assert all(one["cold_seconds"] > 0 for one in replicas(here.url)), "as they have measured"
        here.child("engine").kill()
        wait_for(lambda: len(ready(here.url)) == 1)
        wait_for(lambda: len(ready(here.url)) == 2)
        load.more(8)
        load.end()
    wait_for(lambda: len(ready(here.url)) == 1)
    assert answers(here.url) == wanted and lost(here.url) == 0
    children = here.children()
    here.process.send_signal(signal.SIGTERM)
    assert here.process.wait(60) == 0
    assert len(children) >= 2 and gone(children)


def test_a_release_stays_where_an_engine_dies_and_is_reversed(folder: Path) -> None:
    """Planted: an engine that opens another bundle counts as dead; one that is started anew gets what the file says."""
    here = Here(folder, "scaling: {least: 2, most: 2}")
    try:
        wait_for(lambda: len(ready(here.url)) == 2)
        wanted: list[Any] = answers(here.url)
        (old,) = set(digests(here.url))
        before = here.engines()
        with Load(here.url, wanted, new=True) as load:
            verdict = FleetRelease(here.file, [here.url], RELEASE).release(str(folder / "other"))
            assert verdict.outcome is Outcome.PASS, verdict
            (new,) = set(digests(here.url))
            assert new != old and here.engines() == before
            here.child("engine").kill()
            wait_for(lambda: digests(here.url) == [new])
            wait_for(lambda: digests(here.url) == [new, new])
            FleetRelease(here.file, [here.url], RELEASE).rollback()
            assert digests(here.url) == [old, old]
            load.end()
        assert lost(here.url) == 0
    finally:
        here.process.send_signal(signal.SIGTERM)
        assert here.process.wait(60) == 0


def test_nothing_is_left_where_it_is_killed(here: Here) -> None:
    children = here.children()
    here.process.kill()
    wait_for(lambda: gone(children))


def test_a_bundle_that_cannot_be_opened_ends_it(here: Here) -> None:
    here.process.kill()
    here.file.write_text(here.file.read_text().replace("bundle: tiny", "bundle: nowhere"))
    found = subprocess.run([*COMMAND, "fleet", "run", str(here.file)], capture_output=True, text=True, timeout=120,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert found.returncode == 2 and "nowhere" in found.stderr and "Traceback" not in found.stderr


def test_each_pool_follows_its_own_load(folder: Path) -> None:
    """Answers fill the engines for what follows; prompts are short. Planted: both pools scaled by all reports."""
    pools = "pools: {prefill: {least: 1, most: 2, hold_seconds: 1}, decode: {least: 1, most: 2, hold_seconds: 1}}"
    here = Here(folder, pools)
    try:
        wait_for(lambda: by_pool(here.url) == {"prefill": 1, "decode": 1})
        wanted: list[Any] = answers(here.url)
        with Load(here.url, wanted, clients=3, pause=0) as load:
            wait_for(lambda: by_pool(here.url)["decode"] == 2)
            metrics = web.get(f"{here.url}/metrics", timeout=30).text
            assert all(f'tapeout:replicas_wanted{{pool="{pool}"}}' in metrics for pool in ("prefill", "decode"))
            killed = next(one for one in here.children() if "decode" in one.cmdline())
            killed.kill()
            wait_for(lambda: by_pool(here.url)["decode"] == 1)
            wait_for(lambda: by_pool(here.url)["decode"] == 2)
            load.end()
        wait_for(lambda: by_pool(here.url) == {"prefill": 1, "decode": 1})
        assert answers(here.url) == wanted and lost(here.url) == 0
        assert web.get(f"{here.url}/fleet", timeout=30).json()["moves"] > 0
        here.process.send_signal(signal.SIGTERM)
        assert here.process.wait(60) == 0
    finally:
        here.process.kill()
        here.process.wait()
