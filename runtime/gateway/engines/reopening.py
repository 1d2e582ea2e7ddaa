"""What clients of engines share, wherever the engine runs: requests go to one connection, which can be replaced."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Mapping
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

from runtime.gateway.engines.client import EngineDownError, Opened
from runtime.gateway.engines.connection import EngineConnection
from runtime.gateway.engines.unread import Unread
from runtime.wire.messages import Delta, EngineInfo, EngineStats, GenerateRequest
from runtime.wire.start import EngineSettings
from tapeout.errors import TapeoutError

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.25  # between two looks at the engine
CLOSE_SECONDS = 5.0  # that an engine has to end what was cancelled
BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before the engine is opened again
STEADY_SECONDS = 60.0  # after which an engine that has ended is opened again without delay

C = TypeVar("C", bound=EngineConnection)


class ReopeningClient(ABC, Generic[C]):
    """An :class:`EngineClient`. An engine that has ended, or is stuck, is opened again, later each time.

    :meth:`open` waits for the engine and must come first. ``quiet_seconds``: an engine that sends no report for so long
    is not healthy: it reports after each step, and twice a second while idle. After ``stuck_seconds`` it is given up.
    ``open_seconds``: that it may take to open.
    """

    def __init__(self, current: C, *, quiet_seconds: float, stuck_seconds: float, open_seconds: float) -> None:
        self._quiet_seconds, self._stuck_seconds, self._open_seconds = quiet_seconds, stuck_seconds, open_seconds
        self._current = current
        self._connections = {current}
        self.unread = Unread()
        self._opened: Opened | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()  # of the current connection
        self._draining = False
        self.restarts = 0  # how often the engine was opened again

    @abstractmethod
    def start(self, bundle: str, settings: EngineSettings | None) -> C:
        """A connection that :meth:`EngineConnection.open` opens. ``settings`` None: those of the one before."""

    async def open(self, opened: Opened | None = None) -> None:
        """See :meth:`EngineClient.open`."""
        self._opened = opened
        await self._open(self._current)
        self._spawn(self._watch())

    @property
    def info(self) -> EngineInfo:
        return self._current.info

    @property
    def bundles(self) -> Mapping[str, EngineInfo]:
        return {self.info.digest: self.info}

    def info_for(self, opening: bytes) -> EngineInfo:
        return self.info

    @property
    def stats(self) -> EngineStats:
        return self._current.stats

    @property
    def ready(self) -> bool:
        return self._current.serves and not self._draining

    @property
    def healthy(self) -> bool:
        return self._current.serves and self._current.silent_seconds < self._quiet_seconds

    @property
    def silent_seconds(self) -> float | None:
        return self._current.silent_seconds if self._current.reported else None

    async def files(self) -> Path:
        return await self._current.files()

    async def generate(
        self, request: GenerateRequest, age: float = 0.0, session: str = "", digest: str = ""
    ) -> AsyncGenerator[Delta]:
        if self._draining:
            raise EngineDownError("the server is shutting down", remedy="send the request to another server")
        connection = self._current
        stream = connection.add(request, age)
        try:
            while True:
                for delta in await stream.next():
                    yield delta
                    if delta.finish_reason is not None:
                        return
        finally:
            stream.leave()

    def level_of(self, id: str) -> str:
        return ""

    async def swap(self, bundle: str, settings: EngineSettings | None = None) -> None:
        async with self._changing:
            new = self.start(bundle, settings)
            await self._open(new, probe=True)
            old, self._current = self._current, new
            self.replaced(old)
        logger.info("requests go to %s from now on", bundle)
        self._spawn(self._retire(old))

    def replaced(self, old: C) -> None:
        """Another connection has taken its place."""

    async def drain(self, timeout: float) -> None:
        self._draining = True
        if await self._all_idle(timeout):
            return
        logger.warning("requests that still run after %g seconds are cancelled", timeout)
        for connection in self._connections:
            connection.cancel_all()
        if not await self._all_idle(CLOSE_SECONDS):
            for connection in self._connections:
                connection.fail("does not answer")

    async def close(self) -> None:
        self._draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*[connection.close() for connection in self._connections])
        self._connections.clear()

    async def _open(self, new: C, *, probe: bool = False) -> None:
        """``probe``: ask it for a token, too. An engine that opens can still fail in its first step."""
        self._connections.add(new)
        new.unread = self.unread
        try:
            await new.open(self._open_seconds)
            if probe:
                await new.first_token(self._open_seconds)
            if self._opened is not None:
                await self._opened(new)
        except BaseException:
            self._connections.discard(new)
            await new.close()
            raise

    async def _retire(self, connection: C) -> None:
        await connection.idle.wait()
        await connection.close()
        self._connections.discard(connection)

    async def _all_idle(self, timeout: float) -> bool:
        waits = [asyncio.ensure_future(connection.idle.wait()) for connection in self._connections]
        _, pending = await asyncio.wait(waits, timeout=timeout)
        for wait in pending:
            wait.cancel()
        return not pending

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Give up an engine that is stuck, and open one that has ended again, later each time."""
        failures, steady_since = 0, monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for connection in self._connections:
                if connection.serves and connection.silent_seconds > self._stuck_seconds:
                    connection.fail(f"has not reported for {self._stuck_seconds:g} seconds")
            if not self._current.down or self._draining:
                continue
            if monotonic() - steady_since > STEADY_SECONDS:
                failures = 0
            await asyncio.sleep(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)])
            failures += 1
            await self._reopen()
            steady_since = monotonic()

    async def _reopen(self) -> None:
        async with self._changing:
            old = self._current
            if not old.down:  # another bundle took its place meanwhile
                return
            self.restarts += 1
            try:
                new = self.start(old.bundle, None)
                await self._open(new)
            except (TapeoutError, OSError) as error:
                logger.error("%s cannot be opened again: %s", old.name, error)
                return
            self._current = new
            self.replaced(old)
            self._connections.discard(old)
            await old.close()
            logger.warning("%s was opened again", old.name)
