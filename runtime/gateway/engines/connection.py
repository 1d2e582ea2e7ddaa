"""A server's connection to one engine, and the requests on it."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.unread import DeltaStream, Unread
from runtime.wire.codec import WireError, encode, encode_checked
from runtime.wire.failures import Failure
from runtime.wire.messages import (
    Add,
    Cancel,
    Command,
    EngineInfo,
    EngineStats,
    FilePart,
    GenerateRequest,
    Heartbeat,
    Leaving,
    ReadFile,
    StepReport,
    WatchBlocks,
)
from runtime.wire.session import Session
from tapeout.errors import RequestError, TapeoutError

PART_SECONDS = 30.0  # that a part of a file may take: an engine sends it between two steps

logger = logging.getLogger(__name__)


class EngineConnection(asyncio.Protocol, ABC):
    """``name``: of the engine in messages. ``bundle``: what was asked for. ``key``: see :class:`Session`.

    :meth:`open` comes first. Whatever goes wrong, :meth:`fail` ends the connection and all its requests, once.
    ``unread``: of all connections of a server, if it has several.
    """

    remedy = ""  # once the engine is down

    def __init__(self, name: str, bundle: str, key: bytes = b"") -> None:
        self.name, self.bundle = name, bundle
        self.unread = Unread()
        self.stats = EngineStats()
        self.down = False
        self.leaving = False  # the engine is about to open another bundle
        self.idle = asyncio.Event()  # it has no requests
        self.idle.set()
        self._info: EngineInfo | None = None
        self._closing = False
        self._heard: Callable[[StepReport], int | None] | None = None
        self._reported_at = self._heard_at = monotonic()
        self._streams: dict[str, DeltaStream] = {}
        self._opened: asyncio.Future[EngineInfo] | None = None
        self._part: asyncio.Future[FilePart] | None = None
        self._session = Session("server", key)
        self._transport: asyncio.Transport | None = None
        self._arrived = select.poll()

    @abstractmethod
    async def connect(self) -> None:
        """:class:`OSError` or :class:`TapeoutError` if it fails."""

    @abstractmethod
    async def files(self) -> Path: ...

    @abstractmethod
    async def close(self) -> None:
        """Requests that still run are lost."""

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "open() has not returned yet"
        return self._info

    @property
    def reported(self) -> bool:
        return self._info is not None

    @property
    def serves(self) -> bool:
        return self._info is not None and not self.down

    @property
    def silent_seconds(self) -> float:
        """Since the last report; 0 if there may be one that the event loop had no time to read."""
        return self._since(self._reported_at)

    @property
    def unheard_seconds(self) -> float:
        """Since its process has said anything: a heartbeat comes, too, while a step takes long."""
        return self._since(self._heard_at)

    async def open(self, timeout: float) -> None:
        self._opened = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self.connect()
                self._info = await self._opened
        except TimeoutError:
            raise EngineDownError(
                f"the engine of {self.bundle} is not open after {timeout:g} seconds",
                remedy="look at what its process has printed",
            ) from None

    def add(self, request: GenerateRequest, age: float = 0.0, source: str = "") -> DeltaStream:
        """``age``, ``source``: see :class:`Add`."""
        if not self.serves:
            raise EngineDownError("the engine is being started", remedy="retry in a few seconds")
        if request.id in self._streams:
            raise RequestError(f"request {request.id} is there already", expected="an id of its own")
        self._write(encode_checked(Add(request, age, source)))
        stream = self._streams[request.id] = self._stream(request.id)
        self.idle.clear()
        return stream

    async def first_token(self, timeout: float) -> None:
        """Of a request of its own; its error, if it gets none within ``timeout`` seconds."""
        stream = self.add(GenerateRequest(f"probe-{uuid.uuid4().hex}", [0], 1))
        try:
            async with asyncio.timeout(timeout):
                while not any(delta.finish_reason for delta in await stream.next()):
                    pass
        except TimeoutError:
            raise self._down("gives no token") from None
        finally:
            stream.leave()

    def runs(self, stream: DeltaStream) -> bool:
        """Its engine has not ended it."""
        return self._streams.get(stream.id) is stream

    def cancel_all(self) -> None:
        for id in self._streams:
            self.send(Cancel(id))

    def watch(self, turn: int, heard: Callable[[StepReport], int | None]) -> None:
        """Have the engine report by which blocks and how soon it can answer, see :class:`WatchBlocks`.

        ``heard``: is given each such report, and returns a turn where the engine must begin anew.
        """
        self._heard = heard
        self.send(WatchBlocks(turn))

    async def read(self, sha256: str, offset: int) -> bytes:
        """A part of a file of the bundle; empty at its end. One at a time."""
        if self.down:
            raise self._down("has ended")
        self._part = asyncio.get_running_loop().create_future()
        self.send(ReadFile(sha256, offset))
        try:
            async with asyncio.timeout(PART_SECONDS):
                part = await self._part
        except TimeoutError:
            raise self._down(f"has sent no part of a file for {PART_SECONDS:g} seconds") from None
        if (part.sha256, part.offset) != (sha256, offset):
            raise WireError("a part of another file", expected=f"{sha256[:12]} from byte {offset} on")
        return part.data

    def fail(self, why: str) -> None:
        """The engine is of no use any more: end the connection, and all its requests."""
        if self.down:
            return
        self.down = True
        if self._transport is not None:
            self._transport.abort()
        if not self._closing:
            logger.error("%s %s; requests that are lost: %d", self.name, why, len(self._streams))
        for waiting in (self._opened, self._part):
            if waiting is not None and not waiting.done():
                waiting.set_exception(self._down(why))
                waiting.exception()  # nobody may be waiting any more
        for stream in self._streams.values():
            stream.fail(self._down(why))
        self._streams.clear()
        self.idle.set()

    def send(self, command: Command) -> None:
        self._write(encode(command))

    def connection_made(self, transport: Any) -> None:
        # Event loops make sockets non-blocking, so this end is theirs alone: they continue what was read or written in
        # part. While the engine is in a step it reads nothing, and commands wait in the transport.
        self._transport = transport
        end: socket.socket = transport.get_extra_info("socket")
        self._arrived.register(end.fileno(), select.POLLIN)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._heard_at = now = monotonic()
        try:
            try:
                for message in self._session.receive(data):
                    if not isinstance(message, Heartbeat):
                        self._reported_at = now
                        self._dispatch(message)
            finally:
                self._flush()
        except TapeoutError as error:
            if self._opened is not None and not self._opened.done():
                self._opened.set_exception(error)
            self.fail(f"cannot be understood: {error.found}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail("has ended")

    def _stream(self, id: str) -> DeltaStream:
        return DeltaStream(id, self.unread, self._cancel)

    def _cancel(self, stream: DeltaStream) -> None:
        """Unless it has ended."""
        if self.runs(stream):
            self.send(Cancel(stream.id))

    def _since(self, then: float) -> float:
        return 0.0 if self.serves and self._arrived.poll(0) else monotonic() - then

    def _flush(self) -> None:
        assert self._transport is not None
        if self._session.outgoing:
            self._transport.write(bytes(self._session.outgoing))
            self._session.outgoing.clear()

    def _write(self, payload: bytes) -> None:
        if self._transport is not None and not self.down:
            self._transport.write(self._session.seal(payload))

    def _down(self, why: str) -> EngineDownError:
        return EngineDownError(f"{self.name} {why}", remedy=self.remedy)

    def _dispatch(self, message: object) -> None:
        if self._opened is None or not self._opened.done():
            self._answer(message)
        elif isinstance(message, StepReport):
            self._report(message)
        elif isinstance(message, Leaving):
            self.leaving = True
        elif isinstance(message, FilePart) and self._part is not None and not self._part.done():
            self._part.set_result(message)
        else:
            raise WireError(f"{type(message).__name__} that nobody asked for", expected="a report")

    def _answer(self, message: object) -> None:
        if self._opened is None:
            return
        if isinstance(message, Failure):
            self._opened.set_exception(message.error())
        elif isinstance(message, EngineInfo):
            self._opened.set_result(message)
        else:
            raise WireError(f"{type(message).__name__} as the first answer", expected="EngineInfo")

    def _report(self, report: StepReport) -> None:
        self.stats = report.stats
        if report.routing is not None and self._heard is not None and (turn := self._heard(report)) is not None:
            self.send(WatchBlocks(turn))
        streams = self._streams
        for delta in report.deltas:
            id = delta.id
            stream = streams.get(id) if delta.finish_reason is None else streams.pop(id, None)
            if stream is not None:
                stream.push(delta)
        for id, error in report.refusals:
            stream = streams.pop(id, None)
            if stream is not None:
                stream.fail(error)
        if not streams:
            self.idle.set()
