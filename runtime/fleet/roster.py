"""Which engines and gateways of a fleet there are. Each says once a second where and how it is.

Nothing here is stored: a roster that is started again is told everything anew, and says nothing of engines until then,
so that a gateway keeps those that it has. Reads no clock: the caller says what time it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from runtime.gateway.fleet.scaling import EngineReport, FleetScaler, PoolScaling
from runtime.wire.messages import Pool

SETTLE_SECONDS = 3.0  # that engines have to say where they are
LOST_SECONDS = 10.0  # without a word, and it is forgotten


class RunState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    STANDBY = "standby"
    LEAVING = "leaving"


class Place(NamedTuple):
    """Of one replica: its own address, the machine it is on, and the processes of it and of the engine or gateway."""

    address: str
    node: str
    supervisor: int
    process: int | None


class Orders(NamedTuple):
    """What an engine hears back. ``wanted``: engines of its pool that should run. ``drain``: end and start anew."""

    wanted: int
    drain: bool


@dataclass
class _Seen:
    place: Place
    at: float
    pool: Pool = "mixed"
    report: EngineReport | None = None
    leaving: bool = False
    drain: bool = False


@dataclass
class Roster:
    """``settings``: of each pool that the fleet has. ``fixed``: engines of a pool that an operator has asked for,
    instead of what the reports say. ``problem``: why an engine or a gateway could not be opened last.
    """

    settings: Mapping[Pool, PoolScaling]
    begun: float
    fixed: dict[Pool, int] = field(default_factory=dict[Pool, int])
    problem: str = ""
    _engines: dict[str, _Seen] = field(default_factory=dict[str, _Seen])
    _gateways: dict[str, _Seen] = field(default_factory=dict[str, _Seen])

    def __post_init__(self) -> None:
        self._scalers = {pool: FleetScaler(settings) for pool, settings in self.settings.items()}

    def engine(self, id: str, pool: Pool, place: Place, report: EngineReport | None, now: float) -> Orders:
        """An engine is there. ``report``: None while it does not answer."""
        seen = self._engines.setdefault(id, _Seen(place, now, pool))
        seen.place, seen.at, seen.report = place, now, report
        self._forget(now)
        return Orders(self.wanted(pool, now), seen.drain)

    def gateway(self, id: str, place: Place, answers: bool, now: float) -> None:
        seen = self._gateways.setdefault(id, _Seen(place, now))
        seen.place, seen.at, seen.leaving = place, now, not answers

    def leave(self, id: str) -> None:
        """It gets no more requests."""
        for known in (self._engines, self._gateways):
            if id in known:
                known[id].leaving = True

    def started(self, id: str) -> None:
        """An engine that was drained has started anew."""
        if id in self._engines:
            self._engines[id].drain = False

    def drain(self, address: str) -> bool:
        """Whether there is such an engine."""
        found = [seen for seen in self._engines.values() if seen.place.address == address]
        for seen in found:
            seen.drain = True
        return bool(found)

    def fix(self, pool: Pool, engines: int | None) -> None:
        """``engines`` None: as the reports say."""
        if engines is None:
            self.fixed.pop(pool, None)
        else:
            self.fixed[pool] = engines

    def wanted(self, pool: Pool, now: float) -> int:
        if pool in self.fixed:
            return self.fixed[pool]
        reports = {seen.place.address: seen.report for seen in self._ring(pool) if seen.report}
        return self._scalers[pool].look(reports, now)

    def addresses(self, now: float) -> tuple[str, ...] | None:
        """Of the engines that get requests; None while that is not known yet."""
        if now - self.begun < SETTLE_SECONDS:
            return None
        self._forget(now)
        return tuple(seen.place.address for pool in self.settings for seen in self._ring(pool))

    def status(self, now: float) -> dict[str, Any]:
        self._forget(now)
        ring = {id(seen) for pool in self.settings for seen in self._ring(pool)}
        engines = list[dict[str, Any]]()
        for seen in self._engines.values():
            state = RunState.SERVING if id(seen) in ring else RunState.STANDBY
            if seen.leaving or seen.drain:
                state = RunState.LEAVING
            elif seen.report is None:
                state = RunState.STARTING
            stats = seen.report and seen.report.stats
            engines.append(
                {
                    **seen.place._asdict(),
                    "pool": seen.pool,
                    "state": state.value,
                    "running": stats.running if stats else 0,
                    "waiting": stats.waiting if stats else 0,
                    "cold_seconds": (seen.report and seen.report.cold_seconds) or None,
                }
            )
        gateways = [
            {
                **seen.place._asdict(),
                "state": (RunState.STARTING if seen.leaving else RunState.SERVING).value,
            }
            for seen in self._gateways.values()
        ]
        return {
            "pools": {
                pool: {"wanted": self.wanted(pool, now), "fixed": self.fixed.get(pool)} for pool in self.settings
            },
            "problem": self.problem,
            "engines": engines,
            "gateways": gateways,
        }

    def _ring(self, pool: Pool) -> list[_Seen]:
        """Engines of a pool that get requests: those that came first, while others are on standby.

        One that does not answer right now stays listed: gateways find out by themselves, also when it is back.
        """
        here = [seen for seen in self._engines.values() if seen.pool == pool and not (seen.leaving or seen.drain)]
        if pool in self.fixed or not self.settings[pool].standby:
            return here
        answering = [seen for seen in here if seen.report is not None]
        return answering[: self._scalers[pool].state.needed] or here

    def _forget(self, now: float) -> None:
        for known in (self._engines, self._gateways):
            for id in [id for id, seen in known.items() if now - seen.at > LOST_SECONDS]:
                del known[id]
