"""One engine in virtual time: scheduler, cache and reports are those of the server; only a step's length is a model."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass

from runtime.engine.cache.blocks import BlockPool
from runtime.engine.cache.paged import PagedState
from runtime.engine.cache.sequences import SequenceCache
from runtime.engine.routing import RoutingReports, RoutingWatcher
from runtime.engine.scheduler import Scheduler
from runtime.engine.work import Work, WorkResult
from runtime.wire.limits import Limits
from runtime.wire.messages import EngineStats, GenerateRequest, StepReport

BLOCK_TOKENS, MAX_TOKENS = 64, 2048


@dataclass(frozen=True)
class StepLengths:
    """Seconds of a step, as measured on one bundle. ``decodes``: by the number of decodes in it, ascending from 1.

    ``token``: of each prompt token beside them. A step without decodes is at least as long as one with a single one,
    since it reads the same weights.
    """

    decodes: tuple[tuple[int, float], ...]
    token: float

    def seconds(self, decodes: int, prompt_tokens: int) -> float:
        """
        >>> lengths = StepLengths(((1, 0.002), (9, 0.006)), 0.001)
        >>> [round(lengths.seconds(*step), 4) for step in ((1, 0), (3, 0), (17, 0), (3, 5), (0, 1), (0, 50))]
        [0.002, 0.003, 0.01, 0.008, 0.002, 0.05]
        """
        if not decodes:
            return max(self.decodes[0][1], prompt_tokens * self.token)
        place = min(max(1, bisect(self.decodes, (decodes, 0.0))), len(self.decodes) - 1)
        (low, least), (high, most) = self.decodes[place - 1], self.decodes[place]
        return least + (most - least) * (decodes - low) / (high - low) + prompt_tokens * self.token


# The first is of docs/benchmarks/serving.md (table "Streams", 135 M weights, 2 cores; the step of one stream without
# drafts), the second of docs/benchmarks/llama-3.2-1b.md ("tapeout default").
BUNDLES = {
    "default": StepLengths(((1, 0.0026), (8, 0.0051), (32, 0.0144), (64, 0.0271)), 0.000215),
    "llama-3.2-1b": StepLengths(((1, 0.0166), (8, 0.0194), (32, 0.0591)), 0.00140),
}


@dataclass
class _Served:
    request: GenerateRequest
    answer: range
    answered: int = 0
    cached: int | None = None


@dataclass(frozen=True)
class StepEnd:
    """What a step brought. ``first``: requests that got their first token, with their prompt tokens from the cache."""

    report: StepReport
    first: dict[str, int]
    finished: list[str]
    tokens: int


class SimulatedEngine:
    """``blocks``: of KV memory. Requests that arrive in a step are seen after it, as by the real one."""

    def __init__(self, lengths: StepLengths, blocks: int, limits: Limits | None = None) -> None:
        self._lengths = lengths
        self.pool = BlockPool(blocks)
        cache = SequenceCache([PagedState(self.pool, BLOCK_TOKENS)], BLOCK_TOKENS, MAX_TOKENS)
        self.scheduler = Scheduler(cache, limits or Limits())
        self.watcher = RoutingWatcher()
        self._routing = RoutingReports(self.pool, BlockPool(0), self.scheduler.load)
        self._arrived: list[tuple[GenerateRequest, float]] = []
        self._served: dict[str, _Served] = {}
        self._works: list[Work] = []
        self.stepping = False
        self.steps = 0

    def add(self, request: GenerateRequest, answer: range, now: float) -> None:
        self._served[request.id] = _Served(request, answer)
        self._arrived.append((request, now))

    def begin(self, now: float) -> float | None:
        """When the next step ends; None if there is nothing to do."""
        for request, arrival in self._arrived:
            self.watcher.received += 1
            self.scheduler.add(request, arrival)
        self._arrived.clear()
        self._works = self.scheduler.plan(now)
        self.stepping = bool(self._works)
        if not self._works:
            return None
        decodes = prompt_tokens = 0
        for work in self._works:
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
        outcomes, first, tokens = dict[str, WorkResult](), dict[str, int](), 0
        for work in self._works:
            served = self._served[work.id]
            outcomes[work.id] = WorkResult()
            if work.samples:
                outcomes[work.id] = WorkResult((served.answer[served.answered],))
                if not served.answered:
                    first[work.id] = served.cached or 0
                served.answered += 1
                tokens += 1
        finished = [id for id, _ in self.scheduler.commit(outcomes, now)]
        for id in finished:
            del self._served[id]
        return StepEnd(self.report(), first, finished, tokens)

    def report(self) -> StepReport:
        routing = self._routing.next([self.watcher] if self.watcher.asks else [])
        stats = EngineStats(blocks=self.pool.blocks)
        return StepReport((), stats, (), routing[0] if routing else None)
