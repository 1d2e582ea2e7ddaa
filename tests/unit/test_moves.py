"""Requests that leave an engine that drains, over engines that only note what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime.gateway.fleet import moves
from runtime.gateway.fleet.change import Change
from runtime.gateway.fleet.flight import Flight
from runtime.gateway.fleet.moves import Moves
from runtime.gateway.fleet.retries import RetryBudget
from runtime.wire.messages import FetchAhead, GenerateRequest

BLOCK = 64


class FakeConnection:
    def __init__(self) -> None:
        self.info = SimpleNamespace(block_tokens=BLOCK, moves_blocks=True, level="")
        self.asked: list[FetchAhead] = []
        self.left: list[str] = []
        self.ended = set[str]()

    def resumes(self, _: GenerateRequest) -> bool:
        return True

    def runs(self, stream: str) -> bool:
        return stream not in self.ended

    def send(self, command: FetchAhead) -> None:
        self.asked.append(command)

    def give_up(self, stream: str, _: Exception) -> None:
        self.left.append(stream)


@dataclass(eq=False)
class FakeReplica:
    address: str
    ready: bool = True
    lingers: bool = False
    digest: str = "bundle"
    level: str = ""
    pool: str = "mixed"
    connection: FakeConnection = field(default_factory=FakeConnection)


class FakeFleet:
    """``held``: blocks of each prompt that engines have, by address."""

    def __init__(self, *addresses: str) -> None:
        self.listed = {address: FakeReplica(address) for address in addresses}
        self.held: dict[str, int] = {}
        self.index, self.pays = self, True
        self.flights = dict[Flight, None]()
        self.old = FakeReplica("old", ready=False)
        self.moves = Moves(
            cast(Any, self.flights), cast(Any, self), cast(Any, self), Change(), RetryBudget(monotonic())
        )

    def resumable(self, keys: Collection[bytes]) -> dict[str, int]:
        return {address: min(blocks, len(keys)) for address, blocks in self.held.items()}

    def choose(self, _: GenerateRequest, addresses: list[str], __: str) -> list[Any]:
        return [SimpleNamespace(engine=addresses[0])]

    def begin(self, name: str, tokens: int) -> Flight:
        """A request with so many tokens on the engine that drains."""
        request = GenerateRequest(name, [1] * (tokens - 1), 1000)
        flight = Flight(request, "", "bundle", 0.0, 0.0, answered=[1], attempts=1, brought=1)
        flight.replica, flight.connection, flight.stream = cast(Any, (self.old, self.old.connection, name))
        self.flights[flight] = None
        return flight

    def hand_over_pays(self, _: GenerateRequest, __: str, ___: str) -> bool:
        return self.pays

    def compute(self, tokens: int) -> tuple[Flight, FakeReplica]:
        """A request with a prompt of so many tokens, and the engine for prompts that computes it."""
        request, replica = GenerateRequest("r", [1] * tokens, 1000), FakeReplica("prompts", pool="prefill")
        self.listed["prompts"] = replica
        flight = Flight(request, "", "bundle", 0.0, 0.0, attempts=1)
        flight.replica, flight.connection, flight.stream = cast(Any, (replica, replica.connection, "r"))
        self.flights[flight] = None
        return flight, replica

    def land(self, flight: Flight, address: str) -> None:
        """It has its first token on another engine."""
        replica = self.listed[address]
        flight.replica, flight.connection, flight.attempts = cast(Any, (replica, replica.connection, 2))
        flight.brings([2], "")


async def passed(check: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.005)


def drained(fleet: FakeFleet, test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        fleet.moves.leave_draining(cast(Any, fleet.old))
        fleet.moves.leave_draining(cast(Any, fleet.old))  # it may be told again
        try:
            await test()
        finally:
            fleet.old.connection = cast(Any, None)
            fleet.moves.close()

    asyncio.run(run())


def test_as_many_change_over_at_a_time_as_have_few_tokens_to_compute_together() -> None:
    """Planted: one after another; all at once; one that waits asks for its blocks at each look."""
    fleet = FakeFleet("new")
    fleet.held["new"] = 2
    flights = {f"r{number}": fleet.begin(f"r{number}", 2 * BLOCK + 10) for number in range(5)}
    left, target = fleet.old.connection.left, fleet.listed["new"].connection

    async def test() -> None:
        await passed(lambda: len(left) == 3)
        await asyncio.sleep(4 * moves.LOOK_SECONDS)
        assert left == ["r0", "r1", "r2"] and not target.asked
        fleet.land(flights["r1"], "new")
        await passed(lambda: len(left) == 4)
        for name in ("r0", "r2", "r3"):
            fleet.land(flights[name], "new")
        await passed(lambda: len(left) == 5)

    drained(fleet, test)
    assert sorted(left) == sorted(flights)


def test_a_request_whose_next_engine_dies_meanwhile_has_its_blocks_fetched_by_another_one() -> None:
    """Planted: it waits for the one that is gone."""
    fleet = FakeFleet("new", "other")
    fleet.begin("r", 2 * BLOCK + 10)
    left = fleet.old.connection.left

    async def test() -> None:
        await passed(lambda: len(fleet.listed["new"].connection.asked) == 1)
        fleet.listed["new"].ready = False
        await passed(lambda: len(fleet.listed["other"].connection.asked) == 1)
        assert not left
        fleet.held["other"] = 2
        await passed(lambda: left == ["r"])

    drained(fleet, test)


def test_a_request_whose_new_engine_brings_nothing_holds_others_up_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: what it has to compute counts until it ends."""
    monkeypatch.setattr(moves, "MOVE_SECONDS", 0.2)
    fleet = FakeFleet("new")
    fleet.held["new"] = 2
    flights = [fleet.begin(f"r{number}", 2 * BLOCK + 16) for number in range(3)]
    left = fleet.old.connection.left

    async def test() -> None:
        await passed(lambda: len(left) == 2)
        for flight in flights[:2]:  # they have left, and are on no engine
            flight.replica = flight.connection = flight.stream = None
        await passed(lambda: len(left) == 3)

    drained(fleet, test)


def test_a_request_that_has_ended_and_was_not_read_holds_nobody_up() -> None:
    """Planted: a slow client's request counts as one that changes over, again and again, until the client reads."""
    fleet = FakeFleet("new")
    fleet.held["new"] = 2
    left = fleet.old.connection.left
    for name in ("unread", "unread too", "r"):
        fleet.begin(name, 2 * BLOCK + 16)
    fleet.old.connection.ended |= {"unread", "unread too"}

    async def test() -> None:
        await passed(lambda: left == ["r"], 1.0)

    drained(fleet, test)


def test_blocks_of_a_prompt_are_fetched_while_the_next_ones_are_computed() -> None:
    """Planted: nothing is fetched before the first token; blocks are asked for at each look, or where it costs more."""
    fleet = FakeFleet("new")
    flight, prompts = fleet.compute(6 * BLOCK + 10)
    target = fleet.listed["new"].connection

    def asked() -> list[int]:
        return [len(one.tokens) // BLOCK for one in target.asked]

    async def test() -> None:
        fleet.pays = False
        fleet.held["prompts"] = 1
        fleet.moves.fetch_along(flight)
        await asyncio.sleep(4 * moves.COMPUTED_SECONDS)
        assert not asked()
        fleet.pays = True
        await passed(lambda: asked() == [1])
        fleet.held["prompts"] = 3
        await passed(lambda: asked() == [1, 3])
        await asyncio.sleep(4 * moves.COMPUTED_SECONDS)
        fleet.held |= {"new": 3, "prompts": 6}
        flight.brings([1], "")
        fleet.moves.hand_over(flight)
        await passed(lambda: asked() == [1, 3, 6])
        assert {one.source for one in target.asked} == {"prompts"} and not prompts.connection.left
        fleet.held["new"] = 6
        await passed(lambda: prompts.connection.left == ["r"])
        fleet.moves.close()

    asyncio.run(test())
    assert asked() == [1, 3, 6]
