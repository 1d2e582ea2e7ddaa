"""The bookkeeping of a fleet: the list of engines, retries, and sums over engines that come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.gateway.fleet.client import FleetClient
from runtime.gateway.fleet.connection import FleetConnection
from runtime.gateway.fleet.discovery import FleetFileError, FromFile
from runtime.gateway.fleet.replica import Patience, Replica
from runtime.gateway.fleet.retries import LONGEST_PROBE_SECONDS, RetryBudget, probe_seconds
from runtime.gateway.fleet.totals import COUNTERS, STATES, Totals
from runtime.gateway.operations.operations import Operations, OperationsSettings
from runtime.gateway.routing.router import FleetRouter
from runtime.wire.codec import WireError
from runtime.wire.messages import EngineStats
from tapeout.errors import SignatureError, TapeoutError
from tests.waiting import until

KEY = b"k" * 32


def fleet_file(folder: Path, text: str) -> FromFile:
    (folder / "engine.key").write_bytes(KEY + b"\n")
    (folder / "fleet.yaml").write_text(text)
    return FromFile(folder / "fleet.yaml")


def test_a_list_has_each_engine_once_and_the_key_beside_it(tmp_path: Path) -> None:
    found = fleet_file(tmp_path, "engines: [tcp:h:1, unix:/a, tcp:h:1]\nkey: engine.key").read()
    assert found.engines == ("tcp:h:1", "unix:/a") and found.key == KEY


@pytest.mark.parametrize(
    "text",
    ["", "engines: []", "engines: 3", "engines: [a", "engines: [tcp:h:1]\nkeys: engine.key", "[]", "engines: [7]"],
)
def test_what_is_no_list_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FleetFileError, match=r"fleet\.yaml cannot be used: "):
        fleet_file(tmp_path, text).read()
    with pytest.raises(FleetFileError):
        FromFile(tmp_path / "nowhere.yaml").read()


def test_addresses_and_keys_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TapeoutError, match="no address"):
        fleet_file(tmp_path, "engines: [host:1]").read()
    with pytest.raises(SignatureError, match="without a key"):
        fleet_file(tmp_path, "engines: [tcp:h:1]").read()
    with pytest.raises(SignatureError, match="cannot be read"):
        fleet_file(tmp_path, "engines: [tcp:h:1]\nkey: other").read()
    assert fleet_file(tmp_path, "engines: [unix:/a]").read().key == b""


@given(st.lists(st.tuples(st.floats(0, 0.5), st.booleans()), max_size=300))
def test_retries_are_a_tenth_of_the_requests_and_ten_a_second(events: list[tuple[float, bool]]) -> None:
    budget, now, requests, retries = RetryBudget(0.0), 0.0, 0, 0
    for seconds, is_request in events:
        now += seconds
        if is_request:
            budget.arrived()
            requests += 1
        else:
            retries += budget.take(now)
    assert retries <= 100 + 0.1 * requests + 10 * now + 1e-6


@given(st.integers(1, 10_000), st.integers(0, 99))
def test_probes_come_later_each_time_up_to_the_longest(failures: int, seed: int) -> None:
    seconds = probe_seconds(failures, Random(seed))
    expected = min(LONGEST_PROBE_SECONDS, 0.5 * 2 ** min(failures - 1, 40))
    assert expected / 2 <= seconds <= expected


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 50)), max_size=40))
def test_sums_are_those_of_all_engines_and_never_go_back(events: list[tuple[int, bool, int]]) -> None:
    """``events``: an engine, whether it is connected to again, and what it has counted since."""
    totals, counted, seen = Totals(), 0, 0
    engines: dict[int, tuple[EngineStats, EngineStats]] = {}
    for engine, again, more in events:
        if again or engine not in engines:
            first = EngineStats(**dict.fromkeys(COUNTERS, more), finished={"stop": more})
            engines[engine] = (first, first)
        else:
            first, last = engines[engine]
            value = last.steps + more
            states = dict.fromkeys(STATES, more)
            engines[engine] = (
                first,
                EngineStats(**dict.fromkeys(COUNTERS, value), **states, step_requests=more, finished={"stop": value}),
            )
            counted += more
        found = totals.of(list(engines.values()))
        assert {getattr(found, name) for name in COUNTERS} == {counted} and found.finished.get("stop", 0) == counted
        assert found.running == sum(last.running for _, last in engines.values())
        assert found.steps >= seen
        seen = found.steps


def test_how_the_engines_are_is_said_while_none_is_ready(tmp_path: Path) -> None:
    """Nobody starts those of a list again. Planted: the words of a server with an engine of its own."""

    async def test() -> None:
        client = FleetClient(
            fleet_file(tmp_path, "engines: [unix:/nowhere/a, unix:/nowhere/b]\nkey: engine.key"), tmp_path
        )
        opening = asyncio.ensure_future(client.open())
        try:
            await until(lambda: [status.state.value for status in client.statuses()] == ["open"] * 2)
            health = Operations(client, "m", OperationsSettings(), client).health
            assert health.not_ready() == "no engine is ready (2 not answering)"
        finally:
            opening.cancel()
            await client.close()

    asyncio.run(test())


def test_an_engine_whose_connection_cannot_be_made_is_said_and_tried_again() -> None:
    """Such as one whose address in a table is nonsense. Planted: the watch ends, and nobody is told."""

    async def test() -> None:
        tried = 0

        def connect() -> FleetConnection:
            nonlocal tried
            tried += 1
            raise WireError("no address: nonsense", expected="tcp:HOST:PORT or unix:PATH")

        async def admit(_: object) -> None: ...

        replica = Replica("nonsense", connect, Patience(), FleetRouter(), admit, lambda _: None)
        try:
            await until(lambda: tried == 2)
            assert replica.failures and "no address: nonsense" in replica.why and not replica.ready
        finally:
            await replica.close()

    asyncio.run(test())
