"""Requests that leave an engine before they have ended: one that drains, or one that is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

from runtime.gateway.fleet.change import Change
from runtime.gateway.fleet.flight import ElsewhereError, Flight, MovedError
from runtime.gateway.fleet.members import Members
from runtime.gateway.fleet.replica import Replica, ReplicaState

MOVE_SECONDS = 2.0  # for the first token of a request elsewhere, until the next one leaves an engine that drains
LOOK_SECONDS = 0.1  # between two looks for requests to move, where no change is told of


class Moves:
    """``flights``: all requests on their way, as they come and go."""

    def __init__(self, flights: Collection[Flight], members: Members, change: Change) -> None:
        self._flights, self._members, self._change = flights, members, change
        self._draining: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for draining in self._draining:
            draining.cancel()

    def leave_silent(self, replica: Replica) -> None:
        """Requests on a suspected engine go on elsewhere, where there is such a place. Else they stay: it may go on."""
        if not replica.suspected:
            return
        for flight in list(self._flights):
            if flight.runs_on(replica) and (flight.resumes or not flight.answered) and self._has_other(flight, replica):
                flight.give_up(ElsewhereError(f"the engine at {replica.address} is silent"))

    def leave_draining(self, replica: Replica) -> None:
        """Have the requests on an engine that drains go on elsewhere, where there is such a place: there they fetch
        their blocks from this one. One after another, so that none waits for the rest of another's prompt.
        """
        draining = asyncio.create_task(self._drain(replica))
        self._draining.add(draining)
        draining.add_done_callback(self._draining.discard)

    async def _drain(self, replica: Replica) -> None:
        while replica.state is not ReplicaState.GONE:
            flight = next((flight for flight in self._flights if self._can_move(flight, replica)), None)
            if flight is None:
                await self._change.wait(LOOK_SECONDS)
                continue
            attempts = flight.attempts
            flight.keep_blocks()
            flight.give_up(MovedError(f"the engine at {replica.address} drains"))
            with suppress(TimeoutError):
                async with asyncio.timeout(MOVE_SECONDS):
                    while flight in self._flights and flight.brought <= attempts:
                        flight.progress.clear()
                        await flight.progress.wait()

    def _can_move(self, flight: Flight, replica: Replica) -> bool:
        """One without a token stays until it has some: its blocks are not there yet. One that no other engine can go
        on with ends where it is.
        """
        return flight.runs_on(replica) and bool(flight.answered) and flight.resumes and self._has_other(flight, replica)

    def _has_other(self, flight: Flight, replica: Replica) -> bool:
        return bool(flight.candidates(self._members.listed.values(), {replica}))
