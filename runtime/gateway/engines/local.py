"""How a server talks to an engine that runs in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from time import monotonic
from typing import Protocol

from runtime.engine.opening import OpenEngine, Start
from runtime.wire.limits import Limits
from runtime.wire.messages import (
    Add,
    Cancel,
    Close,
    Command,
    Delta,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    StepReport,
)
from tapeout.cores import usable
from tapeout.errors import RequestError, TapeoutError

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.25  # between two looks at the engine's process
CLOSE_SECONDS = 5.0  # that a process has to end
BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before the process is started again
SIZE = struct.Struct("!i")  # of a message, ahead of it
STEADY_SECONDS = 60.0  # after which a process that has ended is started again without delay


class EngineDownError(TapeoutError):
    """The engine's process has ended or does not answer; it is started again, and a later request may succeed."""


class EngineClient(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats:
        """Of the last report."""
        ...

    @property
    def ready(self) -> bool:
        """The engine takes requests: it is open, and neither draining nor being started again."""
        ...

    @property
    def healthy(self) -> bool:
        """The engine's process lives, and has made progress within the last seconds or has nothing to do."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """The deltas of a request, up to the one with a finish reason. Closing the iterator cancels the request.

        :class:`RequestError` for a request that can never run, :class:`runtime.wire.limits.QueueFullError` without room
        in the queue, :class:`EngineDownError` if the engine ends meanwhile.
        """
        ...

    async def swap(self, folder: Path, opener: OpenEngine | None = None) -> None:
        """Open another bundle, give it all new requests, and close the old engine once its requests have ended.

        ``opener``: instead of the one that opened the engine before. If it does not open, or gives no token, the old
        one stays and the reason is raised as :class:`TapeoutError`.
        """
        ...

    async def drain(self, timeout: float) -> None:
        """Take no more requests, and wait until the running ones have ended; after ``timeout`` seconds cancel them."""
        ...

    async def close(self) -> None: ...


class ProcessClient:
    """See :class:`EngineClient`. The process is started at once, so that it opens the engine while a server imports.

    :meth:`open` waits for the engine and must come first. ``quiet_seconds``: an engine that sends no report for so long
    is not healthy: it reports after each step, and twice a second while idle. After ``stuck_seconds`` it is killed and
    started again. ``open_seconds``: that it may take to open.
    """

    def __init__(
        self,
        folder: Path,
        opener: OpenEngine,
        limits: Limits | None = None,
        *,
        quiet_seconds: float = 5.0,
        stuck_seconds: float = 30.0,
        open_seconds: float = 300.0,
    ) -> None:
        self._opener, self._limits, self._cores = opener, limits or Limits(), usable()
        self._quiet_seconds, self._stuck_seconds, self._open_seconds = quiet_seconds, stuck_seconds, open_seconds
        self._processes: set[_EngineProcess] = set()
        self._current = self._start(folder, opener)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()  # of the current process
        self._draining = self._paused = False
        self.restarts = 0  # how often the process was started again

    async def open(self) -> None:
        """Wait for the engine; :class:`TapeoutError` if it cannot be opened."""
        await self._open(self._current)
        self._spawn(self._watch())

    @property
    def info(self) -> EngineInfo:
        info = self._current.info
        assert info is not None, "open() has not returned yet"
        return info

    @property
    def stats(self) -> EngineStats:
        return self._current.stats

    @property
    def ready(self) -> bool:
        return self._current.serves and not self._draining

    @property
    def healthy(self) -> bool:
        return self._current.serves and self._current.silent_seconds < self._quiet_seconds

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        if self._draining:
            raise EngineDownError("the server is shutting down", remedy="send the request to another server")
        process = self._current
        stream = process.add(request)
        try:
            while True:
                for delta in await stream.next():
                    yield delta
                    if delta.finish_reason is not None:
                        return
        finally:
            process.abandon(stream)

    async def swap(self, folder: Path, opener: OpenEngine | None = None) -> None:
        async with self._changing:
            opener = opener or self._opener
            new = self._start(folder, opener)
            await self._open(new, probe=True)
            old, self._current, self._opener = self._current, new, opener
            if self._paused:
                new.pause()
                old.resume()  # its requests end
        logger.info("requests go to %s from now on", folder)
        self._spawn(self._retire(old))

    def pause(self) -> None:
        """Stop the engine's process until :meth:`resume`; requests wait meanwhile. While it opens it is not stopped."""
        self._paused = True
        self._current.pause()

    def resume(self) -> None:
        self._paused = False
        self._current.resume()

    async def drain(self, timeout: float) -> None:
        self._draining = True
        if await self._all_idle(timeout):
            return
        logger.warning("requests that still run after %g seconds are cancelled", timeout)
        for process in self._processes:
            process.cancel_all()
        if not await self._all_idle(CLOSE_SECONDS):
            for process in self._processes:
                process.fail("does not answer")

    async def close(self) -> None:
        self._draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*[process.close() for process in self._processes])
        self._processes.clear()

    def _start(self, folder: Path, opener: OpenEngine) -> _EngineProcess:
        process = _EngineProcess(Start(folder, opener, self._limits, self._cores))
        self._processes.add(process)
        return process

    async def _open(self, process: _EngineProcess, *, probe: bool = False) -> None:
        """``probe``: ask it for a token, too. An engine that opens can still fail in its first step."""
        try:
            await process.open(self._open_seconds)
            if probe:
                await process.first_token(self._open_seconds)
        except BaseException:
            self._processes.discard(process)
            await process.close()
            raise

    async def _retire(self, process: _EngineProcess) -> None:
        await process.idle.wait()
        await process.close()
        self._processes.discard(process)

    async def _all_idle(self, timeout: float) -> bool:
        waits = [asyncio.ensure_future(process.idle.wait()) for process in self._processes]
        _, pending = await asyncio.wait(waits, timeout=timeout)
        for wait in pending:
            wait.cancel()
        return not pending

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Kill a process that is stuck, and start one that has ended again, later each time."""
        failures, steady_since = 0, monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for process in self._processes:
                if process.serves and process.silent_seconds > self._stuck_seconds:
                    process.fail(f"has not reported for {self._stuck_seconds:g} seconds")
            if not self._current.down or self._draining:
                continue
            if monotonic() - steady_since > STEADY_SECONDS:
                failures = 0
            await asyncio.sleep(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)])
            failures += 1
            await self._restart()
            steady_since = monotonic()

    async def _restart(self) -> None:
        async with self._changing:
            old = self._current
            if not old.down:  # another bundle took its place meanwhile
                return
            self.restarts += 1
            try:
                new = self._start(old.folder, self._opener)
                await self._open(new)
            except (TapeoutError, OSError) as error:
                logger.error("the engine cannot be started again: %s", error)
                return
            self._current = new
            if self._paused:
                new.pause()
            self._processes.discard(old)
            await old.close()
            logger.warning("the engine was started again")


class _Stream:
    """The deltas of one request that nobody has taken yet."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._deltas: list[Delta] = []
        self._error: TapeoutError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: TapeoutError) -> None:
        self._error = error
        self._wake()

    async def next(self) -> list[Delta]:
        """At least one delta, in order; the request's error once there are no more."""
        if not self._deltas and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        if not deltas:
            assert self._error is not None
            raise self._error
        return deltas

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Messages(asyncio.Protocol):
    """Cuts what arrives into messages. The other end is a :class:`multiprocessing.connection.Connection`."""

    def __init__(self, receive: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._receive, self._lost, self._data = receive, lost, bytearray()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= SIZE.size:
            end = SIZE.size + SIZE.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            message = bytes(self._data[SIZE.size : end])
            del self._data[:end]
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


class _EngineProcess:
    """One process and its requests. It is started by the constructor; :meth:`open` needs an event loop."""

    def __init__(self, start: Start) -> None:
        self.folder = start.folder
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.down = self._closing = self._paused = False
        self._answered = False  # the first message has come; reports follow
        self.idle = asyncio.Event()  # it has no requests
        self.idle.set()
        self._reported_at = monotonic()
        self._streams: dict[str, _Stream] = {}
        self._opened: asyncio.Future[EngineInfo] | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            # Not by multiprocessing: its child would import the server's main module again.
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from runtime.engine.worker import main; main({descriptor})"],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._socket = ours
        self._arrived = select.poll()
        self._arrived.register(ours, select.POLLIN)
        self._transport: asyncio.WriteTransport | None = None
        self._send(start)

    @property
    def serves(self) -> bool:
        return self.info is not None and not self.down

    @property
    def silent_seconds(self) -> float:
        """Since the last report; 0 if there is one that the event loop had no time to read, or while it is paused."""
        return 0.0 if self._paused or self._arrived.poll(0) else monotonic() - self._reported_at

    def pause(self) -> None:
        if self.serves and not self._paused:  # one that is being opened has a time limit
            self._paused = True
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._paused:
            self._paused, self._reported_at = False, monotonic()
            self._process.send_signal(signal.SIGCONT)

    async def open(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        self._opened = loop.create_future()
        # Event loops make sockets non-blocking, so this end is theirs alone: they continue what was read or written in
        # part. While the engine is in a step it reads nothing, and commands wait in the transport.
        self._transport, _ = await loop.create_connection(
            lambda: _Messages(self._receive, self._lost), sock=self._socket
        )
        try:
            self.info = await asyncio.wait_for(self._opened, timeout)
        except TimeoutError:
            raise EngineDownError(
                f"the engine of {self.folder} is not open after {timeout:g} seconds",
                remedy="look at what its process has printed",
            ) from None

    def add(self, request: GenerateRequest) -> _Stream:
        if not self.serves:
            raise EngineDownError("the engine is being started", remedy="retry in a few seconds")
        if request.id in self._streams:
            raise RequestError(f"request {request.id} is there already", expected="an id of its own")
        self._send(Add(request, monotonic()))
        stream = self._streams[request.id] = _Stream(request.id)
        self.idle.clear()
        return stream

    async def first_token(self, timeout: float) -> None:
        """Of a request of its own; its error, if it gets none within ``timeout`` seconds."""
        stream = self.add(GenerateRequest("probe", [0], 1))
        try:
            async with asyncio.timeout(timeout):
                while not any(delta.finish_reason for delta in await stream.next()):
                    pass
        except TimeoutError:
            raise _down("gives no token") from None

    def abandon(self, stream: _Stream) -> None:
        """Nobody waits for a request any more: cancel it, unless it has ended."""
        if self._streams.get(stream.id) is stream:
            self._send(Cancel(stream.id))

    def cancel_all(self) -> None:
        for id in self._streams:
            self._send(Cancel(id))

    def fail(self, why: str) -> None:
        """The process is of no use any more: end it, and all its requests."""
        if self.down:
            return
        self.down = True
        self._process.kill()
        if self._transport is not None:
            self._transport.abort()
        if not self._closing:
            logger.error("the engine's process %s; requests that are lost: %d", why, len(self._streams))
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(_down(why))
        for stream in self._streams.values():
            stream.fail(_down(why))
        self._streams.clear()
        self.idle.set()

    async def close(self) -> None:
        """End the process; its requests are lost."""
        self._closing = True
        self.resume()
        if not self.down:
            self._send(Close())
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self.fail("was closed")
        self._socket.close()

    def _send(self, message: Command | Start) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        framed = SIZE.pack(len(data)) + data
        if self._transport is None:
            self._socket.sendall(framed)
        else:
            self._transport.write(framed)

    def _lost(self) -> None:
        self.fail("has ended")

    def _receive(self, data: bytes) -> None:
        self._reported_at = monotonic()
        if self._answered:
            self._dispatch(StepReport.decode(data))
            return
        self._answered = True
        answer: EngineInfo | TapeoutError = pickle.loads(data)
        if self._opened is None or self._opened.done():  # nobody waits for it any more
            return
        if isinstance(answer, TapeoutError):
            self._opened.set_exception(answer)
        else:
            self._opened.set_result(answer)

    def _dispatch(self, report: StepReport) -> None:
        self.stats = report.stats
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


def _down(why: str) -> EngineDownError:
    return EngineDownError(f"the engine's process {why}", remedy="retry in a few seconds: it is started again")
