"""``tapeout fleet`` on a Ray of its own: answers stay the same while its parts are killed, scaled and renewed.

The tests are in order: each finds the fleet as the one before has left it, and the last two end it. Those that need
most starts run where FLEET_DRILLS=all.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest

from evals.check import Outcome
from pipeline.cli.release import FleetRelease
from runtime.fleet.ray_cluster import TOKEN_PATH, LocalRay
from tests import web
from tests.command import COMMAND, ROOT
from tests.fleet_load import RELEASE, Load, answers, build_tiny, by_pool, digests, free_port, lost, ready, replicas
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='needs Ray: `pip install "tapeout[fleet]"`'
)
# The whole takes minutes on two cores, most of them starts of Ray's processes.
thorough = pytest.mark.skipif(os.environ.get("FLEET_DRILLS") != "all", reason="takes minutes: FLEET_DRILLS=all")
NAME = f"drill-{os.getpid()}"
SCALING = "scaling: {least: 2, most: 3}"


class Fleet:
    """What `tapeout fleet` is told and says."""

    def __init__(self, folder: Path) -> None:
        self.file, self.port = folder / "fleet.yaml", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ray = LocalRay(NAME)

    def run(self, *words: str, code: int = 0) -> str:
        command, *rest = words
        found = subprocess.run(
            [*COMMAND, "fleet", command, str(self.file), *rest],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert found.returncode == code, found.stdout + found.stderr
        return found.stdout if code == 0 else found.stderr

    def told(self, *words: str) -> dict[str, Any]:
        return json.loads(self.run(*words, "--json"))

    def process(self, name: str) -> psutil.Process:
        (found,) = [one for one in self.ray.processes() if name in " ".join(one.cmdline()[:1])]
        return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    build_tiny(folder)
    found = Fleet(folder)
    found.file.write_text(
        f"""
key: engine.key
up:
  name: {NAME}
  bundle: tiny
  engines: {{cpus: 0.1, options: [--unsafe, --threads, "1"]}}
  gateways: {{cpus: 0.1, port: {found.port}, options: [--served-model-name, tiny]}}
  drain_seconds: 20
{SCALING}
"""
    )
    try:
        status = found.told("up")
        assert status["state"] == "RUNNING" and status["pools"] == {"mixed": {"wanted": 2, "fixed": None}}
        wait_for(lambda: len(ready(found.url)) == 2)
        yield found
    finally:
        found.ray.stop()


@pytest.fixture(scope="module")
def wanted(fleet: Fleet) -> list[Any]:
    return answers(fleet.url)


def test_what_is_up_is_not_started_again_and_status_says_what_there_is(fleet: Fleet) -> None:
    assert "is up" in fleet.run("up", code=2)
    status = fleet.told("status")
    assert [one["state"] for one in status["engines"]] == ["serving", "serving"]
    assert all(one["cold_seconds"] > 0 for one in status["engines"])
    assert [one["address"] for one in status["gateways"]] == [fleet.url]
    assert sorted(one["address"] for one in status["engines"]) == sorted(ready(fleet.url))
    assert 'tapeout:replicas_wanted{pool="mixed"} 2.0' in web.get(f"{fleet.url}/metrics", timeout=30).text


def test_an_engine_that_is_killed_is_started_again_at_its_address(fleet: Fleet, wanted: list[Any]) -> None:
    before, killed = sorted(ready(fleet.url)), fleet.told("status")["engines"][0]
    with Load(fleet.url, wanted) as load:
        load.more(4)
        os.kill(killed["process"], signal.SIGKILL)
        wait_for(lambda: ready(fleet.url) == [one for one in before if one != killed["address"]])
        wait_for(lambda: sorted(ready(fleet.url)) == before)
        load.more(8)
        assert load.end() >= 12 and lost(fleet.url) == 0


@thorough
def test_a_replica_that_is_killed_takes_its_engine_with_it_and_ray_starts_another(
    fleet: Fleet, wanted: list[Any]
) -> None:
    killed = fleet.told("status")["engines"][0]
    with Load(fleet.url, wanted) as load:
        load.more(4)
        os.kill(killed["supervisor"], signal.SIGKILL)
        wait_for(lambda: not psutil.pid_exists(killed["process"]))
        wait_for(lambda: len(ready(fleet.url)) == 2 and killed["address"] not in ready(fleet.url))
        load.more(8)
        load.end()
    assert lost(fleet.url) == 0


def test_engines_come_and_go_under_load_also_after_the_controller_was_killed(fleet: Fleet, wanted: list[Any]) -> None:
    with Load(fleet.url, wanted) as load:
        fleet.process("ray::ServeController").kill()
        load.more(4)
        assert fleet.told("scale", "3")["pools"]["mixed"]["fixed"] == 3
        wait_for(lambda: len(ready(fleet.url)) == 3)
        load.more(8)
        fleet.told("scale", "1")
        wait_for(lambda: len(replicas(fleet.url)) == 1)
        load.more(8)
        load.end()
    assert lost(fleet.url) == 0
    assert "1 to 3" in fleet.run("scale", "4", code=2)
    (left,) = ready(fleet.url)
    serving = [one["address"] for one in fleet.told("status")["engines"] if one["state"] == "serving"]
    assert serving == [left]


@thorough
def test_an_engine_is_renewed_while_another_answers(fleet: Fleet, wanted: list[Any]) -> None:
    fleet.told("scale", "auto")
    wait_for(lambda: len(ready(fleet.url)) == 2)
    before = fleet.told("status")["engines"]
    with Load(fleet.url, wanted) as load:
        fleet.told("drain", before[0]["address"])
        wait_for(lambda: len(ready(fleet.url)) == 1)
        wait_for(lambda: not psutil.pid_exists(before[0]["process"]))
        wait_for(lambda: len(ready(fleet.url)) == 2)
        load.end()
    assert lost(fleet.url) == 0
    after = {one["address"]: one["process"] for one in fleet.told("status")["engines"]}
    assert after.keys() == {one["address"] for one in before}
    assert "no engine at" in fleet.run("drain", "tcp:127.0.0.1:1", code=2)


@thorough
def test_a_release_stays_where_an_engine_dies_and_is_reversed(fleet: Fleet, wanted: list[Any]) -> None:
    fleet.told("scale", "2")
    wait_for(lambda: len(ready(fleet.url)) == 2)
    (old,) = set(digests(fleet.url))
    before = {one["process"] for one in fleet.told("status")["engines"]}
    with Load(fleet.url, wanted, new=True) as load:
        verdict = FleetRelease(fleet.file, [fleet.url], RELEASE).release(str(fleet.file.with_name("other")))
        assert verdict.outcome is Outcome.PASS, verdict
        (new,) = set(digests(fleet.url))
        engines = fleet.told("status")["engines"]
        assert new != old and {one["process"] for one in engines} == before
        os.kill(engines[0]["process"], signal.SIGKILL)
        wait_for(lambda: digests(fleet.url) == [new])
        wait_for(lambda: digests(fleet.url) == [new, new])
        FleetRelease(fleet.file, [fleet.url], RELEASE).rollback()
        assert digests(fleet.url) == [old, old]
        load.end()
    assert lost(fleet.url) == 0


@contextmanager
def joined(fleet: Fleet, name: str, scaling: str) -> Generator[Fleet]:
    """A second fleet on the same Ray, as one that somebody else has started."""
    text, other = fleet.file.read_text(), Fleet(fleet.file.parent)
    other.file = fleet.file.with_name(f"{name}.yaml")
    changed = text.replace(f"name: {NAME}", f"name: {name}\n  ray: {fleet.ray.address}")
    other.file.write_text(changed.replace(SCALING, scaling).replace(str(fleet.port), str(other.port)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv(TOKEN_PATH, str(fleet.ray.folder / "token"))
        assert [one["address"] for one in other.told("up")["gateways"]] == [other.url]
        yield other
        other.run("down")
        assert "is not up" in other.run("status", code=2)


@thorough
def test_a_second_fleet_joins_the_cluster_and_leaves_it(fleet: Fleet, wanted: list[Any]) -> None:
    with joined(fleet, "second", "scaling: {least: 1, most: 3}") as other:
        assert answers(other.url) == wanted
    assert answers(fleet.url) == wanted and len(ready(fleet.url)) == 2


@thorough
def test_both_pools_answer_and_an_engine_of_one_that_is_killed_comes_again(fleet: Fleet, wanted: list[Any]) -> None:
    with joined(fleet, "pools", "pools: {prefill: {least: 1, most: 2}, decode: {least: 1, most: 2}}") as other:
        wait_for(lambda: by_pool(other.url) == {"prefill": 1, "decode": 1})
        assert answers(other.url) == wanted
        assert "--pool" in other.run("scale", "2", code=2)
        assert other.told("scale", "2", "--pool", "decode")["pools"]["decode"]["fixed"] == 2
        wait_for(lambda: by_pool(other.url) == {"prefill": 1, "decode": 2})
        with Load(other.url, wanted) as load:
            load.more(4)
            killed = next(one for one in other.told("status")["engines"] if one["pool"] == "decode")
            os.kill(killed["process"], signal.SIGKILL)
            wait_for(lambda: by_pool(other.url) == {"prefill": 1, "decode": 1})
            wait_for(lambda: by_pool(other.url) == {"prefill": 1, "decode": 2})
            load.more(8)
            load.end()
        assert lost(other.url) == 0
        assert web.get(f"{other.url}/fleet", timeout=30).json()["moves"] > 0


def test_requests_are_answered_while_the_head_is_dead_and_down_leaves_nothing(fleet: Fleet, wanted: list[Any]) -> None:
    with Load(fleet.url, wanted) as load:
        fleet.process("gcs_server").kill()
        killed = monotonic()
        assert "no Ray answers" in fleet.run("status", code=2)
        load.more(40)
        wait_for(lambda: monotonic() > killed + 5)
        load.end()
    assert lost(fleet.url) == 0
    fleet.run("down")
    assert fleet.ray.processes() == [] and not fleet.ray.folder.exists()


@thorough
def test_a_bundle_that_cannot_be_opened_is_named_and_nothing_is_left(fleet: Fleet) -> None:
    fleet.file.write_text(fleet.file.read_text().replace("bundle: tiny", "bundle: nowhere"))
    assert "nowhere" in fleet.run("up", code=2)
    assert fleet.ray.processes() == [] and not fleet.ray.folder.exists()


def test_nothing_is_left_of_one_that_is_told_to_end_while_it_comes_up(tmp_path: Path) -> None:
    """By SIGTERM, as at a timeout. Planted: the command ends, and its Ray runs on."""
    build_tiny(tmp_path)
    ray, file = LocalRay(f"{NAME[-12:]}-e"), tmp_path / "fleet.yaml"
    file.write_text(
        f"""
key: engine.key
up:
  name: {NAME[-12:]}-e
  bundle: tiny
  engines: {{cpus: 0.1, options: [--unsafe]}}
  gateways: {{cpus: 0.1, port: {free_port()}}}
"""
    )
    command = [*COMMAND, "fleet", "up", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        wait_for(lambda: len(ray.processes()) > 2)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
        assert process.returncode and "Traceback" not in said
        assert not ray.processes() and not ray.folder.exists()
    finally:
        process.kill()
        ray.stop()
