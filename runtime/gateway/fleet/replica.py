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
from random import Random
from typing import NamedTuple

from runtime.gateway.engines.client import OpenEngine
from runtime.gateway.fleet.connection import FleetConnection
from runtime.gateway.fleet.retries import probe_seconds
from runtime.gateway.routing.router import FleetRouter
from runtime.wire.messages import EngineInfo, EngineStats, Pool, StepReport
from tapeout.errors import one_line

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


class ReplicaStatus(NamedTuple):
    """``info`` and ``stats`` of an engine that is connected. ``own``: requests of this gateway on it."""

    address: str
    state: ReplicaState
    why: str
    failures: int
    own: int
    info: EngineInfo | None
    stats: EngineStats


@dataclass(frozen=True)
class Patience:
    """Seconds. ``suspect``: without a sign of life, until requests go on elsewhere; ``stuck``: until it is given up.

    An engine reports after each step and twice a second while idle, and a thread of its own says that it lives while a
    step takes longer. ``step``: that one may take beyond the one before, until the same happens as without such signs.
    ``open``: that a connection may take, and a first token on it. ``wait``: that a request waits for any engine.
    """

    suspect: float = 1.0
    stuck: float = 10.0
    step: float = 10.0
    open: float = 10.0
    wait: float = 30.0


class Replica:
    """``connect``: a new connection, not yet open. ``admit``: of one that has opened; raises where the engine does not
    belong to this fleet. ``changed``: is called whenever the state is another one. ``router``: knows the engine by its
    address, from when it is ready until it has ended or drains.
    """

    def __init__(
        self,
        address: str,
        connect: Callable[[], FleetConnection],
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
        self.connection: FleetConnection | None = None
        self.info: EngineInfo | None = None  # as it was said last
        self._connect, self._patience = connect, patience
        self._router, self._admit, self._changed = router, admit, changed
        self._random = Random()
        self._leaving = asyncio.Event()  # it is no longer listed
        self._wake = asyncio.Event()  # ends a pause
        self._task = asyncio.create_task(self._run())

    @property
    def stats(self) -> EngineStats:
        return EngineStats() if self.connection is None else self.connection.stats

    @property
    def level(self) -> str:
        return "" if self.connection is None else self.connection.info.level

    @property
    def pool(self) -> Pool:
        return "mixed" if self.info is None else self.info.pool

    @property
    def digest(self) -> str:
        """Of its bundle, also while it is away or gets nothing; empty before it was connected to."""
        return "" if self.info is None else self.info.digest

    @property
    def ready(self) -> bool:
        connection = self.connection
        return self.state is ReplicaState.READY and connection is not None and connection.serves and not self.lingers

    @property
    def lingers(self) -> bool:
        """It is about to open another bundle, and still takes requests that only its present one can answer."""
        return self.connection is not None and self.connection.leaving and self.connection.serves

    def status(self, own: int) -> ReplicaStatus:
        info = None if self.connection is None else self.connection.info
        return ReplicaStatus(self.address, self.state, self.why, self.failures, own, info, self.stats)

    def retry(self) -> None:
        """Connect again at once, if it waits to."""
        self._wake.set()

    def drain(self) -> None:
        """Take no more requests; once there are none, leave the engine. Nothing happens if it does so already."""
        if not self._leaving.is_set():
            self._leaving.set()
            self._wake.set()
            self._router.leave(self.address)

    async def close(self) -> None:
        """Leave the engine at once; its requests are lost."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._leaving.is_set():
            self._become(ReplicaState.HALF_OPEN if self.failures else ReplicaState.CONNECTING)
            try:
                await self._follow(self._connect())
            except Exception as error:  # of any kind: an address or an engine that is nonsense must not end the watch
                self._failed(error)
            if not self._leaving.is_set():
                await self._pause(probe_seconds(max(self.failures, 1), self._random))
        self._become(ReplicaState.GONE)

    async def _follow(self, connection: FleetConnection) -> None:
        """Until it has drained, or is about to open another bundle. Raises where it fails."""
        try:
            await self._open(connection)
            await self._watch(connection)
        except Exception:
            if not connection.leaving:
                raise
            self._reopens()
        finally:
            if not self._leaving.is_set():  # else the address may be another replica's by now
                self._router.leave(self.address)
            self.connection = None
            await connection.close()

    async def _open(self, connection: FleetConnection) -> None:
        await connection.open(self._patience.open)
        self.info = connection.info
        await self._admit(connection)
        if self.failures:
            await connection.first_token(self._patience.open)
        if self.why:
            log.warning("the engine at %s takes requests again", self.address)
        if not self._leaving.is_set():
            info = connection.info
            kind = f"{info.digest} {info.level}" if info.moves_blocks else ""
            connection.watch(self._router.join(self.address, info.block_tokens, kind), self._heard)
        self.failures, self.why, self.connection = 0, "", connection
        self._become(ReplicaState.READY)

    def _heard(self, report: StepReport) -> int | None:
        return None if self._leaving.is_set() else self._router.heard(self.address, report)

    async def _watch(self, connection: FleetConnection) -> None:
        """Until it has drained. Raises where the engine has ended, or is given up."""
        patience = self._patience
        while not (self._leaving.is_set() and connection.idle.is_set()):
            await self._pause(WATCH_SECONDS, even_if_leaving=True)
            connection.require_serving()
            unheard = connection.unheard_seconds
            step = connection.silent_seconds - connection.stats.step_seconds
            late, why = max(
                (unheard - patience.suspect, f"has been silent for {unheard:.1f} seconds"),
                (step - patience.step, f"has ended no step for {step:.1f} seconds"),
            )
            if late > patience.stuck - patience.suspect:
                connection.fail(why)
                connection.require_serving()
            if self.suspected != (late > 0):
                self.suspected = not self.suspected
                log.warning("the engine at %s %s", self.address, why if self.suspected else "reports again")
            if self._leaving.is_set() or connection.leaving:
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
            await asyncio.wait_for(self._wake.wait(), seconds)
        if not self._leaving.is_set():
            self._wake.clear()

    def _reopens(self) -> None:
        log.info("the engine at %s opens another bundle", self.address)
        self.why, self.suspected, self.connection, self.info = "it opens another bundle", False, None, None
        self._become(ReplicaState.CONNECTING)

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
