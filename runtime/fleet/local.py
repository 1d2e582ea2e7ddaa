"""A fleet of this machine without Ray: one process owns the engines and gateways, and scales them by their reports."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import yaml

from runtime.fleet.released import RENEW_SECONDS, released
from runtime.fleet.roster import SETTLE_SECONDS, Place, Roster
from runtime.fleet.runner import EngineRunner, GatewayRunner
from runtime.gateway.fleet.discovery import FleetFile
from runtime.wire.address import read_key
from runtime.wire.messages import Pool
from tapeout.errors import TapeoutError, one_line

LOOK_SECONDS = 0.5
UNLIST_SECONDS = 2.0  # until all gateways have read the list again
AGAIN_SECONDS = 5.0  # after an engine that does not open, until another one is tried
HOST = "127.0.0.1"

log = logging.getLogger(__name__)


class LocalFleet:
    """``fleet``: with a section `up`. ``folder``: for the list of engines, which the gateways read."""

    def __init__(self, fleet: FleetFile, folder: Path) -> None:
        assert fleet.up is not None and fleet.key is not None, "only such a file is started"
        self._file = fleet
        self._plan, self._key_file, self._key = fleet.up, fleet.key, read_key(fleet.key)
        self._pools = fleet.started
        self._roster = Roster(self._pools, monotonic() - SETTLE_SECONDS)  # no engine speaks of itself but through here
        self._bundle = released(fleet)
        self._listed = folder / f"{fleet.up.name}.yaml"  # as its release plan is called in a database
        self._engines: dict[str, EngineRunner] = {}
        self._moving: set[asyncio.Task[None]] = set()  # engines that start or end
        self._starting: Counter[Pool] = Counter()
        self._ids = map(str, count())
        self._addresses: tuple[str, ...] = ()  # that gateways can read
        self._unwritten = ""  # why not

    async def run(self, ending: asyncio.Event) -> None:
        """Until ``ending``. :class:`TapeoutError` if an engine or a gateway cannot be opened at first."""
        gateways = list[GatewayRunner]()
        try:
            starting, ended = asyncio.ensure_future(self._start(gateways)), asyncio.ensure_future(ending.wait())
            await asyncio.wait((starting, ended), return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not starting.done():  # however long an engine takes to open
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return
            starting.result()
            self._move(self._renew_left_out())
            while not ending.is_set():
                for gateway in gateways:
                    gateway.require_healthy()
                self._look()
                with suppress(TimeoutError):
                    await asyncio.wait_for(ending.wait(), LOOK_SECONDS)
        finally:
            await asyncio.gather(*(gateway.stop() for gateway in gateways))
            for task in self._moving:
                task.cancel()
            await asyncio.gather(*self._moving, return_exceptions=True)
            await asyncio.gather(*(engine.stop() for engine in self._engines.values()))

    async def _start(self, gateways: list[GatewayRunner]) -> None:
        """``gateways``: those that are started, and one that does not open."""
        plan = self._plan.gateways
        first = [self._add(pool) for pool, settings in self._pools.items() for _ in range(settings.least)]
        for found in await asyncio.gather(*first, return_exceptions=True):
            if found is not None:
                raise found
        self._look()
        for _ in range(plan.count):
            gateways.append(
                GatewayRunner(
                    self._listed,
                    plan.host,
                    plan.port,
                    plan.count,
                    plan.options,
                    drain_seconds=self._plan.drain_seconds,
                )
            )
            await gateways[-1].start()

    def _look(self) -> None:
        now = monotonic()
        wanted: dict[Pool, int] = {pool: self._roster.wanted(pool, now) for pool in self._pools}
        for id, engine in list(self._engines.items()):
            place = Place(engine.address, HOST, os.getpid(), engine.pid)
            wanted[engine.pool] = self._roster.engine(id, engine.pool, place, engine.report, now).wanted
            try:
                engine.require_healthy()
            except TapeoutError as error:
                log.error("another engine takes the place of one that cannot be kept: %s", one_line(error))
                self._move(self._remove(id, self._engines.pop(id)))
        for pool, engines in wanted.items():
            here = {id: engine for id, engine in self._engines.items() if engine.pool == pool}
            for _ in range(engines - len(here) - self._starting[pool]):
                self._starting[pool] += 1
                self._move(self._replace(pool))
            while len(here) > max(1, engines):
                id = min(here, key=lambda id: _running(self._engines[id]))
                self._move(self._remove(id, self._engines.pop(id)))
                del here[id]
        self._list(now)

    def _list(self, now: float) -> None:
        addresses = self._roster.addresses(now)
        if not addresses or addresses == self._addresses:
            return
        found = self._file.model_copy(update={"engines": addresses, "up": None})
        part = self._listed.with_suffix(".part")
        try:
            part.write_text(yaml.safe_dump(found.model_dump(mode="json", exclude_none=True)))
            part.replace(self._listed)
        except OSError as error:  # such as a full disk: gateways keep the list that they have
            if self._unwritten != (why := one_line(error)):
                log.error("the list of engines cannot be written: %s", why)
            self._unwritten = why
        else:
            self._addresses, self._unwritten = addresses, ""

    async def _add(self, pool: Pool) -> None:
        engine = EngineRunner(
            self._bundle,
            pool,
            HOST,
            self._key_file,
            self._key,
            self._plan.engine(pool).options,
            drain_seconds=self._plan.drain_seconds,
        )
        try:
            await engine.start()
        except BaseException:
            await engine.stop()
            raise
        self._engines[next(self._ids)] = engine

    async def _replace(self, pool: Pool) -> None:
        try:
            await self._add(pool)
        except TapeoutError as error:
            log.error("an engine does not open: %s", one_line(error))
            await asyncio.sleep(AGAIN_SECONDS)  # else its tries would take the processors from those that serve
        finally:
            self._starting[pool] -= 1

    async def _renew_left_out(self) -> None:
        """One after another: others take the places of engines that a release has left out."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            for id, engine in list(self._engines.items()):
                left_out = await asyncio.to_thread(self._bundle.left_out, engine)
                if left_out and self._engines.get(id) is engine:
                    log.info("the engine at %s is started anew: no release has its bundle", engine.address)
                    await self._remove(id, self._engines.pop(id))

    async def _remove(self, id: str, engine: EngineRunner) -> None:
        self._roster.leave(id)
        try:
            await engine.idle(UNLIST_SECONDS)
        finally:
            await engine.stop()

    def _move(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)


def _running(engine: EngineRunner) -> int:
    report = engine.report
    return 0 if report is None else report.stats.running + report.stats.waiting
