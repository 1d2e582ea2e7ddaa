"""How a request's engine is chosen: what other routers do, what ours does, and one that sees into all pools."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from benchmarks.fleet.engines import BLOCK_TOKENS, SimulatedEngine
from runtime.gateway.routing.router import FleetRouter
from runtime.wire.block_keys import block_keys
from runtime.wire.messages import GenerateRequest, StepReport


class Policy(Protocol):
    def choose(self, request: GenerateRequest, session: str) -> int:
        """The number of an engine, to which the request is sent now."""
        ...

    def heard(self, engine: int, report: StepReport) -> None: ...

    def ended(self, engine: int) -> None:
        """A request of it."""
        ...


class _Blind(ABC):
    """Knows only which requests it has sent."""

    def __init__(self, engines: Sequence[SimulatedEngine], seed: int) -> None:
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


class Exact:
    """Ours: the router of the gateway, fed by the engines' reports."""

    def __init__(self, engines: Sequence[SimulatedEngine], seed: int) -> None:
        self.router, self._engines = FleetRouter(), engines
        self._names = [f"engine-{number}" for number in range(len(engines))]
        for number, engine in enumerate(engines):
            engine.watcher.begin(self.router.join(self._names[number], BLOCK_TOKENS))
            self.heard(number, engine.report())

    def choose(self, request: GenerateRequest, session: str) -> int:
        best = self.router.choose(request, self._names, session)[0]
        self.router.sent(best)
        return self._names.index(best.engine)

    def heard(self, engine: int, report: StepReport) -> None:
        assert self.router.heard(self._names[engine], report) is None, "a report was lost, but nothing loses any here"

    def ended(self, engine: int) -> None: ...


POLICIES: dict[str, Callable[[Sequence[SimulatedEngine], int], Policy]] = {
    "round robin": RoundRobin,
    "two choices": TwoChoices,
    "least load": LeastLoad,
    "session hash": SessionHash,
    "most cached": MostCached,
    "exact": Exact,
}


def cached_tokens(engines: Sequence[SimulatedEngine], request: GenerateRequest) -> list[int]:
    """That the pool of each has of the prompt."""
    keys = block_keys(request.prompt[:-1], BLOCK_TOKENS, request.cache_salt)
    return [len(engine.pool.find(keys)) * BLOCK_TOKENS for engine in engines]
