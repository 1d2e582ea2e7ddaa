"""``tapeout fleet release`` and ``rollback`` over a gateway and four engines, while users ask."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from evals.check import Outcome
from evals.kinds.online import Online, frozen_plan
from evals.kinds.online.canary import CanaryBounds
from pipeline.cli.main import main
from pipeline.cli.release import FleetRelease, ReleaseOptions
from runtime.gateway.fleet.release import PlanFile, plan_path
from tapeout.observations import Observation, ObservationLog
from tests import command, web
from tests.command import ROOT, Running
from tests.exported import build_float, tiny_graph
from tests.integration.test_serve_elsewhere import Engine
from tests.native import own_cache
from tests.waiting import wait_for

ENGINES = 4
# Speed is that of a busy machine here, so only a candidate that is nearly always slow would fail by it.
BOUNDS = CanaryBounds(max_failed=0.3, max_slow=0.9, min_calls=20)
OPTIONS = ReleaseOptions(share=0.4, canary_seconds=120, drain_seconds=20, open_seconds=60, bounds=BOUNDS)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        return [build_float(tiny_graph(), folder / name, slots).folder for name, slots in (("old", 8), ("new", 7))]


@pytest.fixture(scope="module")
def fleet(bundles: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its list of engines."""
    folder = tmp_path_factory.mktemp("fleet")
    key = folder / "engine.key"
    key.write_text("c" * 64)
    engines = [Engine(folder, key) for _ in range(ENGINES)]
    for engine in engines:
        engine.start(bundles[0])
    listed = folder / "fleet.yaml"
    listed.write_text("engines:\n" + "".join(f"  - {engine.address}\n" for engine in engines) + "key: engine.key\n")
    yield listed
    for engine in engines:
        assert engine.stop() == 0


@pytest.fixture(scope="module")
def gateway(fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("gateway")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    with command.served(str(fleet), variables=variables, folder=folder, command="gateway") as running:
        wait_for(lambda: len(ready(running)) == ENGINES)
        yield running
        assert running.process.poll() is None and running.stop() == 0


@dataclass
class Seen:
    """What users and an operator saw. ``ready``: numbers of engines."""

    answered: int = 0
    wrong: list[str] = field(default_factory=list[str])
    ready: set[int] = field(default_factory=set[int])
    releases: set[str] = field(default_factory=set[str])


def state(gateway: Running) -> Any:
    return web.get(f"{gateway.url}/fleet", timeout=30).json()


def ready(gateway: Running) -> list[str]:
    """Digests of the engines that are ready. One that is suspected is, too: this machine may hold it up."""
    return [one["digest"] for one in state(gateway)["replicas"] if one["state"] in ("ready", "suspect")]


@contextmanager
def load(gateway: Running) -> Iterator[Seen]:
    """Conversations that go on, and new ones, all the time; some are streamed."""
    seen, ended = Seen(), threading.Event()

    def user(number: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            key = f"{number}-{turn // 3}"
            body = {"prompt": f"{key} The list", "max_tokens": 24, "prompt_cache_key": key, "stream": turn % 2 == 0}
            try:
                found = web.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
                whole = "[DONE]" in found.text if body["stream"] else found.status_code == 200
                if found.status_code != 200 or '"error":' in found.text or not whole:  # answers may say "error"
                    seen.wrong.append(found.text[:300])
            except httpx2.HTTPError as error:
                seen.wrong.append(repr(error))
            seen.answered += 1
            time.sleep(0.02)

    def operator() -> None:
        while not ended.is_set():
            seen.ready.add(len(ready(gateway)))
            seen.releases.add(web.get(f"{gateway.url}/live", timeout=30).json()["release"].partition(":")[0])
            time.sleep(0.05)

    with ThreadPoolExecutor(5) as pool:
        running = [*[pool.submit(user, number) for number in range(4)], pool.submit(operator)]
        try:
            yield seen
        finally:
            ended.set()
    for one in running:
        one.result()


def shadowed(folder: Path, digests: Sequence[str]) -> Path:
    """A test in which the challenger says something else throughout."""
    plan = frozen_plan(Online(min_conversations=10), *digests)
    log = ObservationLog(folder, plan)
    for number in range(60):
        log.pick(f"{number:016x}")
        log.add(Observation(conversation=f"{number:016x}", prompt_tokens=8, tokens=32, agree=0))
    log.close()
    return folder


def test_a_fleet_changes_its_bundle_and_back_while_users_ask(
    gateway: Running, fleet: Path, bundles: list[Path]
) -> None:
    """Planted: engines moved two at a time; connections closed without a word."""
    (old,) = set(ready(gateway))
    with load(gateway) as seen:
        wait_for(lambda: seen.answered > 50)
        verdict = FleetRelease(fleet, [gateway.url], OPTIONS).release(str(bundles[1]))
        assert verdict.outcome is Outcome.PASS, verdict
        (new,) = set(ready(gateway))
        assert new != old and len(ready(gateway)) == ENGINES
        answered = seen.answered
        FleetRelease(fleet, [gateway.url], OPTIONS).rollback()
        assert ready(gateway) == [old] * ENGINES
        wait_for(lambda: seen.answered > answered + 20)
    assert not seen.wrong and min(seen.ready) >= ENGINES - 1
    assert {"canary", "rolling", "rolling back", ""} <= seen.releases
    figures = state(gateway)["bundles"]
    assert figures[new]["calls"] >= BOUNDS.min_calls and not figures[old]["failed"] + figures[new]["failed"]
    models = web.get(f"{gateway.url}/v1/models", timeout=30).json()["data"]
    assert models[0]["digest"] == old
    assert f'tapeout:bundle_calls_total{{bundle="{new}"}}' in web.get(f"{gateway.url}/metrics", timeout=30).text


def test_a_canary_that_is_undecided_stays_and_one_that_fails_is_reversed(
    gateway: Running, fleet: Path, bundles: list[Path], tmp_path: Path
) -> None:
    """By exit codes. Planted: a verdict that nobody asks for."""
    (old,) = set(ready(gateway))
    words = ["fleet", "release", str(fleet), str(bundles[1]), "--gateway", gateway.url, "--share", "0.5"]
    assert main([*words, "--canary-seconds", "0", "--min-calls", "1000000"]) == 3
    plan = PlanFile(plan_path(fleet)).read()
    assert plan is not None and plan.phase == "canary" and plan.share == 0.5
    assert sorted(ready(gateway)) == sorted([old] * 3 + [plan.candidate])
    folder = shadowed(tmp_path / "shadow", [old, plan.candidate])
    assert main([*words, "--shadow-log", str(folder), "--min-calls", "1"]) == 1
    assert ready(gateway) == [old] * ENGINES
    plan = PlanFile(plan_path(fleet)).read()
    assert plan is not None and (plan.stable, plan.candidate, plan.phase) == (old, "", "rolled back")


def test_what_cannot_be_done_is_said(
    gateway: Running, fleet: Path, bundles: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fleet", "release", str(fleet), "--gateway", gateway.url]
    assert main([*words, str(bundles[0].parent / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err and len(set(ready(gateway))) == 1
    assert main([*words, str(bundles[0])]) == 2
    assert "it was told to open that" in capsys.readouterr().err
    assert main([*words, str(bundles[1]), "--least-ready", "4"]) == 2
    assert "at most 3" in capsys.readouterr().err
    assert main(["fleet", "rollback", str(fleet), "--gateway", gateway.url]) == 2
    assert "no release to reverse" in capsys.readouterr().err
    assert main(["fleet", "release", str(fleet), str(bundles[1]), "--gateway", "http://127.0.0.1:9"]) == 2
    assert "does not say how its engines are" in capsys.readouterr().err
