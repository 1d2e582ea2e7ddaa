"""One engine under continuous batching: requests come in, each step moves all of them, new tokens come out.

`scheduling` plans what is fed, `drafting.py` guesses, `running_steps.py` feeds it to the engine and waits for it,
`choosing.py` makes tokens of what came of it, `counters.py` counts. Here requests come, steps begin and end, and
reports are written.

A step plans with the scheduler, feeds the engine, chooses tokens, and tells the scheduler what came of it. A request
that fails ends alone. Where an engine takes two steps at once, the next one is planned and begun while the device runs
the last, so that it never waits for Python: ahead of the last one's tokens where the engine itself chooses all of them,
else as soon as they are chosen. A request that turns out to have ended loses what the step ahead computes for it.

Where a sequence is one block (``shares_blocks`` is false), a shared prefix is computed again rather than copied: such
engines hold few sequences, and the one that holds the prefix is seldom there still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from engines.kernels.serving import Clipping, Clippings
from engines.protocol import Engine, Entry, Wanted
from runtime.engine.active import ActiveRequest
from runtime.engine.block_store import BlockStore
from runtime.engine.cache.pools import StatePools
from runtime.engine.choosing import choose
from runtime.engine.counters import CoreCounters
from runtime.engine.drafting import Drafting
from runtime.engine.routing import RoutingReports
from runtime.engine.running_steps import RunningStep, RunningSteps
from runtime.engine.sampling import BatchSampler
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.work import Work, WorkResult
from runtime.wire.limits import DisplacedError, Limits
from runtime.wire.messages import (
    Delta,
    EngineLoad,
    EngineStats,
    FinishReason,
    GenerateRequest,
    RefusedRequest,
    StepReport,
)
from tapeout.errors import RequestError, one_line

# Steps in turn that are begun ahead of the tokens before them, where drafts may pay: only after known tokens are drafts
# looked for.
MOST_AHEAD = 16
_NOTHING = WorkResult()
_FAILED = WorkResult(failed=True)


class EngineCore:
    """No more requests run at once than the engine takes in a step, whatever the limits.

    ``sampler``: by default one without constraints, in numpy.
    ``clippings``: values that the engine stored on static grids, and clipped. ``clock``: seconds, by which steps are
    timed; arrivals and steps are given points in time of the same clock.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        sampler: BatchSampler | None = None,
        clippings: Clippings = Clipping,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        has = engine.capabilities
        self.engine, self.clock = engine, clock
        pools = StatePools(
            blocks=has.blocks,
            slots=has.slots,
            block_tokens=has.block_tokens,
            max_tokens=has.max_tokens,
            snapshot_tokens=has.snapshot_tokens,
        )
        limits = pools.within(replace(limits, max_running=min(limits.max_running, has.max_batch)))
        self._paged, self._recurrent = pools.paged, pools.recurrent
        self.scheduler = Scheduler(pools.cache, limits, has.reads)
        self.blocks = BlockStore(engine, self._paged.pool)
        self.routing = RoutingReports(self._paged.pool, self._recurrent.pool, self.load)
        self._sampler = sampler or BatchSampler(has.vocab_size)
        trims = self.scheduler.cache.trims
        # Where a sequence is one block, several tokens of a sequence are fed alone, and drafts never pay.
        self._drafting = Drafting(self.scheduler, limits.max_draft_tokens if has.shares_blocks and trims else 0)
        self._most_begun = has.steps_at_once if trims else 1
        self._begun, self._counters = RunningSteps(engine), CoreCounters(clippings, engine)
        self._active: dict[str, ActiveRequest] = {}
        self._deltas: list[Delta] = []  # since the last report
        self._refusals: list[RefusedRequest] = []

    @property
    def busy(self) -> bool:
        """There is something to do or to report."""
        return bool(self._active or self._deltas or self._refusals or self._begun.steps)

    def add(self, request: GenerateRequest, now: float) -> None:
        """Queue a request that arrived at ``now``, or refuse it: the next report says so."""
        if request.id in self._active:
            self._refuse(request.id, RequestError(f"request {request.id} is there already", expected="a new id"))
            return
        try:
            self._sampler.add(request)
            _require_types(request)
            displaced = self.scheduler.add(request, now)
        except Exception as error:  # whatever a request holds, it must not end the engine
            self._sampler.remove(request.id)
            known = isinstance(error, RequestError)
            self._refuse(request.id, error if known else RequestError(f"the request is invalid: {one_line(error)}"))
            return
        answered, speculation = len(request.answered), self._drafting.of_request()
        self._active[request.id] = ActiveRequest(request, now, answered=answered, speculation=speculation)
        for id in displaced:
            self._forget(id, "displaced")
            found = "a request that goes before it took the place of this one in the full queue"
            expected = f"at most {self.scheduler.limits.max_waiting} waiting requests"
            self._refuse(id, DisplacedError(found, expected=expected, retry_after=self.scheduler.retry_after))

    def cancel(self, id: str) -> None:
        """End a request; nothing happens if it has ended already."""
        if self.scheduler.cancel(id):
            self._end(id, "cancelled")

    def step(self, now: float) -> StepReport:
        """Move every running request on. The report has what happened since the last one."""
        called, begun = self.clock(), self._begun.steps
        for id, reason in self.scheduler.expire(now):
            self._end(id, reason)
        if not begun:
            self._begin(now)
        if len(begun) == 1 and self._runs_ahead(begun[0]):
            self._begin(now + self.clock() - called)
        if begun:
            self._end_step()
            if not begun and self._most_begun > 1:  # the device need not wait until this step was reported
                self._begin(now + self.clock() - called)
        return self.report()

    def prepare(self) -> bool:
        """Do some work that later steps would wait for; True if another call would do more.

        Each running request may need a block in the next step. While none runs, as many as may run are expected.
        """
        return self.engine.prepare(self.scheduler.running or self.scheduler.limits.max_running)

    def report(self) -> StepReport:
        """What happened since the last report, and the state now."""
        report = StepReport(tuple(self._deltas), self.stats(), tuple(self._refusals))
        self._deltas.clear()
        self._refusals.clear()
        return report

    def load(self) -> EngineLoad:
        return self.scheduler.load()._replace(fetch_seconds=self.blocks.fetch_seconds)

    def stats(self) -> EngineStats:
        pools = self._paged.pool, self._recurrent.pool
        return self._counters.stats(self.scheduler, *pools, self.blocks, self._drafting.counts)

    def close(self) -> None:
        self._begun.wait()
        self.engine.close()

    def _begin(self, now: float) -> None:
        """Plan a step and begin it, if there is anything to do."""
        before = self._begun.steps[-1] if self._begun.steps else None
        works = self.scheduler.plan(now, None if before else self._drafting.drafts(self._active))
        if not works:
            return
        started = self.clock()
        for source, target in self._recurrent.take_copies():
            self.engine.copy_state(source, target)
        places = {work.id: place for place, work in enumerate(before.works)} if before else {}
        entries = [self._entry(work, places.get(work.id) if work.follows else None) for work in works]
        self._begun.begin(works, [self._active[work.id] for work in works], entries, now, started)

    def _runs_ahead(self, step: RunningStep) -> bool:
        """The next step may begin before this one, the last, has ended: not where that would be in vain."""
        return (
            self._most_begun > 1
            and not step.failed
            and all(entry.wanted == "token" for entry in step.entries)
            and not any(work.drafts for work in step.works)
            and not (step.ahead >= MOST_AHEAD and self._drafting.may_pay)
        )

    def _end_step(self) -> None:
        """Wait for the step that was begun first, and tell everybody what came of it."""
        step, results = self._begun.end()
        kept = [
            (work, active, result)
            for work, active, result in zip(step.works, step.requests, results, strict=True)
            if not active.ended
        ]
        choose(self._sampler, kept)
        outcomes = {work.id: _outcome(active) for work, active, _ in kept}
        ended = self.clock()
        finished: dict[str, FinishReason] = dict(self.scheduler.commit(outcomes, step.now + ended - step.started))
        for work, active, _ in kept:
            if work.drafts:
                self._drafting.learn(work, active)
            self._emit(active, finished.get(work.id))
        self._counters.stepped(step.works, step.started, ended)

    def _entry(self, work: Work, follows: int | None) -> Entry:
        active, lease = self._active[work.id], work.lease
        if active.cached is None:
            active.cached, active.queued = self.scheduler.cached_tokens(work.id), self.clock() - active.arrival
            self._counters.started(active, self.scheduler.lost_tokens(work.id))
        positions: Sequence[int] | None
        hands_over = False
        if active.request.prompt_logprobs is not None and (positions := active.unscored(work)):
            wanted: Wanted = "logits"
        elif not work.samples:
            wanted, positions = "token", ()
        else:
            wanted = self._sampler.needs(work.id)
            hands_over = wanted == "logits" and self.engine.capabilities.draws
            positions = range(len(work.tokens) - work.drafts - 1, len(work.tokens)) if work.drafts else None
        entry = Entry(
            work.tokens, work.start, lease.blocks, wanted, positions, 0, 0, lease.slot, lease.snapshots, follows
        )
        if hands_over:
            decided = work.start + len(work.tokens) - work.drafts - len(active.request.prompt)
            entry = self._sampler.handed_over(entry, work.id, decided)
        return entry

    def _emit(self, active: ActiveRequest, reason: FinishReason | None) -> None:
        """Report what a request's step has brought, if anything."""
        id, tokens, logprobs, error = active.request.id, active.tokens, active.logprobs, active.error
        active.tokens = active.logprobs = ()
        if error is not None:
            self._end(id, "error", error)
        elif tokens or reason:
            scores, cached, queued = None, 0, None
            if not active.answered:
                queued = active.queued
                self._counters.prompt_tokens += len(active.request.prompt)
                cached = active.cached or 0
                scores = None if active.request.prompt_logprobs is None else tuple(active.scores)
            active.answered += len(tokens)
            self._counters.generated_tokens += len(tokens)
            self._deltas.append(Delta(id, tokens, logprobs or None, scores, cached, reason, queue_seconds=queued))
            if reason:
                self._forget(id, reason)

    def _end(self, id: str, reason: FinishReason, error: str | None = None) -> None:
        self._deltas.append(Delta(id, finish_reason=reason, error=error))
        self._forget(id, reason)

    def _refuse(self, id: str, error: RequestError) -> None:
        self._refusals.append(RefusedRequest(id, error))

    def _forget(self, id: str, reason: str) -> None:
        self._active.pop(id).ended = True
        self._sampler.remove(id)
        self._counters.finished(reason)


def _outcome(active: ActiveRequest) -> WorkResult:
    if active.error is not None:
        return _FAILED
    return WorkResult(active.tokens, active.stops) if active.tokens else _NOTHING


def _require_types(request: GenerateRequest) -> None:
    """:class:`RequestError` for values of a wrong type: later they would fail the step, and everybody with it."""
    expected = {"max_new_tokens": int, "min_new_tokens": int, "priority": int, "tenant": str, "cache_salt": bytes}
    for name, kind in expected.items():
        if not isinstance(value := getattr(request, name), kind):
            raise RequestError(f"{name} is {value!r}", expected=kind.__name__)
