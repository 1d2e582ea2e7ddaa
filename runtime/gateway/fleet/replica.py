"""One engine of a fleet, as a gateway sees it: connected to, watched, and left alone for a while where it fails.

    connecting ──> ready <──> suspect         no report for a while; its requests go on elsewhere
        │            │           │
        └────────> open <────────┘            the circuit breaker: nothing is sent there
                     │   ^
                     v   │ fails again, later each time
                  half-open ──> ready         one connection and one token

One that is no longer listed is draining until its requests have ended, then gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

from runtime.gateway.engines.client import OpenEngine
from runtime.gateway.engines.connection import DeltaStream
from runtime.gateway.engines.remote import RemoteEngine
from runtime.gateway.fleet.retries import probe_seconds
from runtime.gateway.routing.router import FleetRouter
from runtime.wire.messages import EngineInfo, EngineStats, StepReport
from tapeout.errors import TapeoutError, one_line

WATCH_SECONDS = 0.1  # between two looks at an engine

log = logging.getLogger(__name__)


class ReplicaState(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    SUSPECT = "suspect"
    OPEN = "open"
    HALF_OPEN = "half-open"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True)
class Patience:
    """Seconds. ``suspect``: without a report beyond the length of a step, until requests go on elsewhere.

    An engine reports after each step and twice a second while idle. ``stuck``: until it is given up. ``open``: that a
    connection may take, and a first token on it. ``wait``: that a request waits for any engine.
    """

    suspect: float = 1.0
    stuck: float = 10.0
    open: float = 10.0
    wait: float = 30.0


class ReplicaConnection(RemoteEngine):
    """``first``: counters of the engine's first report here. Whoever watches it says in the log why it has ended."""

    remedy = "retry in a few seconds"

    def __init__(self, address: str, key: bytes, cache: Path) -> None:
        super().__init__(address, key, cache)
        self.first: EngineStats | None = None
        self._ended = ""
        self._closing = True

    def require_serving(self) -> None:
        if self.down:
            raise self._down(self._ended)

    def fail(self, why: str) -> None:
        self._ended = self._ended or why
        super().fail(why)

    def give_up(self, stream: DeltaStream, error: TapeoutError) -> None:
        """Cancel a request that goes on elsewhere; what has come of it can still be read, then the error."""
        self.abandon(stream)
        if self._streams.pop(stream.id, None) is stream:
            stream.fail(error)
        if not self._streams:
            self.idle.set()

    def _report(self, report: StepReport) -> None:
        if self.first is None:
            self.first = report.stats
        super()._report(report)


class Replica:
    """``admit``: of a connection that has opened; raises where the engine does not belong to this fleet.

    ``changed``: is called whenever the state is another one. ``router``: knows the engine by its address,
    from when it is ready until it has ended or drains.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        cache: Path,
        patience: Patience,
        router: FleetRouter,
        admit: Callable[[OpenEngine], Awaitable[None]],
        changed: Callable[[Replica], None],
    ) -> None:
        self.address = address
        self.state = ReplicaState.CONNECTING
        self.why = ""  # the engine takes no requests
        self.suspected = False  # it is silent
        self.failures = 0  # in turn
        self.connection: ReplicaConnection | None = None
        self.info: EngineInfo | None = None  # of the last connection
        self._key, self._cache, self._patience = key, cache, patience
        self._router, self._admit, self._changed = router, admit, changed
        self._random = Random()
        self._leaving = asyncio.Event()  # it is no longer listed
        self._task = asyncio.create_task(self._run())

    @property
    def stats(self) -> EngineStats:
        return EngineStats() if self.connection is None else self.connection.stats

    @property
    def level(self) -> str:
        return "" if self.connection is None else self.connection.info.level

    @property
    def ready(self) -> bool:
        return self.state is ReplicaState.READY and self.connection is not None and self.connection.serves

    def drain(self) -> None:
        """Take no more requests; once there are none, leave the engine. Nothing happens if it does so already."""
        if not self._leaving.is_set():
            self._leaving.set()
            self._router.leave(self.address)

    async def close(self) -> None:
        """Leave the engine at once; its requests are lost."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._leaving.is_set():
            self._become(ReplicaState.HALF_OPEN if self.failures else ReplicaState.CONNECTING)
            connection = ReplicaConnection(self.address, self._key, self._cache)
            try:
                await self._open(connection)
                await self._watch(connection)
            except Exception as error:  # of any kind: an engine that answers nonsense must not end the watch
                self._failed(error)
            finally:
                if not self._leaving.is_set():  # else the address may be another replica's by now
                    self._router.leave(self.address)
                self.connection = None
                await connection.close()
            if not self._leaving.is_set():
                await self._pause(probe_seconds(self.failures, self._random))
        self._become(ReplicaState.GONE)

    async def _open(self, connection: ReplicaConnection) -> None:
        await connection.open(self._patience.open)
        await self._admit(connection)
        if self.failures:
            await connection.first_token(self._patience.open)
        if self.why:
            log.warning("the engine at %s takes requests again", self.address)
        if not self._leaving.is_set():
            connection.watch(self._router.join(self.address, connection.info.block_tokens), self._heard)
        self.failures, self.why, self.connection, self.info = 0, "", connection, connection.info
        self._become(ReplicaState.READY)

    def _heard(self, report: StepReport) -> int | None:
        return None if self._leaving.is_set() else self._router.heard(self.address, report)

    async def _watch(self, connection: ReplicaConnection) -> None:
        """Until it has drained. Raises where the engine has ended, or is given up."""
        patience = self._patience
        while not (self._leaving.is_set() and connection.idle.is_set()):
            await self._pause(WATCH_SECONDS, even_if_leaving=True)
            connection.require_serving()
            silent = connection.silent_seconds - connection.stats.step_seconds
            if silent > patience.stuck:
                connection.fail(f"has not reported for {patience.stuck:g} seconds")
                connection.require_serving()
            if self.suspected != (silent > patience.suspect):
                self.suspected = not self.suspected
                event = f"has not reported for {silent:.1f} seconds" if self.suspected else "reports again"
                log.warning("the engine at %s %s", self.address, event)
            if self._leaving.is_set():
                self._become(ReplicaState.DRAINING)
            else:
                self._become(ReplicaState.SUSPECT if self.suspected else ReplicaState.READY)
            if self.suspected:  # there may be another engine now that goes on with its requests
                self._changed(self)

    async def _pause(self, seconds: float, *, even_if_leaving: bool = False) -> None:
        if even_if_leaving and self._leaving.is_set():
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), seconds)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.why != (why := one_line(error, 400)):
            log.error("the engine at %s takes no requests: %s", self.address, why)
        self.why, self.suspected, self.connection = why, False, None
        self._become(ReplicaState.OPEN)

    def _become(self, state: ReplicaState) -> None:
        if self.state is not state:
            self.state = state
            self._changed(self)
