"""A request on its way through a fleet: what it has answered, and the engine that it is on, if any."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from time import monotonic

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.unread import DeltaStream
from runtime.gateway.fleet.connection import FleetConnection
from runtime.gateway.fleet.replica import Replica
from runtime.wire.block_keys import block_keys
from runtime.wire.messages import GenerateRequest, Pool
from tapeout.errors import TapeoutError


class ElsewhereError(EngineDownError):
    """The engine is suspected; the request goes on elsewhere."""


class MovedError(ElsewhereError):
    """The engine drains or is for prompts; the request goes on elsewhere with its blocks."""


@dataclass(eq=False)
class Flight:
    """``homeless_since``: when it was last without an engine and brought no token since.

    ``session`` and ``digest``: see :meth:`EngineClient.generate`. ``left``: an engine that still has its blocks.
    ``brought``: the attempt that brought its last token, which ``progress`` tells of.
    """

    request: GenerateRequest
    session: str
    digest: str
    arrival: float
    homeless_since: float
    answered: list[int] = field(default_factory=list[int])
    level: str = ""  # of the engines that have answered
    attempts: int = 0
    left: str = ""
    brought: int = 0
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    replica: Replica | None = None
    connection: FleetConnection | None = None
    stream: DeltaStream | None = None
    _keys: list[bytes] = field(default_factory=list[bytes])

    @property
    def timeout(self) -> float:
        """When it has taken too long, while it is on no engine."""
        request, timeouts = self.request, [self.request.timeout]
        if not self.answered:
            timeouts += [request.queue_timeout, request.first_token_timeout]
        return self.arrival + min([seconds for seconds in timeouts if seconds is not None], default=float("inf"))

    @property
    def resumes(self) -> bool:
        """Another engine could go on with what this one has answered."""
        return self.connection is not None and self.connection.resumes(self.request)

    @property
    def moves_blocks(self) -> bool:
        """The engine that it is on hands its blocks out."""
        return self.connection is not None and self.connection.info.moves_blocks

    def block_keys(self) -> list[bytes]:
        """Of the full blocks that its engine has."""
        if self.connection is not None:
            tokens, size = [*self.request.prompt, *self.answered], self.connection.info.block_tokens
            if (len(tokens) - 1) // size > len(self._keys):
                self._keys = block_keys(tokens[:-1], size, self.request.cache_salt, self._keys)
        return self._keys

    def runs_on(self, replica: Replica) -> bool:
        """Also where the client has not read yet what came, but not where that is all."""
        connection = self.connection
        if connection is None or self.stream is None:
            return False
        return self.replica is replica and connection is replica.connection and connection.runs(self.stream)

    def next_request(self) -> GenerateRequest:
        """What the next engine gets. Its id is new: the engine before may still have the old one.

        With an answer it has left the queue in time, and had its first token.
        """
        request, number = self.request, self.attempts
        if number:
            request = replace(request, id=f"{request.id}~{number}")
        if self.answered:
            fields = {"prompt_logprobs": None, "queue_timeout": None, "first_token_timeout": None}
            request = replace(request, answered=tuple(self.answered), **fields)
        return request

    def candidates(self, listed: Iterable[Replica], refused: Collection[Replica] = ()) -> list[Replica]:
        """Engines that take requests and can go on with this one; without any, those that are about to leave.

        Of these, the ones whose pool it is for: others only where there are none.
        """
        found = [
            replica
            for replica in listed
            if replica.digest == self.digest
            and replica not in refused
            and (not self.answered or replica.level == self.level)
        ]
        found = [replica for replica in found if replica.ready] or [replica for replica in found if replica.lingers]
        others: Pool = "prefill" if self.answered else "decode"
        return [replica for replica in found if replica.pool != others] or found

    def land(self, replica: Replica, connection: FleetConnection, source: str) -> DeltaStream:
        """``source``: see :class:`EngineOption`."""
        self.replica, self.connection = replica, connection
        self.stream = connection.add(self.next_request(), monotonic() - self.arrival, self.left or source)
        self.attempts, self.left = self.attempts + 1, ""
        return self.stream

    def brings(self, tokens: Iterable[int], level: str) -> None:
        self.answered += tokens
        self.level, self.brought = level, self.attempts
        self.progress.set()

    def cancel(self) -> None:
        if self.stream is not None:
            self.stream.cancel()

    def keep_blocks(self) -> None:
        """Where it goes next, its blocks are to be fetched from the engine that it is on, if that hands them out."""
        if self.replica is not None and self.moves_blocks:
            self.left = self.replica.address

    def leave(self) -> None:
        if self.stream is not None:
            self.stream.leave()
        self.replica = self.connection = self.stream = None

    def give_up(self, error: TapeoutError) -> None:
        """Cancel it on its engine; ``error`` follows what has come of it."""
        if self.connection is not None and self.stream is not None:
            self.connection.give_up(self.stream, error)


def seeded(request: GenerateRequest) -> GenerateRequest:
    """With a seed of its own if it draws: another engine must be able to go on."""
    if request.sampling.seed is not None or not request.sampling.temperature:
        return request
    return replace(request, sampling=replace(request.sampling, seed=secrets.randbits(64)))
