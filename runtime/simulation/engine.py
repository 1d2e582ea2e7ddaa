"""One engine in virtual time: scheduler, cache and reports are those of the server; only a step's length is a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.engine.cache.pools import StatePools
from runtime.engine.routing import RoutingReports, RoutingWatcher
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.work import Work, WorkResult
from runtime.simulation.step_lengths import StepLengths
from runtime.wire.limits import Limits
from runtime.wire.messages import EngineLoad, EngineStats, GenerateRequest, Pool, StepReport

BLOCK_TOKENS, MAX_TOKENS = 64, 2048


@dataclass
class _Answering:
    request: GenerateRequest
    answer: range
    answered: int = 0
    cached: int | None = None


@dataclass(frozen=True)
class StepEnd:
    """What a step brought. ``sampled``: requests that got a token. ``first``: of those, the ones that got their first,
    with their prompt tokens from the cache.
    """

    report: StepReport
    sampled: list[str]
    first: dict[str, int]
    finished: list[str]


class SimulatedEngine:
    """``blocks``: of KV memory. ``slots``: of recurrent state, also for snapshots. 0 of what its model does not have.

    Requests that arrive in a step are seen after it, as by the real one. ``engine_pool``: see :class:`EngineInfo`.
    ``block_seconds``: to fetch a block; 0 where it cannot.
    """

    def __init__(
        self,
        lengths: StepLengths,
        blocks: int,
        limits: Limits | None = None,
        max_tokens: int = MAX_TOKENS,
        slots: int = 0,
        engine_pool: Pool = "mixed",
        block_seconds: float = 0.0,
    ) -> None:
        self._lengths, self.engine_pool, self._block_seconds = lengths, engine_pool, block_seconds
        self.pools = StatePools(blocks=blocks, slots=slots, block_tokens=BLOCK_TOKENS, max_tokens=max_tokens)
        self.scheduler = Scheduler(self.pools.cache, self.pools.within(limits or Limits()))
        self.watcher = RoutingWatcher()
        self._routing = RoutingReports(self.pools.paged.pool, self.pools.recurrent.pool, self.load)
        self._arrived: list[tuple[GenerateRequest, float]] = []
        self._served: dict[str, _Answering] = {}
        self.planned: list[Work] = []  # of the step that was begun last
        self.stepping = False
        self.steps = 0

    def load(self) -> EngineLoad:
        return self.scheduler.load()._replace(fetch_seconds=self._block_seconds)

    def leave(self, id: str) -> int:
        """A request goes on elsewhere; how many tokens it has answered. A step that runs brings it none any more."""
        self.scheduler.cancel(id)
        return self._served.pop(id).answered

    def take_blocks(self, keys: Sequence[bytes]) -> None:
        """Blocks that have come from another engine."""
        pool = self.pools.paged.pool
        for key in keys:
            if not pool.find([key]) and (taken := pool.take(1)) is not None:
                pool.publish(taken[0], key)
                pool.release(taken)

    def add(self, request: GenerateRequest, answer: range, now: float) -> None:
        self._served[request.id] = _Answering(request, answer, len(request.answered))
        self._arrived.append((request, now))

    def begin(self, now: float) -> float | None:
        """When the next step ends; None if there is nothing to do."""
        self._take_arrivals()
        self.planned = self.scheduler.plan(now)
        self.stepping = bool(self.planned)
        if not self.planned:
            return None
        self.pools.recurrent.take_copies()  # what they take is in the length of a step
        decodes = prompt_tokens = 0
        for work in self.planned:
            served = self._served[work.id]
            if served.cached is None:
                served.cached = self.scheduler.cached_tokens(work.id)
            if len(work.tokens) == 1 and work.samples:
                decodes += 1
            else:
                prompt_tokens += len(work.tokens)
        self.steps += 1
        return now + self._lengths.seconds(decodes, prompt_tokens)

    def end(self, now: float) -> StepEnd:
        """The step that was begun has ended."""
        outcomes, first, sampled = dict[str, WorkResult](), dict[str, int](), list[str]()
        for work in self.planned:
            served = self._served.get(work.id)
            if served is None:  # it has left meanwhile
                continue
            outcomes[work.id] = WorkResult()
            if work.samples:
                outcomes[work.id] = WorkResult((served.answer[served.answered],))
                if not served.answered:
                    first[work.id] = served.cached or 0
                served.answered += 1
                sampled.append(work.id)
        finished = [id for id, _ in self.scheduler.commit(outcomes, now)]
        for id in finished:
            del self._served[id]
        self._take_arrivals()
        return StepEnd(self.report(), sampled, first, finished)

    def _take_arrivals(self) -> None:
        for request, arrival in self._arrived:
            self.watcher.received += 1
            self.scheduler.add(request, arrival)
        self._arrived.clear()

    def report(self) -> StepReport:
        routing = self._routing.next([self.watcher] if self.watcher.asks else [])
        stats = EngineStats(blocks=self.pools.paged.pool.blocks, slots=self.pools.recurrent.pool.blocks)
        return StepReport((), stats, (), routing[0] if routing else None)
