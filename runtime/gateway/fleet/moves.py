"""Requests that leave an engine before they have ended: one that drains, such as one that is about to open another
bundle, one for prompts, or one that is silent.

Where the engine is sound, the next one fetches the request's blocks while it still runs here, and the request changes
over once they are there. What lies behind its last full block is computed there. Of an engine for prompts blocks are
fetched while it computes the next ones, so only the last of them are on their way when the first token has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from contextlib import suppress
from random import Random
from time import monotonic

from runtime.gateway.fleet.change import Change
from runtime.gateway.fleet.connection import FleetConnection
from runtime.gateway.fleet.flight import ElsewhereError, Flight, MovedError
from runtime.gateway.fleet.members import Members
from runtime.gateway.fleet.replica import Replica
from runtime.gateway.fleet.retries import BUDGET_SPARE, RetryBudget, retry_seconds
from runtime.gateway.routing.router import FleetRouter
from runtime.wire.messages import FetchAhead, WarmUp

MOVE_SECONDS = 2.0  # for the first token of a request elsewhere, until the next one leaves an engine that drains
LOOK_SECONDS = 0.1  # between two looks for requests to move, where no change is told of
AHEAD_SECONDS = 3.0  # that a request which is handed over stays for its blocks to be fetched
ARRIVE_SECONDS = 0.002  # between two looks whether blocks have come
COMPUTED_SECONDS = 0.02  # between two looks whether blocks of a prompt have been computed
DRAIN_SECONDS = 10.0  # that a request stays on an engine that drains, for its blocks to be fetched and the last to fill
# Behind the last full block, in a request that leaves an engine that drains: each is computed anew, in a step of all
# others. A stream that has more of them first fills its block.
MOST_TAIL = 16
MOST_CROSSING = 32  # such tokens of all requests that change over at one time; a single one may have more
WARM_SHARE = 0.5  # of a new engine's blocks that may come from others before it gets requests


class Moves:
    """``flights``: all requests on their way, as they come and go. ``budget``: of what is tried again."""

    def __init__(
        self, flights: Collection[Flight], members: Members, router: FleetRouter, change: Change, budget: RetryBudget
    ) -> None:
        self._flights, self._members, self._router, self._change = flights, members, router, change
        self._budget, self._random = budget, Random()
        self._tasks: set[asyncio.Task[None]] = set()
        self._emptied: set[FleetConnection] = set()  # of engines that drain
        self._crossing = 0  # tokens to be computed for requests that left an engine that drains, and have no token yet

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def warm(self, replica: Replica) -> None:
        """Have an engine that has just come fetch what another one has used last. It ignores that if it has blocks."""
        info, connection = replica.info, replica.connection
        if info is None or connection is None or not info.moves_blocks or info.pool == "decode":
            return
        most = max(self._alike(replica), key=_known_blocks, default=replica)
        if _known_blocks(most):
            connection.send(WarmUp(most.address, int(WARM_SHARE * info.blocks)))

    def fetch_along(self, flight: Flight) -> None:
        """A request begins on an engine that is for prompts: the one that is to go on fetches blocks meanwhile."""
        self._start(self._fetch_along(flight))

    def hand_over(self, flight: Flight) -> None:
        """A request has its first token from an engine that is for prompts: another one goes on, where that pays."""
        self._start(self._hand_over(flight))

    def leave_silent(self, replica: Replica) -> None:
        """Requests on a suspected engine go on elsewhere, where there is such a place. Else they stay: it may go on."""
        if not replica.suspected:
            return
        for flight in list(self._flights):
            if flight.runs_on(replica) and (flight.resumes or not flight.answered) and self._others(flight, replica):
                flight.give_up(ElsewhereError(f"the engine at {replica.address} is silent"))

    def leave_draining(self, replica: Replica) -> None:
        """Have the requests on an engine that drains go on elsewhere, where there is such a place. Blocks of all of
        them are fetched while they go on, and few change over at one time, so that none waits for many others. Nothing
        happens if they do so already.
        """
        connection = replica.connection
        if connection is not None and connection not in self._emptied:
            self._emptied.add(connection)
            self._start(self._drain(replica, connection))

    def _start(self, moving: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(moving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, replica: Replica, connection: FleetConnection) -> None:
        begun = set[Flight]()

        async def move(flight: Flight) -> None:
            try:
                await self._move_away(flight, replica)
            finally:
                begun.discard(flight)

        while replica.connection is connection:
            for flight in list(self._flights):
                if flight not in begun and self._can_move(flight, replica):
                    begun.add(flight)
                    self._start(move(flight))
            await self._change.wait(LOOK_SECONDS)
        self._emptied.discard(connection)

    async def _move_away(self, flight: Flight, replica: Replica) -> None:
        """From an engine that drains."""
        until = monotonic() + DRAIN_SECONDS
        while self._can_move(flight, replica):
            tokens = await self._fetch_ahead(flight, replica, until)
            if self._crossing and self._crossing + tokens > MOST_CROSSING:
                await _progress(flight)
            elif self._can_move(flight, replica):
                await self._cross(flight, replica, tokens)

    async def _cross(self, flight: Flight, replica: Replica, tokens: int) -> None:
        """Change over, until it has its first token elsewhere. ``tokens``: to be computed for that."""
        attempts = flight.attempts
        flight.keep_blocks()
        flight.give_up(MovedError(f"the engine at {replica.address} drains"))
        self._crossing += tokens
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(MOVE_SECONDS):
                    while flight in self._flights and flight.brought <= attempts:
                        await _progress(flight)
        finally:
            self._crossing -= tokens

    async def _fetch_along(self, flight: Flight) -> None:
        """Until the first token. Which engine goes on is chosen again then: by rule the one that has the blocks."""
        replica, target, asked = flight.replica, None, 0
        while replica is not None and self._computes_prompt(flight, replica):
            if target is None or not target.ready:
                found = self._alike(replica)
                target, asked = self._best(flight, [one for one in found if one.pool != "prefill"]), 0
            connection = None if target is None else target.connection
            if target is not None and connection is not None:
                if not (flight.resumes and flight.moves_blocks and connection.info.moves_blocks):
                    return
                there = self._router.index.resumable(flight.block_keys())
                computed, arrived = there.get(replica.address, 0), there.get(target.address, 0)
                if computed > max(asked, arrived) and self._router.hand_over_pays(
                    flight.next_request(), replica.address, target.address
                ):
                    self._ask(connection, flight, replica, computed)
                    asked = computed
            await asyncio.sleep(COMPUTED_SECONDS)

    async def _hand_over(self, flight: Flight) -> None:
        """Again and again, while the request is on an engine that is for prompts. Where the other engine was lost, or
        has not got the blocks in time, the next one is tried, which takes from the budget of retries. Where blocks have
        not come and there is no other engine, the request goes on there without them.
        """
        replica, attempts, failed, looks = flight.replica, flight.attempts, set[Replica](), 0
        while replica is not None and flight.attempts == attempts and self._could_move(flight, replica):
            if not self._stays(replica):  # it drains, and its requests leave anyway
                return
            found = [one for one in self._others(flight, replica) if one.ready and one.pool != "prefill"]
            target = self._best(flight, [one for one in found if one not in failed] or found)
            if (
                target is not None
                and self._router.hand_over_pays(flight.next_request(), replica.address, target.address)
                and (not failed or self._budget.take(monotonic(), BUDGET_SPARE))
            ):
                has_blocks = await self._fetched(flight, replica, target)
                failed.add(target)
                if target.ready and (has_blocks or failed.issuperset(found)) and self._can_move(flight, replica):
                    flight.keep_blocks()
                    flight.give_up(MovedError(f"the engine at {replica.address} is for prompts"))
                    return
            looks += 1
            await asyncio.sleep(retry_seconds(looks, self._random))

    async def _fetched(self, flight: Flight, replica: Replica, target: Replica) -> bool:
        """Have another engine fetch all full blocks of a request. Whether it has them, or no engine could."""
        until, connection, asked = monotonic() + AHEAD_SECONDS, target.connection, 0
        while connection is not None and target.connection is connection and target.ready:
            if not (flight.moves_blocks and connection.info.moves_blocks):
                return True
            keys = flight.block_keys()
            if self._has_blocks(target, keys):
                return True
            if asked < len(keys):
                self._ask(connection, flight, replica, len(keys))
                asked = len(keys)
            if monotonic() > until or not self._can_move(flight, replica):
                return False
            await asyncio.sleep(ARRIVE_SECONDS)
        return False

    async def _fetch_ahead(self, flight: Flight, replica: Replica, until: float) -> int:
        """Until few tokens lie behind the blocks that the engine has that a request would go on on. How many it would
        have to compute.

        At once, and that is all of them, where blocks cannot be moved there.
        """
        target, asked, tokens = None, 0, 0
        while self._can_move(flight, replica):
            tokens = len(flight.request.prompt) + len(flight.answered)
            if target is None or not target.ready:
                target, asked = self._best(flight, self._others(flight, replica)), 0
            connection = None if target is None else target.connection
            if target is None or connection is None or not (flight.moves_blocks and connection.info.moves_blocks):
                break
            keys = flight.block_keys()
            there = self._router.index.resumable(keys).get(target.address, 0)
            if max(asked, there) < len(keys):
                self._ask(connection, flight, replica, len(keys))
                asked = len(keys)
            tokens -= there * connection.info.block_tokens
            if tokens <= MOST_TAIL or monotonic() > until:
                break
            await _progress(flight)
        return tokens

    def _ask(self, connection: FleetConnection, flight: Flight, replica: Replica, blocks: int) -> None:
        """For the first blocks of a request."""
        tokens = (*flight.request.prompt, *flight.answered)[: blocks * connection.info.block_tokens + 1]
        connection.send(FetchAhead(tokens, flight.request.cache_salt, replica.address))

    def _has_blocks(self, target: Replica, keys: list[bytes]) -> bool:
        return self._router.index.resumable(keys).get(target.address, 0) == len(keys)

    def _alike(self, replica: Replica) -> list[Replica]:
        """Other engines that take requests, and blocks of this one."""
        return [
            other
            for other in self._members.listed.values()
            if other is not replica and other.ready and other.digest == replica.digest and other.level == replica.level
        ]

    def _others(self, flight: Flight, replica: Replica) -> list[Replica]:
        """Engines on which a request could go on."""
        return flight.candidates(self._members.listed.values(), {replica})

    def _best(self, flight: Flight, found: Collection[Replica]) -> Replica | None:
        if not found:
            return None
        option = self._router.choose(flight.next_request(), [one.address for one in found], flight.session)[0]
        return self._members.listed[option.engine]

    def _stays(self, replica: Replica) -> bool:
        return self._members.listed.get(replica.address) is replica and not replica.lingers

    def _computes_prompt(self, flight: Flight, replica: Replica) -> bool:
        """One that leaves the list, or drains, computes it for nobody who would go on from there."""
        on_it = flight in self._flights and flight.runs_on(replica) and not flight.answered
        return on_it and replica.ready and self._stays(replica)

    def _can_move(self, flight: Flight, replica: Replica) -> bool:
        """One without a token stays until it has some: its blocks are not there yet. One that no other engine can go
        on with ends where it is.
        """
        return self._could_move(flight, replica) and bool(self._others(flight, replica))

    def _could_move(self, flight: Flight, replica: Replica) -> bool:
        """If there were another engine."""
        return flight in self._flights and flight.runs_on(replica) and bool(flight.answered) and flight.resumes


async def _progress(flight: Flight) -> None:
    """Until it has a token or ends; not for long where it does neither."""
    flight.progress.clear()
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_SECONDS):
            await flight.progress.wait()


def _known_blocks(replica: Replica) -> int:
    return replica.stats.blocks_held + replica.stats.blocks_cached
