"""How a request's engine is chosen: what other routers do, what ours does, and one that sees into all pools."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from random import Random

from runtime.simulation.engine import SimulatedEngine
from runtime.simulation.fleet import cached_tokens
from runtime.simulation.routing import Clock, ExactRouting, PolicyMaker
from runtime.wire.messages import GenerateRequest, StepReport


class _Blind(ABC):
    """Knows only which requests it has sent."""

    def __init__(self, engines: Sequence[SimulatedEngine], seed: int, clock: Clock) -> None:
        self._engines, self._random = engines, Random(seed)
        self._open, self._turn = Counter[int](), 0

    def choose(self, request: GenerateRequest, session: str) -> int:
        engine = self.pick(request, session)
        self._open[engine] += 1
        return engine

    @abstractmethod
    def pick(self, request: GenerateRequest, session: str) -> int:
        """The number of an engine."""

    def heard(self, engine: int, report: StepReport) -> None:
        return  # it needs none

    def ended(self, engine: int) -> None:
        self._open[engine] -= 1

    def hand_over(self, request: GenerateRequest, engine: int) -> int | None:
        return None  # all of a request stays

    def _least(self, among: Sequence[int]) -> int:
        """With the fewest requests; of equals the next in turn."""
        self._turn += 1
        count = len(self._engines)
        return min(among, key=lambda engine: (self._open[engine], (engine - self._turn) % count))


class RoundRobin(_Blind):
    def pick(self, request: GenerateRequest, session: str) -> int:
        self._turn += 1
        return self._turn % len(self._engines)


class TwoChoices(_Blind):
    """The one with fewer requests of two that are drawn."""

    def pick(self, request: GenerateRequest, session: str) -> int:
        return self._least(self._random.sample(range(len(self._engines)), min(2, len(self._engines))))


class LeastLoad(_Blind):
    """The fewest requests."""

    def pick(self, request: GenerateRequest, session: str) -> int:
        return self._least(range(len(self._engines)))


class SessionHash(_Blind):
    """A conversation stays where its hash says, whatever the load."""

    def pick(self, request: GenerateRequest, session: str) -> int:
        return zlib.crc32(session.encode()) % len(self._engines)


class MostCached(_Blind):
    """Sees into all pools, and goes where most of the prompt is, whatever the load; of equals to the least load."""

    def pick(self, request: GenerateRequest, session: str) -> int:
        cached = cached_tokens(self._engines, request)
        most = max(cached)
        return self._least([engine for engine, tokens in enumerate(cached) if tokens == most])


POLICIES: dict[str, PolicyMaker] = {
    "round robin": RoundRobin,
    "two choices": TwoChoices,
    "least load": LeastLoad,
    "session hash": SessionHash,
    "most cached": MostCached,
    "exact": ExactRouting,
}
