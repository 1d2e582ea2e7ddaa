"""Runs one engine or one gateway as a process, starts it again where it ends, and says how it is. Knows nothing of Ray.

A process that ends is started again at the same address, so that gateways find it there. One that ends again and again
is given up: whoever placed it here may place it elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from urllib.request import urlopen

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.remote import RemoteEngine
from runtime.gateway.fleet.scaling import EngineReport
from runtime.wire.address import Address
from runtime.wire.messages import EngineLoad, Pool, StepReport
from tapeout.errors import TapeoutError, one_line

COMMAND = (sys.executable, "-m", "pipeline.cli")
WATCH_SECONDS = 0.2
CONNECT_SECONDS = 30.0  # that an engine has to open, before it is connected to anew
ASK_SECONDS = 1.0  # that a gateway has to say that it is there
STUCK_SECONDS = 10.0  # without a report beyond the length of a step, until it is killed
MOST_FAILURES, FAILURE_SECONDS = 3, 60.0  # more in so many seconds, and it is given up
REOPEN_SECONDS = 600.0  # that an engine has to open another bundle
FETCH_SECONDS = 1.0  # without a request and a block that was fetched, until nobody will fetch more
END_SECONDS = 10.0  # that a process has to end beyond the time of its requests
LOG_LINES = 12  # of the process, that an error shows

log = logging.getLogger(__name__)


class Runner(ABC):
    """``options``: of the process's own command. ``opening_seconds``: of the last start, once it was open."""

    kind = ""

    def __init__(self, host: str, options: Sequence[str], *, drain_seconds: float) -> None:
        self._host, self._options, self._drain_seconds = host, options, drain_seconds
        self.port = 0
        self.opening_seconds: float | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failures: deque[float] = deque()
        self._error: TapeoutError | None = None

    @property
    @abstractmethod
    def address(self) -> str: ...

    @property
    @abstractmethod
    def answers(self) -> bool:
        """It is open."""

    @abstractmethod
    def _ports(self) -> Iterable[int]:
        """That it may listen at; 0 is any free one."""

    @abstractmethod
    async def _command(self) -> Sequence[str]: ...

    @abstractmethod
    async def _connect(self) -> None:
        """:class:`EngineDownError` while it does not answer yet."""

    @abstractmethod
    async def _look(self) -> None:
        """:class:`TapeoutError` where a process that was open does not answer any more."""

    @property
    def own_options(self) -> Sequence[str]:
        """Of the process that is started next."""
        return self._options

    async def start(self) -> None:
        """Until it is open. :class:`TapeoutError` with the end of its log if it ends instead."""
        self.port = self.port or _free_port(self._host, self._ports())
        await self._open()
        self._watching = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def gave_up(self) -> bool:
        return self._error is not None

    def require_healthy(self) -> None:
        """:class:`TapeoutError` once it was given up."""
        if self._error is not None:
            raise self._error

    async def again(self) -> None:
        """End it, when its requests have ended, and start it anew; again and again, as one that has died."""
        await self.stop()
        try:
            await self._open()
        except TapeoutError as error:
            log.error("%s", error)
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Requests have ``drain_seconds`` to end."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._end(signal.SIGTERM, self._drain_seconds + END_SECONDS)

    async def _open(self) -> None:
        begun = monotonic()
        self._lines.clear()
        command = await self._command()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "runtime.fleet.guard", str(os.getpid())),
                *(*COMMAND, *command, *self.own_options),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others in turn
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:  # such as too many processes, or files
            raise TapeoutError(f"the {self.kind} at {self.address} cannot be started: {one_line(error)}") from error
        self._reading = asyncio.create_task(self._read(self._process))
        while True:
            if self._process.returncode is not None:
                await asyncio.gather(self._reading, return_exceptions=True)
                raise TapeoutError(
                    f"the {self.kind} at {self.address} has ended with {self._process.returncode}: "
                    + "\n".join(self._lines)
                )
            try:
                await self._connect()
            except EngineDownError:
                await asyncio.sleep(WATCH_SECONDS)
            else:
                break
        self.opening_seconds = monotonic() - begun
        log.info("the %s at %s is open after %.1f seconds", self.kind, self.address, self.opening_seconds)

    async def _watch(self) -> None:
        while self._error is None:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                if self._process is None or self._process.returncode is not None:
                    raise TapeoutError(f"the {self.kind} at {self.address} has ended")
                await self._look()
            except TapeoutError as error:
                log.error("%s; it is started again", one_line(error))
                await self._restart()

    async def _restart(self) -> None:
        while True:
            await self._end(signal.SIGKILL, END_SECONDS)
            now = monotonic()
            self._failures.append(now)
            while self._failures[0] < now - FAILURE_SECONDS:
                self._failures.popleft()
            try:
                if len(self._failures) > MOST_FAILURES:
                    raise TapeoutError(
                        f"the {self.kind} at {self.address} has ended {len(self._failures)} times in turn"
                    )
                await self._open()
            except TapeoutError as error:
                log.error("%s", error)
                if len(self._failures) > MOST_FAILURES:
                    self._error = error
                    return
            else:
                return

    async def _end(self, first: signal.Signals, seconds: float) -> None:
        process = self._process
        if process is None:
            return
        for number in (first, signal.SIGKILL):
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), seconds)
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        self._process = None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """To its end, whatever is wrong with a line or with the log here: the process stops where nobody reads."""
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # it is too long, and was dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            with suppress(OSError):  # such as a full disk
                print(text, file=sys.stderr, flush=True)


class EngineRunner(Runner):
    """``tapeout engine``. It is connected to as a gateway would be, and its reports say how it is.

    ``bundle``: what it is started with, asked for at each start. An engine that is told to open another one goes on as
    the same process, and is waited for.
    """

    kind = "engine"

    def __init__(
        self, bundle: Callable[[], str], pool: Pool, host: str, key_file: Path, key: bytes, options: Sequence[str], *,
        drain_seconds: float,
    ) -> None:  # fmt: skip
        super().__init__(host, options, drain_seconds=drain_seconds)
        self.pool: Pool = pool
        self._bundle, self._key_file, self._key = bundle, key_file, key
        self._left_at: float | None = None  # when it left to open another bundle
        self.opened_at = 0.0  # when it was connected to, with the bundle that it has
        self._connection: RemoteEngine | None = None
        self._load = EngineLoad()

    @property
    def address(self) -> str:
        return str(Address(self._host, self.port))

    @property
    def answers(self) -> bool:
        return self._connection is not None and self._connection.serves

    @property
    def digest(self) -> str:
        """Of its bundle; empty while it does not answer."""
        return self._connection.info.digest if self._connection is not None and self._connection.serves else ""

    @property
    def report(self) -> EngineReport | None:
        if self._connection is None or not self._connection.serves:
            return None
        return EngineReport(self._load, self._connection.stats, self._connection.info.cold_seconds)

    async def idle(self, least_seconds: float) -> None:
        """Until its requests have ended and other engines have the blocks of those that went there, or until they had
        their time. ``least_seconds``: until no gateway sends it more.
        """
        end = monotonic() + self._drain_seconds
        await asyncio.sleep(least_seconds)
        sent, used_at = 0, monotonic()
        while (now := monotonic()) < end and (report := self.report) is not None:
            stats = report.stats
            if stats.running + stats.waiting or stats.blocks_sent > sent:
                sent, used_at = stats.blocks_sent, now
            elif now - used_at > FETCH_SECONDS:
                return
            await asyncio.sleep(WATCH_SECONDS)

    def _ports(self) -> Iterable[int]:
        return (0,)

    async def _command(self) -> Sequence[str]:
        bundle = await asyncio.to_thread(self._bundle)
        key = ("--key-file", str(self._key_file))
        return ("engine", bundle, "--listen", self.address, *key, "--pool", self.pool)

    async def _connect(self) -> None:
        connection = RemoteEngine(self.address, self._key, Path())
        try:
            await connection.open(CONNECT_SECONDS)
        except BaseException:
            await connection.close()
            raise
        self._connection, self._load, self._left_at = connection, EngineLoad(), None
        self.opened_at = monotonic()
        connection.watch(0, self._heard)

    async def _look(self) -> None:
        connection = self._connection
        assert connection is not None, "it was open"
        if connection.down:
            await self._connect_again(connection)
            return
        if connection.silent_seconds - connection.stats.step_seconds > STUCK_SECONDS:
            raise TapeoutError(f"the engine at {self.address} has not reported for {STUCK_SECONDS:g} seconds")

    async def _connect_again(self, connection: RemoteEngine) -> None:
        """To one that has left to open another bundle, once it is there."""
        if not connection.leaving:
            raise TapeoutError(f"the engine at {self.address} has closed its connection")
        self._left_at = self._left_at or monotonic()
        try:
            await self._connect()
        except EngineDownError as error:
            if monotonic() - self._left_at > REOPEN_SECONDS:
                raise TapeoutError(f"the engine at {self.address} opens no bundle: {one_line(error)}") from error

    async def _end(self, first: signal.Signals, seconds: float) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        await super()._end(first, seconds)

    def _heard(self, report: StepReport) -> None:
        if report.routing is not None:
            self._load = report.routing.load


class GatewayRunner(Runner):
    """``tapeout gateway``. It may have no engine: only that it answers counts."""

    kind = "gateway"

    def __init__(
        self, file: Path, host: str, first_port: int, most: int, options: Sequence[str], *, drain_seconds: float
    ) -> None:
        super().__init__(host, options, drain_seconds=drain_seconds)
        self._file, self._first_port, self._most = file, first_port, most
        self._answered_at: float | None = None

    @property
    def address(self) -> str:
        return f"http://{'[' + self._host + ']' if ':' in self._host else self._host}:{self.port}"

    @property
    def answers(self) -> bool:
        return self._answered_at is not None and monotonic() - self._answered_at < STUCK_SECONDS

    def _ports(self) -> Iterable[int]:
        return range(self._first_port, min(self._first_port + self._most, 1 << 16))

    async def _command(self) -> Sequence[str]:
        drain = str(self._drain_seconds)
        where = ("--host", self._host, "--port", str(self.port))
        return ("gateway", str(self._file), *where, "--drain-seconds", drain)

    @property
    def own_options(self) -> Sequence[str]:
        return [option.replace("{port}", str(self.port)) for option in self._options]

    async def _connect(self) -> None:
        try:
            await asyncio.to_thread(self._ask)
        except OSError as error:
            raise EngineDownError(f"nothing answers at {self.address}: {error}") from error
        self._answered_at = monotonic()

    async def _look(self) -> None:
        assert self._answered_at is not None, "it was open"
        try:
            await self._connect()
        except EngineDownError:
            if monotonic() - self._answered_at > STUCK_SECONDS:
                raise

    def _ask(self) -> None:
        with urlopen(f"http://127.0.0.1:{self.port}/health" if self._host == "0.0.0.0" else f"{self.address}/health",
                     timeout=ASK_SECONDS):  # fmt: skip
            pass


def _free_port(host: str, candidates: Iterable[int]) -> int:
    for port in candidates:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return probe.getsockname()[1]
    ports = ", ".join(map(str, candidates))
    raise TapeoutError(
        f"no free port for a gateway at {host}: {ports} are taken, or {host} is no address of this machine",
        expected="`up.gateways.port` of the file, and after it one for each other gateway of a machine",
        remedy="stop what uses them, or name another port",
    )
