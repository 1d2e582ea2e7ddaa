"""A fleet of one machine without Ray, whose engines and gateways are made up: what it does where something fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import yaml

from runtime.fleet import local
from runtime.fleet.local import LocalFleet
from runtime.gateway.fleet.discovery import FleetFile
from runtime.gateway.fleet.release import PlanFile, ReleasePlan
from tapeout.errors import TapeoutError
from tests.waiting import until

OLD, NEW = "a" * 8, "b" * 8


class Process:
    """In place of a runner of an engine or a gateway."""

    made: list[Process]
    opens: Callable[[int], object]  # what an engine does at its start, by its number

    def __init__(self, *arguments: Any, **_: Any) -> None:
        self.number, self.pool = len(Process.made), arguments[1] if len(arguments) > 1 else ""
        self.address, self.pid, self.report = f"tcp:127.0.0.1:{7000 + self.number}", 1, None
        self.stopped, self.broken = False, False
        self.digest, self.opened_at = OLD, monotonic()
        Process.made.append(self)

    async def start(self) -> None:
        found = Process.opens(self.number)
        if isinstance(found, asyncio.Event):
            await found.wait()

    async def stop(self) -> None:
        self.stopped = True

    async def idle(self, seconds: float) -> None: ...

    def require_healthy(self) -> None:
        if self.broken:
            raise TapeoutError("it has ended 4 times in turn")


class Gateway(Process):
    async def start(self) -> None: ...


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalFleet:
    Process.made, Process.opens = [], lambda number: None
    monkeypatch.setattr(local, "EngineRunner", Process)
    monkeypatch.setattr(local, "GatewayRunner", Gateway)
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.01)
    (tmp_path / "key").write_text("c" * 64)
    scaling = {"least": 2, "most": 2}
    up, releases = {"bundle": "b", "name": "one"}, f"file:{tmp_path / 'plan.json'}"
    file = {"key": str(tmp_path / "key"), "up": up, "scaling": scaling, "releases": releases}
    return LocalFleet(FleetFile.model_validate(file), tmp_path)


def listed(folder: Path) -> list[str]:
    return yaml.safe_load((folder / "one.yaml").read_text())["engines"]


async def running(fleet: LocalFleet, test: Callable[[asyncio.Event, asyncio.Task[None]], Any]) -> None:
    ending = asyncio.Event()
    task = asyncio.create_task(fleet.run(ending))
    try:
        await test(ending, task)
    finally:
        ending.set()
        await asyncio.wait_for(task, 30)


def test_it_ends_while_an_engine_opens(fleet: LocalFleet) -> None:
    """Planted: it listens to nobody until all are open, which may be never."""
    never = asyncio.Event()
    Process.opens = lambda number: never if number == 1 else None

    async def test(ending: asyncio.Event, task: asyncio.Task[None]) -> None:
        await until(lambda: len(Process.made) == 2)
        ending.set()
        await asyncio.wait_for(asyncio.shield(task), 30)

    asyncio.run(running(fleet, test))
    assert len(Process.made) == 2 and all(one.stopped for one in Process.made)


def test_a_full_disk_ends_nothing(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The list of engines lies there. Planted: the whole fleet ends with the first engine that is replaced."""
    caplog.set_level(logging.ERROR)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    async def test(ending: asyncio.Event, task: asyncio.Task[None]) -> None:
        await until(lambda: len(Process.made) == 3)  # with the gateway
        before = listed(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full)
            Process.made[0].broken = True
            await until(lambda: "No space left" in caplog.text)
            await until(lambda: len(Process.made) == 4)
            await asyncio.sleep(0.05)
            assert not task.done() and listed(tmp_path) == before
        await until(lambda: listed(tmp_path) == [Process.made[1].address, Process.made[3].address])

    asyncio.run(running(fleet, test))
    assert sum("No space left" in record.message for record in caplog.records) == 1


def test_an_engine_that_does_not_open_is_not_tried_all_the_time(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: a new process at each look, for as long as its bundle is broken."""
    looks = list[int]()

    def opens(number: int) -> None:
        if number > 2:
            raise TapeoutError("its weights are damaged")

    Process.opens = opens
    look = LocalFleet._look

    def counted(self: LocalFleet) -> None:
        looks.append(len(Process.made))
        look(self)

    monkeypatch.setattr(LocalFleet, "_look", counted)

    async def test(ending: asyncio.Event, task: asyncio.Task[None]) -> None:
        await until(lambda: len(Process.made) == 3)
        Process.made[0].broken = True
        await until(lambda: len(Process.made) == 4)
        seen = len(looks)
        await until(lambda: len(looks) > seen + 20)
        assert looks[-1] == 4

    asyncio.run(running(fleet, test))
    assert "its weights are damaged" in caplog.text


def test_an_engine_that_no_release_has_seen_is_started_anew_with_its_bundle(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one on standby: gateways do not list it. Planted: it keeps a bundle that gets no requests, and counts."""
    monkeypatch.setattr(local, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(local, "AGAIN_SECONDS", 0.0)
    plans = PlanFile(tmp_path / "plan.json")

    async def test(ending: asyncio.Event, task: asyncio.Task[None]) -> None:
        await until(lambda: len(Process.made) == 3)
        plans.put(ReleasePlan(stable=OLD, candidate=NEW, phase="rolling"))
        await asyncio.sleep(0.1)
        assert len(Process.made) == 3, "both bundles get requests"
        Process.made[0].digest = NEW  # which the release told
        plans.put(ReleasePlan(stable=NEW, phase="done"))
        await until(lambda: len(Process.made) == 4)
        assert Process.made[1].stopped and not Process.made[0].stopped
        await asyncio.sleep(0.1)
        assert len(Process.made) == 4, "once, whatever it has then"

    asyncio.run(running(fleet, test))
