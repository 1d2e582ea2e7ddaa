"""How a server talks to the engine that it serves, wherever that runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from runtime.gateway.engines.unread import Unread
from runtime.wire.messages import Delta, EngineInfo, EngineStats, GenerateRequest
from runtime.wire.start import EngineSettings
from tapeout.errors import TapeoutError


class EngineDownError(TapeoutError):
    """The engine has ended or does not answer; a later request may succeed, once it was started or reached again."""


class OpenEngine(Protocol):
    """An engine that takes requests, or is about to."""

    @property
    def info(self) -> EngineInfo: ...

    async def files(self) -> Path:
        """A folder with the files of its bundle that :attr:`EngineInfo.files` names."""
        ...


# Is awaited when an engine has opened, before it gets requests.
Opened = Callable[[OpenEngine], Awaitable[None]]


class EngineClient(OpenEngine, Protocol):
    async def open(self, opened: Opened | None = None) -> None:
        """Wait for the engine; :class:`TapeoutError` if it cannot be opened. ``opened``: of it, and of each later one.

        If that fails, so does the opening.
        """
        ...

    @property
    def bundles(self) -> Mapping[str, EngineInfo]:
        """By digest: those whose engines get requests. :attr:`info` is of one of them."""
        ...

    def info_for(self, opening: bytes) -> EngineInfo:
        """Of the engines that a conversation with this opening goes to. See :mod:`runtime.gateway.fleet.release`."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Of the last report."""
        ...

    @property
    def unread(self) -> Unread:
        """What engines have sent and clients have not read."""
        ...

    @property
    def ready(self) -> bool:
        """The engine takes requests: it is open, and neither draining nor being started again."""
        ...

    @property
    def healthy(self) -> bool:
        """The engine lives, and has made progress within the last seconds or has nothing to do."""
        ...

    @property
    def silent_seconds(self) -> float | None:
        """Since the engine has reported; None before it has."""
        ...

    def generate(
        self, request: GenerateRequest, age: float = 0.0, session: str = "", digest: str = ""
    ) -> AsyncGenerator[Delta]:
        """The deltas of a request, up to the one with a finish reason. Closing the iterator cancels the request.

        ``age``: seconds since it arrived, from which its timeouts count. ``session``: its conversation, if the
        user names one. Only a client of many engines uses it, to choose among them; no engine gets it. ``digest``: of
        the bundle that it was encoded for, likewise; empty: that of :attr:`info`.

        :class:`RequestError` for a request that can never run, :class:`runtime.wire.limits.QueueFullError` without room
        in the queue, :class:`EngineDownError` if the engine ends meanwhile,
        :class:`runtime.gateway.engines.unread.SlowReaderError` if too many deltas wait to be taken.
        """
        ...

    def level_of(self, id: str) -> str:
        """The processor level of a running request's engine, where engines may have different ones; else empty."""
        ...

    async def swap(self, bundle: str, settings: EngineSettings | None = None) -> None:
        """Open another bundle, give it all new requests, and leave the old engine once its requests have ended.

        ``bundle``: a folder, or where the engine runs elsewhere the address of another one. ``settings``: instead of
        those that opened the engine before. If the engine does not open, or gives no token, the old one stays and the
        reason is raised as :class:`TapeoutError`.
        """
        ...

    async def drain(self, timeout: float) -> None:
        """Take no more requests, and wait until the running ones have ended; after ``timeout`` seconds cancel them."""
        ...

    async def close(self) -> None: ...
