"""How many engines a fleet should have, from what its engines report. Pure: the caller says what time it is.

More, where a first token would come later than the target by the time that a new engine is open; where a request comes,
the engines it could go to are as busy as they can be without a queue. Fewer, where one engine less would keep half the
target, and would not be busy, for a while; one at a time, since each that goes makes the others busier.

Engines of a pool for what follows the first token have no such queue: there the gap between two tokens counts, and how
full their KV caches are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, exp
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from runtime.gateway.routing.choice import Speed, step_seconds
from runtime.wire.messages import EngineLoad, EngineStats, Pool

BUSY = 0.8  # of an engine's capacity: beyond it queues grow long
CALM = 0.5  # at most so much of it, where there is one engine less
TREND_SECONDS = 5.0  # over which the growth of the queues is averaged
LOOK_SECONDS = 1.0  # at least, between two decisions: shares of shorter times are noise


class _Scaling(BaseModel):
    """``least`` and ``most`` engines, ``standby`` included: those are open and get no requests until they are needed.

    ``hold_seconds``: that fewer must be enough. ``cold_seconds``: from the start of an engine until it is open, where
    none has measured it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    least: Annotated[int, Field(ge=1)] = 1
    most: Annotated[int, Field(ge=1)] = 1
    standby: Annotated[int, Field(ge=0)] = 0
    hold_seconds: Annotated[float, Field(ge=0)] = 300.0
    cold_seconds: Annotated[float, Field(ge=0)] = 5.0

    @model_validator(mode="after")
    def _require_room(self) -> Self:
        if self.most < self.least or self.standby >= self.most:
            raise ValueError("`most` is at least `least`, and more than `standby`")
        return self


class ScalingSettings(_Scaling):
    """Of engines that compute prompts, whether they go on with them or not."""

    first_token_seconds: Annotated[float, Field(gt=0)] = 1.0

    @property
    def target(self) -> float:
        return self.first_token_seconds

    @property
    def calm_target(self) -> float:
        return self.first_token_seconds / 2

    def ahead(self, cold_seconds: float) -> float:
        """Seconds for which the growth of the load counts, too."""
        return cold_seconds

    def load(self, before: EngineStats | None, report: EngineReport, seconds: float) -> ReplicaLoad:
        """``before``: the counters so many seconds ago."""
        waits = Speed.of(report.load).seconds(report.load.backlog_tokens)
        return ReplicaLoad(waits, used_share(before, report.stats, report.load, seconds))


class DecodeScalingSettings(_Scaling):
    """Of engines for what follows the first token. ``token_seconds``: at most, between two tokens of an answer."""

    token_seconds: Annotated[float, Field(gt=0)] = 0.05

    @property
    def target(self) -> float:
        return self.token_seconds

    @property
    def calm_target(self) -> float:
        # One engine less makes the gaps of the others longer by its share of the answers at most: a step has a part
        # that each answer adds, and one that it takes in any case. So the sum below is too high already.
        return self.token_seconds

    def ahead(self, cold_seconds: float) -> float:
        """A step's length jumps with the first answer and hardly grows with the next: it has no trend."""
        return 0.0

    def load(self, before: EngineStats | None, report: EngineReport, seconds: float) -> ReplicaLoad:
        """See :meth:`ScalingSettings.load`."""
        load, stats = report.load, report.stats
        places = load.running / load.most_running if load.most_running else 0.0
        held = max(
            stats.blocks_held / stats.blocks if stats.blocks else 0.0,
            stats.slots_held / stats.slots if stats.slots else 0.0,
        )
        return ReplicaLoad(step_seconds(load), max(places, held))


PoolScaling = ScalingSettings | DecodeScalingSettings


class PoolsSettings(BaseModel):
    """Of a fleet that has engines for prompts and others for what follows, each with a number of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: ScalingSettings = ScalingSettings()
    decode: DecodeScalingSettings = DecodeScalingSettings()

    @property
    def by_pool(self) -> Mapping[Pool, PoolScaling]:
        return {"prefill": self.prefill, "decode": self.decode}


class ReplicaLoad(NamedTuple):
    """Of one engine. ``used``: share of its capacity. ``seconds``: until a prompt that comes now would be begun, or
    in a pool for what follows between two tokens.
    """

    seconds: float
    used: float


class ScalingState(NamedTuple):
    """``needed``: engines that should answer. ``queued``: seconds of all engines together, at time ``at``, growing by
    ``growth`` a second. ``calm_since``: when one engine less began to be enough.
    """

    needed: int
    queued: float = 0.0
    growth: float = 0.0
    at: float | None = None
    calm_since: float | None = None


def scaled(
    settings: PoolScaling, loads: Sequence[ReplicaLoad], cold_seconds: float, state: ScalingState, now: float
) -> ScalingState:
    """``loads``: of the engines that answer now. Without any nothing is known, and everything stays.

    >>> settings = ScalingSettings(least=1, most=4, first_token_seconds=1.0, hold_seconds=60)
    >>> scaled(settings, [ReplicaLoad(2.5, 1.0)], 0.0, ScalingState(1), now=0.0).needed
    3
    """
    least, most = bounds(settings)
    if not loads:
        return state._replace(needed=min(max(state.needed, least), most))
    queued, used = sum(load.seconds for load in loads), sum(load.used for load in loads)
    growth = 0.0
    if state.at is not None:
        growth = state.growth
        if now > state.at:
            share = exp((state.at - now) / TREND_SECONDS)
            growth = share * growth + (1 - share) * (queued - state.queued) / (now - state.at)
    needed, calm_since = state.needed, state.calm_since
    enough = max(_engines(queued + growth * settings.ahead(cold_seconds), settings.target), _engines(used, BUSY))
    fewer = max(_engines(queued, settings.calm_target), _engines(used, CALM))
    if enough >= needed:
        needed, calm_since = enough, None
    elif fewer >= needed:
        calm_since = None
    elif calm_since is None:
        calm_since = now
    elif now - calm_since >= settings.hold_seconds:
        needed, calm_since = needed - 1, now
    return ScalingState(min(max(needed, least), most), queued, growth, now, calm_since)


def bounds(settings: PoolScaling) -> tuple[int, int]:
    """Least and most engines that answer: what is left beside those on standby."""
    return max(1, settings.least - settings.standby), settings.most - settings.standby


def _engines(amount: float, each: float) -> int:
    return max(1, ceil(amount / each - 1e-9))


class EngineReport(NamedTuple):
    """``cold_seconds``: see :class:`EngineInfo`."""

    load: EngineLoad
    stats: EngineStats
    cold_seconds: float = 0.0


class FleetScaler:
    """Keeps what :func:`scaled` needs from one look at the engines to the next."""

    def __init__(self, settings: PoolScaling) -> None:
        self.settings = settings
        self.state = ScalingState(bounds(settings)[0])
        self._before: dict[str, EngineStats] = {}

    @property
    def wanted(self) -> int:
        """Engines that should run."""
        return self.state.needed + self.settings.standby

    def look(self, reports: Mapping[str, EngineReport], now: float) -> int:
        """``reports``: of the engines that answer, by address. Engines that should run."""
        at = self.state.at
        if at is not None and now - at < LOOK_SECONDS:
            return self.wanted
        seconds = 0.0 if at is None else now - at
        loads = [self.settings.load(self._before.get(address), report, seconds) for address, report in reports.items()]
        measured = max((report.cold_seconds for report in reports.values()), default=0.0)
        self.state = scaled(self.settings, loads, measured or self.settings.cold_seconds, self.state, now)
        self._before = {address: report.stats for address, report in reports.items()}
        return self.wanted


def used_share(before: EngineStats | None, stats: EngineStats, load: EngineLoad, seconds: float) -> float:
    """Of an engine's places for requests, or of its time for prompts, whichever is more. ``before``: the counters so
    many seconds ago.
    """
    places = load.running / load.most_running if load.most_running else 0.0
    if before is None or seconds <= 0:
        return places
    # Queries and hits both count what was answered elsewhere, which is computed like a prompt.
    computed = (stats.prefix_queries - stats.prefix_hits) - (before.prefix_queries - before.prefix_hits)
    return max(places, computed * load.prompt_seconds / seconds)
