"""One engine under continuous batching: requests come in, each step moves all of them, new tokens come out.

P  positions of an entry whose results are wanted      V  vocabulary size

A step plans with the scheduler, feeds the engine, chooses tokens, and tells the scheduler what came of it. A request
that fails ends alone. Where an engine takes two steps at once, the next one is planned and begun while the device runs
the last, so that it never waits for Python: ahead of the last one's tokens where the engine itself chooses all of them,
else as soon as they are chosen. A request that turns out to have ended loses what the step ahead computes for it.

Where a sequence is one block (``shares_blocks`` is false), a shared prefix is computed again rather than copied: such
engines hold few sequences, and the one that holds the prefix is seldom there still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic

from engines.kernels.serving import Clipping, Clippings
from engines.protocol import Engine, Entry, Finish, FloatArray, Result, Wanted
from runtime.engine.block_store import BlockStore
from runtime.engine.cache.pools import StatePools
from runtime.engine.routing import RoutingReports
from runtime.engine.sampling import BatchSampler, SampledToken, logprobs_of
from runtime.engine.scheduler import Scheduler
from runtime.engine.speculation import Counts, Speculation, accept
from runtime.engine.work import Work, WorkResult
from runtime.wire.limits import DisplacedError, Limits
from runtime.wire.messages import (
    Delta,
    EngineLoad,
    EngineStats,
    FinishReason,
    GenerateRequest,
    RefusedRequest,
    StepReport,
    TokenLogprobs,
)
from tapeout.errors import RequestError, one_line

BROKEN_STEPS = 3  # so many steps in turn in which every entry failed: the engine is broken, not the requests
# Nobody looks for drafts where more of them than this must be accepted to pay: looking takes time, too.
MOST_WORTH = 0.8
# Steps in turn that are begun ahead of the tokens before them, where drafts may pay: only after known tokens are drafts
# looked for.
MOST_AHEAD = 16
CLIPPING_STEPS = 16  # between two reads of the kernels' counts of clipped values, of 10 µs each, while requests run
_NOTHING = WorkResult()
_FAILED = WorkResult(failed=True)


class EngineBrokenError(Exception):
    """The engine fails whatever it is fed."""


@dataclass
class _Active:
    """A request that waits or runs, and what its step has brought so far."""

    request: GenerateRequest
    arrival: float
    queued: float = 0.0  # seconds until its first step
    answered: int = 0  # tokens of the response that were reported, or brought by another engine
    cached: int | None = None  # prompt tokens found in the cache, once it runs
    scores: list[TokenLogprobs | None] = field(default_factory=lambda: [None])  # of the prompt
    tokens: tuple[int, ...] = ()
    stops: bool = False  # the last of them ends the response
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    speculation: Speculation | None = None
    last: int = 0  # token that was chosen

    def take(self, tokens: Sequence[int]) -> None:
        """New tokens, up to one that stops the response."""
        stops, least = self.request.stop_tokens, self.request.min_new_tokens - self.answered
        for count, token in enumerate(tokens):
            if token in stops and count >= least:
                self.stops, tokens = True, tokens[: count + 1]
                break
        self.tokens, self.last = tuple(tokens), tokens[-1]


@dataclass
class _RunningStep:
    """A step that was begun. ``now``: when it was planned; ``started``: the same by the core's own clock.

    ``ahead``: so many steps in turn, this one the last, were begun before the tokens of the one before were known.
    ``failed``: it is known to have; ``finish`` says why.
    """

    works: Sequence[Work]
    requests: Sequence[_Active]
    entries: Sequence[Entry]
    now: float
    started: float
    ahead: int
    finish: Finish
    failed: bool = False


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
        self.scheduler = Scheduler(pools.cache, limits)
        self.blocks = BlockStore(engine, self._paged.pool)
        self.routing = RoutingReports(self._paged.pool, self._recurrent.pool, self.load)
        self._sampler = sampler or BatchSampler(has.vocab_size)
        self._clippings, self._clipped = clippings, clippings()
        # Where a sequence is one block, several tokens of a sequence are fed alone, and drafts never pay.
        self._most_drafted = limits.max_draft_tokens if has.shares_blocks and self.scheduler.cache.trims else 0
        self._most_begun = has.steps_at_once if self.scheduler.cache.trims else 1
        self._begun: list[_RunningStep] = []
        self._ended = 0.0  # when the last step did
        self._counts = Counts()
        self._active: dict[str, _Active] = {}
        self._deltas: list[Delta] = []  # since the last report
        self._refusals: list[RefusedRequest] = []
        self._broken_steps = 0
        self._finished: Counter[str] = Counter()
        self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._prefix_queries = self._prefix_hits = self._prefix_lost = 0
        self._step_seconds, self._step_tokens, self._step_requests = 0.0, 0, 0

    @property
    def busy(self) -> bool:
        """There is something to do or to report."""
        return bool(self._active or self._deltas or self._refusals or self._begun)

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
        speculation = Speculation(self.scheduler.costs, self._counts) if self._most_drafted else None
        self._active[request.id] = _Active(request, now, answered=len(request.answered), speculation=speculation)
        for id in displaced:
            self._forget(id, "displaced")
            found = "a request of a higher priority took the place of this one in the full queue"
            expected = f"at most {self.scheduler.limits.max_waiting} waiting requests"
            self._refuse(id, DisplacedError(found, expected=expected, retry_after=self.scheduler.retry_after))

    def cancel(self, id: str) -> None:
        """End a request; nothing happens if it has ended already."""
        if self.scheduler.cancel(id):
            self._end(id, "cancelled")

    def step(self, now: float) -> StepReport:
        """Move every running request on. The report has what happened since the last one."""
        called = self.clock()
        for id, reason in self.scheduler.expire(now):
            self._end(id, reason)
        if not self._begun:
            self._begin(now)
        if len(self._begun) == 1 and self._runs_ahead(self._begun[0]):
            self._begin(now + self.clock() - called)
        if self._begun:
            self._end_step()
            if not self._begun and self._most_begun > 1:  # the device need not wait until this step was reported
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
        scheduler, blocks, slots = self.scheduler, self._paged.pool, self._recurrent.pool
        if not scheduler.running or self._steps % CLIPPING_STEPS == 0:
            self._clipped = self._clippings()
        values = self._clipped
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting,
            waiting_tokens=scheduler.waiting_tokens,
            blocks=blocks.blocks,
            blocks_held=blocks.held,
            blocks_cached=blocks.cached,
            steps=self._steps,
            step_seconds=self._step_seconds,
            step_tokens=self._step_tokens,
            step_requests=self._step_requests,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=scheduler.preemptions,
            drafts=self._counts.drafts,
            drafted_tokens=self._counts.drafted,
            accepted_tokens=self._counts.accepted,
            kv_values=values.kv.stored,
            kv_values_clipped=values.kv.clipped,
            activation_values=values.activations.stored,
            activation_values_clipped=values.activations.clipped,
            finished=dict(self._finished),
            slots=slots.blocks,
            slots_held=slots.held,
            slots_cached=slots.cached,
            prefix_lost=self._prefix_lost,
            blocks_fetched=self.blocks.fetched,
            blocks_sent=self.blocks.sent,
            fetches_failed=self.blocks.failed,
        )

    def close(self) -> None:
        self._wait_for(self._begun)
        self.engine.close()

    def _begin(self, now: float) -> None:
        """Plan a step and begin it, if there is anything to do."""
        before = self._begun[-1] if self._begun else None
        works = self.scheduler.plan(now, None if before else self._drafts())
        if not works:
            return
        started = self.clock()
        for source, target in self._recurrent.take_copies():
            self.engine.copy_state(source, target)
        places = {work.id: place for place, work in enumerate(before.works)} if before else {}
        entries = [self._entry(work, places.get(work.id) if work.follows else None) for work in works]
        requests = [self._active[work.id] for work in works]
        ahead = before.ahead + 1 if before else 0
        try:
            step = _RunningStep(works, requests, entries, now, started, ahead, self.engine.begin(entries))
        except Exception as failure:
            step = _RunningStep(works, requests, entries, now, started, ahead, _raising(failure), failed=True)
        self._begun.append(step)

    def _runs_ahead(self, step: _RunningStep) -> bool:
        """The next step may begin before this one, the last, has ended: not where that would be in vain."""
        return (
            self._most_begun > 1
            and not step.failed
            and all(entry.wanted == "token" for entry in step.entries)
            and not any(work.drafts for work in step.works)
            and not (step.ahead >= MOST_AHEAD and self._drafting)
        )

    def _end_step(self) -> None:
        """Wait for the step that was begun first, and tell everybody what came of it."""
        step = self._begun.pop(0)
        results = self._results(step)
        kept = [
            (work, request, result)
            for work, request, result in zip(step.works, step.requests, results, strict=True)
            if self._active.get(work.id) is request  # else it has ended meanwhile
        ]
        works = [work for work, _, _ in kept]
        self._choose(works, [result for _, _, result in kept])
        outcomes = {work.id: self._outcome(work.id) for work in works}
        ended = self.clock()
        finished: dict[str, FinishReason] = dict(self.scheduler.commit(outcomes, step.now + ended - step.started))
        for work in works:
            if work.drafts:
                self._learn(work)
            self._emit(work.id, finished.get(work.id))
        self._steps += 1
        self._step_seconds, self._ended = ended - max(step.started, self._ended), ended
        self._step_requests = len(step.works)
        self._step_tokens = sum(len(work.tokens) for work in step.works)

    def _drafts(self) -> dict[str, Sequence[int]]:
        """Guesses for the requests that decode in the next step, where they pay and prompts leave room for them."""
        if not self._drafting:
            return {}
        drafts: dict[str, Sequence[int]] = {}
        decoding = self.scheduler.decoding()
        for id, tokens, room in decoding:
            speculation = self._active[id].speculation
            if speculation and (found := speculation.draft(tokens, min(room, self._most_drafted), len(decoding))):
                drafts[id] = found
        return drafts

    @property
    def _drafting(self) -> bool:
        """Drafts may pay in the next step."""
        if not self._most_drafted or self.scheduler.feeds_prompts:
            return False
        costs, running = self.scheduler.costs, self.scheduler.running  # all of them decode
        return not costs.plain_due(running) and costs.worth(running) <= MOST_WORTH

    def _learn(self, work: Work) -> None:
        active = self._active[work.id]
        drafts = work.tokens[len(work.tokens) - work.drafts :]
        if active.speculation and active.error is None:
            held = sum(token == draft for token, draft in zip(active.tokens, drafts, strict=False))
            active.speculation.observe(work.drafts, held)

    def _entry(self, work: Work, follows: int | None) -> Entry:
        active = self._active[work.id]
        if active.cached is None:
            active.cached, active.queued = self.scheduler.cached_tokens(work.id), self.clock() - active.arrival
            self._prefix_queries += len(active.request.prompt) + len(active.request.answered)
            self._prefix_hits += active.cached
            self._prefix_lost += self.scheduler.lost_tokens(work.id)
        positions: Sequence[int] | None
        hands_over = False
        if active.request.prompt_logprobs is not None and (positions := _unscored(active, work)):
            wanted: Wanted = "logits"
        elif not work.samples:
            wanted, positions = "token", ()
        else:
            wanted = self._sampler.needs(work.id)
            hands_over = wanted == "logits" and self.engine.capabilities.draws
            positions = range(len(work.tokens) - work.drafts - 1, len(work.tokens)) if work.drafts else None
        lease = work.lease
        entry = Entry(
            work.tokens, work.start, lease.blocks, wanted, positions, 0, 0, lease.slot, lease.snapshots, follows
        )
        decided = work.start + len(work.tokens) - work.drafts - len(active.request.prompt)
        return self._sampler.handed_over(entry, work.id, decided) if hands_over else entry

    def _results(self, step: _RunningStep) -> list[Result]:
        """Of a step. If it fails as a whole, each entry is fed alone, and those that fail alone end.

        The steps behind it were fed what it has not computed: each of them fails, too.
        """
        try:
            results = step.finish()
        except Exception as failure:
            self._wait_for(self._begun)
            for later in self._begun:
                later.finish, later.failed = _raising(failure), True
            results, fed = list[Result](), list[Result]()
            for work, request, entry in zip(step.works, step.requests, step.entries, strict=True):
                result = Result()
                if self._active.get(work.id) is request:
                    result = self._feed_alone(entry, request)
                    fed.append(result)
                results.append(result)
            if fed:  # else all requests have ended, and nothing is known of the engine
                self._broken_steps = self._broken_steps + 1 if all(result.error for result in fed) else 0
            if self._broken_steps == BROKEN_STEPS:
                raise EngineBrokenError(f"{BROKEN_STEPS} steps in turn failed: {one_line(failure)}") from failure
        else:
            self._broken_steps = 0
        return results

    def _feed_alone(self, entry: Entry, request: _Active) -> Result:
        if entry.follows is not None:
            entry = entry._replace(tokens=(request.last,), follows=None)
        try:
            return self.engine.begin([entry])()[0]
        except Exception as failure:
            return Result(error=RequestError(f"the engine failed: {one_line(failure)}"))

    def _wait_for(self, steps: Sequence[_RunningStep]) -> None:
        """For their ends, whatever comes of them."""
        for step in steps:
            with suppress(Exception):
                step.finish()

    def _choose(self, works: Sequence[Work], results: Sequence[Result]) -> None:
        """The new tokens of every request that gets some, scores of prompts, and errors."""
        drafts: dict[str, Sequence[int]] = {}  # of requests that choose from logits
        logits: dict[str, FloatArray] = {}
        for work, result in zip(works, results, strict=True):
            active, first = self._active[work.id], len(work.tokens) - work.drafts
            if result.error is not None:
                active.error = str(result.error)
            elif result.tokens is not None:
                chosen = result.tokens.tolist()
                active.take(accept(chosen, work.tokens[first:]) if work.drafts else chosen)
                active.logprobs = logprobs_of(active.tokens, result.ranked or ())
            elif result.logits is not None:
                self._score(active, result.logits)
                if work.samples and active.error is None:
                    drafts[work.id], logits[work.id] = work.tokens[first:], result.logits[-work.drafts - 1 :]
        if not drafts:
            return
        for id, choices in self._draw(drafts, logits).items():
            active = self._active[id]
            active.error = choices[-1].error
            active.take([choice.token for choice in choices])
            active.logprobs = tuple(choice.logprobs for choice in choices if choice.logprobs is not None)

    def _draw(
        self, drafts: Mapping[str, Sequence[int]], logits: Mapping[str, FloatArray]
    ) -> Mapping[str, Sequence[SampledToken]]:
        """The choices of each request. If this fails, all choose alone, and those that fail alone end.

        So do those with drafts: some of their choices may count as said already.
        """
        try:
            return self._sampler.choose_drafted(drafts, logits)
        except Exception as failure:
            failed = [SampledToken(-1, error=f"sampling failed: {one_line(failure)}")]
            if len(drafts) == 1:
                return dict.fromkeys(drafts, failed)
            return {id: failed if guesses else self._draw({id: guesses}, logits)[id] for id, guesses in drafts.items()}

    def _score(self, active: _Active, logits: FloatArray) -> None:
        """Log-probabilities of prompt tokens that have none yet, from the logits ``[P, V]`` of the tokens before."""
        top, prompt, first = active.request.prompt_logprobs, active.request.prompt, len(active.scores)
        if top is not None and (count := min(len(logits), len(prompt) - first)):
            try:
                active.scores += self._sampler.score(prompt[first : first + count], logits[:count], top)
            except RequestError as error:
                active.error = error.found

    def _outcome(self, id: str) -> WorkResult:
        active = self._active[id]
        if active.error is not None:
            return _FAILED
        return WorkResult(active.tokens, active.stops) if active.tokens else _NOTHING

    def _emit(self, id: str, reason: FinishReason | None) -> None:
        """Report what a request's step has brought, if anything."""
        active = self._active[id]
        tokens, logprobs, error = active.tokens, active.logprobs, active.error
        active.tokens = active.logprobs = ()
        if error is not None:
            self._end(id, "error", error)
        elif tokens or reason:
            scores, cached, queued = None, 0, None
            if not active.answered:
                queued = active.queued
                self._prompt_tokens += len(active.request.prompt)
                cached = active.cached or 0
                scores = None if active.request.prompt_logprobs is None else tuple(active.scores)
            active.answered += len(tokens)
            self._generated_tokens += len(tokens)
            self._deltas.append(Delta(id, tokens, logprobs or None, scores, cached, reason, queue_seconds=queued))
            if reason:
                self._forget(id, reason)

    def _end(self, id: str, reason: FinishReason, error: str | None = None) -> None:
        self._deltas.append(Delta(id, finish_reason=reason, error=error))
        self._forget(id, reason)

    def _refuse(self, id: str, error: RequestError) -> None:
        self._refusals.append(RefusedRequest(id, error))

    def _forget(self, id: str, reason: str) -> None:
        del self._active[id]
        self._sampler.remove(id)
        self._finished[reason] += 1


def _raising(failure: Exception) -> Finish:
    """The second half of a step that has failed."""

    def finish() -> list[Result]:
        raise failure

    return finish


def _require_types(request: GenerateRequest) -> None:
    """:class:`RequestError` for values of a wrong type: later they would fail the step, and everybody with it."""
    expected = {"max_new_tokens": int, "min_new_tokens": int, "priority": int, "tenant": str, "cache_salt": bytes}
    for name, kind in expected.items():
        if not isinstance(value := getattr(request, name), kind):
            raise RequestError(f"{name} is {value!r}", expected=kind.__name__)


def _unscored(active: _Active, work: Work) -> range:
    """Tokens of the work that precede a prompt token without a score; with them the last, if it decides a token."""
    first = max(len(active.scores) - 1 - work.start, 0)
    end = len(active.request.prompt) - 1 - work.start
    if first >= min(end, len(work.tokens)):
        return range(0)
    return range(first, len(work.tokens) if work.samples else min(end, len(work.tokens)))
