"""The deltas that engines have sent and no client has read yet, and how much memory of the server they may take.

A client that reads slowly holds up only its own stream: its engine goes on, and what comes waits here. An engine's
memory is never held for it. Beyond a limit the request is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from runtime.wire.messages import Delta, TokenLogprobs
from tapeout.errors import TapeoutError

# As CPython holds them, about; a test compares.
DELTA_BYTES = 220
TOKEN_BYTES = 40
LOGPROBS_BYTES = 160  # of a token
LIKELY_BYTES = 116  # of each of the likeliest tokens that come with it


class SlowReaderError(TapeoutError):
    """A client has left so much unread that its request was ended."""


@dataclass(frozen=True)
class UnreadLimits:
    """``stream_bytes``: of one request, which has one response; that is 32,000 tokens, or 3,000 with the 20 likeliest
    of each. ``bytes``: of all requests of a server.
    """

    stream_bytes: int = 8 << 20
    bytes: int = 256 << 20


class Unread:
    """Of all requests of a server. ``ended``: requests that were ended by a limit.

    Beyond the limit of all, the request that has most goes, so that none suffers for another's client.
    """

    def __init__(self, limits: UnreadLimits | None = None) -> None:
        self.limits, self.bytes, self.ended = limits or UnreadLimits(), 0, 0
        self._behind: set[DeltaStream] = set()

    def add(self, stream: DeltaStream, bytes: int) -> None:
        first = not stream.unread_bytes  # of whatever size: a client that reads must be able to get it
        self._behind.add(stream)
        self.bytes += bytes
        stream.unread_bytes += bytes
        if not first and stream.unread_bytes > self.limits.stream_bytes:
            self._end(stream, f"the client has left {_mb(stream.unread_bytes)} of the response unread")
        while self.bytes > self.limits.bytes and self._behind:
            most = max(self._behind, key=lambda one: one.unread_bytes)
            self._end(most, f"clients have left {_mb(self.bytes)} unread, and this one most of them")

    def take(self, stream: DeltaStream, bytes: int) -> None:
        """So many were read, or dropped."""
        self.bytes -= bytes
        stream.unread_bytes -= bytes
        if not stream.unread_bytes:
            self._behind.discard(stream)

    def _end(self, stream: DeltaStream, found: str) -> None:
        self.ended += 1
        self._behind.discard(stream)
        stream.end(SlowReaderError(found, expected="a client that reads while tokens come"))


class DeltaStream:
    """The deltas of one request that nobody has taken yet. ``cancel``: tells its engine that nobody waits any more."""

    def __init__(self, id: str, unread: Unread, cancel: Callable[[DeltaStream], None]) -> None:
        self.id = id
        self.unread_bytes = 0
        self._taken_bytes = 0  # of these, what :meth:`next` has given last: the client may not have read it yet
        self._unread, self._cancel = unread, cancel
        self._deltas: list[Delta] = []
        self._error: TapeoutError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._left = False

    def push(self, delta: Delta) -> None:
        if self._left:
            return
        self._deltas.append(delta)
        if self._waiter is None:  # else the next turn of the event loop takes it
            self._unread.add(self, held_bytes(delta))
        else:
            self._wake()

    def fail(self, error: TapeoutError) -> None:
        self._error = error
        self._wake()

    def end(self, error: TapeoutError) -> None:
        """Cancel the request, and forget what nobody has taken; the error follows what was."""
        self._forget()
        self.fail(error)
        self._cancel(self)

    def cancel(self) -> None:
        """Its engine is to end it; that can still be read."""
        self._cancel(self)

    def leave(self) -> None:
        """Nobody takes any more. What may still come is forgotten, too."""
        self._taken_bytes = 0
        self._forget()
        self._cancel(self)

    async def next(self) -> list[Delta]:
        """At least one delta, in order; the request's error once there are no more. Those before it have been read."""
        if self._taken_bytes:
            self._unread.take(self, self._taken_bytes)
            self._taken_bytes = 0
        if not self._deltas and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        self._taken_bytes = self.unread_bytes
        if not deltas:
            assert self._error is not None
            raise self._error
        return deltas

    def _forget(self) -> None:
        self._left, self._deltas = True, []
        self._unread.take(self, self.unread_bytes - self._taken_bytes)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def held_bytes(delta: Delta) -> int:
    """About what a delta takes in memory.

    >>> held_bytes(Delta("a", (1,))), held_bytes(Delta("a", (1,), (TokenLogprobs(1, -0.5, ((1, -0.5), (2, -0.9))),)))
    (260, 652)
    """
    size = DELTA_BYTES + TOKEN_BYTES * len(delta.tokens)
    for listed in (delta.logprobs, delta.prompt_logprobs):
        if listed is not None:
            size += _logprobs_bytes(listed)
    return size


def _logprobs_bytes(listed: Iterable[TokenLogprobs | None]) -> int:
    return sum(LOGPROBS_BYTES + LIKELY_BYTES * len(found.top) for found in listed if found is not None)


def _mb(bytes: int) -> str:
    return f"{bytes / 1e6:.1f} MB"
