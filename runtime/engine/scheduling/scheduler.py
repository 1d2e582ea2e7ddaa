"""Which tokens of which requests the next step feeds: iteration-level scheduling over a cache of sequences.

Here requests arrive and end, and steps are planned and committed. `sequence.py` is one request, `requests.py` all of
them, `order.py` who comes first, `admission.py` who may begin, `step_planner.py` what a step feeds, `planned_steps.py`
what is in flight.

A request waits, runs, and ends once. A running request has tokens that its state does not hold yet: a part of its
prompt, or the token that was chosen last. Each step first feeds requests that decode, then prompts, in chunks: as many
tokens as keep inter-token latency within its bound. Requests join and leave at any step.

Where several tenants use an engine, long steps are split: the prompts that would be beside decodes follow in steps of
their own, so that whoever comes waits for the end of a short one. Answers of a tenant that takes much more than another
one rest for a moment while prompts of the other one are computed, one after the other, and some places are kept free of
tenants that take a large part.

Where memory runs out, the running request of the lowest rank gives up its state and is computed again later, from the
longest prefix that the cache (runtime/engine/cache) still has. State is not moved to host memory or disk instead: on a
CPU it is in host memory already, and a disk is slower to read than state is to compute.

A step may be planned while the one before it runs, if no token of that is needed for it: a request whose next token is
not known yet feeds it all the same, and what it gets is dropped where it has ended meanwhile. Then nobody is preempted,
and what such a request held is kept until the steps that write it have ended.

Requests that share a prefix share its state. One that arrives while another computes the same prefix waits for it, so
``n`` responses to one prompt compute it once. Neither numpy nor an engine is imported here, and no clock is read: the
caller says what time it is, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from runtime.engine.cache.sequences import SequenceCache
from runtime.engine.scheduling.deadlines import Deadlines, timeouts_of
from runtime.engine.scheduling.order import ServiceOrder
from runtime.engine.scheduling.planned_steps import PlannedSteps
from runtime.engine.scheduling.requests import Requests
from runtime.engine.scheduling.sequence import ScheduledSequence
from runtime.engine.scheduling.step_costs import StepCosts
from runtime.engine.scheduling.step_planner import StepPlanner
from runtime.engine.scheduling.work import Finished, Work, WorkResult
from runtime.wire.limits import Limits, QueueFullError
from runtime.wire.messages import EngineLoad, GenerateRequest
from tapeout.errors import RequestError


class Scheduler:
    """``reads``: see :class:`StepCosts`."""

    def __init__(
        self, cache: SequenceCache, limits: Limits, reads: Callable[[int], float] = lambda tokens: 1.0
    ) -> None:
        self.cache, self.limits = cache, limits
        bounds = (limits.itl_factor, limits.itl_seconds, limits.backlog_seconds, limits.step_seconds)
        self.costs = StepCosts(*bounds, reads)
        self._order = ServiceOrder(limits)
        self._requests = Requests(cache, self._order)
        self._planner = StepPlanner(self._requests, cache, self._order, self.costs, limits)
        self._planned, self._deadlines = PlannedSteps(), Deadlines()
        self._speed: float | None = None  # tokens per second, smoothed
        self._busy_since: float | None = None  # the last commit, unless there was nothing to do after it

    @property
    def waiting(self) -> int:
        return len(self._requests.waiting)

    @property
    def waiting_tokens(self) -> int:
        return self._requests.queue.tokens

    @property
    def running(self) -> int:
        return len(self._requests.running)

    @property
    def preemptions(self) -> int:
        """So far."""
        return self._requests.preemptions

    @property
    def preempted(self) -> list[str]:
        """Requests that have begun and wait for memory."""
        return [id for id, sequence in self._requests.waiting.items() if sequence.started]

    def cached_tokens(self, id: str) -> int:
        """Prompt tokens of a running request that it did not have to compute."""
        return self._requests.running[id].cached

    def lost_tokens(self, id: str) -> int:
        """Prompt tokens of a running request that it computes only because no snapshot of their state was there."""
        return self._requests.running[id].lost

    @property
    def feeds_prompts(self) -> bool:
        """A running request has more than one token to feed: the next step has room for prompts first."""
        return any(sequence.pending > 1 for sequence in self._requests.running.values())

    def decoding(self) -> list[tuple[str, Sequence[int], int]]:
        """Requests that feed one token in the next step: id, tokens so far, and how many guesses there is room for."""
        return [
            (id, sequence.tokens, sequence.draft_room if self.cache.trims else 0)
            for id, sequence in self._requests.running.items()
            if sequence.pending == 1
        ]

    @property
    def retry_after(self) -> float | None:
        """Seconds in which the tokens that wait now can be fed; None before any was."""
        return self.waiting_tokens / self._speed if self._speed else None

    def load(self) -> EngineLoad:
        """How much there is to do, and how fast it is done. Of a request that waits, the cache is asked once."""
        backlog = decodes = others = 0
        large = self._order.large_tenants()
        for sequence in self._requests.waiting.values():
            if sequence.missing is None:
                match = self.cache.match(sequence.lease, sequence.tokens, sequence.most_cached)
                sequence.missing = len(sequence.tokens) - match.tokens
            backlog += sequence.missing
            others += 0 if sequence.tenant in large else sequence.missing
        for sequence in self._requests.running.values():
            pending = sequence.pending
            if pending == 1:
                decodes += 1
            else:
                backlog += pending
                others += 0 if sequence.tenant in large else pending
        costs, limits = self.costs, self.limits
        chunk = costs.chunk(decodes, max(0, limits.step_tokens - decodes), backlog)
        return EngineLoad(
            backlog_tokens=backlog,
            decodes=decodes,
            waiting=self.waiting,
            running=self.running,
            most_running=limits.max_running,
            chunk_tokens=chunk,
            prompt_seconds=costs.prompt_seconds_beside(decodes, chunk),
            decode_seconds=costs.decode_seconds(decodes),
            answer_tokens=int(self._requests.answer_tokens or 0),
            step_seconds=self._planner.next_seconds(decodes, min(chunk, backlog), others if large else 0),
            large=tuple(large),
            others_tokens=others,
        )

    def add(self, request: GenerateRequest, now: float) -> list[str]:
        """Queue a request that arrived at ``now``. Those that lose their place in a full queue have ended.

        :class:`RequestError` for one that can never run, :class:`QueueFullError` where the queue has no room; then
        nobody ends.
        """
        timeouts, prompt, limits = timeouts_of(request), len(request.prompt), self.limits
        if self._requests.find(request.id):
            raise RequestError(f"request {request.id} is there already", expected="an id of its own")
        # The last new token is never fed, so it needs no position.
        positions = prompt + max(request.max_new_tokens - 1, 0)
        most = self.cache.max_tokens
        if not prompt or request.max_new_tokens < 0 or positions > most:
            raise RequestError(
                f"{prompt} prompt tokens and {request.max_new_tokens} new ones",
                expected=f"at least one prompt token, and at most {most + 1} together",
                remedy="shorten the prompt or ask for fewer new tokens",
            )
        displaced = self._requests.queue.displaced(request, limits, now)
        if displaced is None:
            raise QueueFullError(
                f"{self.waiting} requests of {self.waiting_tokens} tokens are waiting",
                expected=f"at most {limits.max_waiting} requests and {limits.max_waiting_tokens} tokens",
                retry_after=self.retry_after,
            )
        ended = [self._requests.finish(sequence.id, "error").id for sequence in displaced]
        sequence = ScheduledSequence(request, now)
        self._requests.add(sequence)
        self._deadlines.add(sequence, timeouts)
        self._deadlines.tidy(self.waiting + self.running)
        return ended

    def cancel(self, id: str) -> Finished | None:
        """End a request now; its memory is free for the next step. None if there is no such request."""
        return self._requests.finish(id, "cancelled") if self._requests.find(id) else None

    def expire(self, now: float) -> list[Finished]:
        """End the requests whose deadline has passed."""
        return [self._requests.finish(sequence.id, "timeout") for sequence in self._deadlines.passed(now)]

    def plan(self, now: float, drafts: Mapping[str, Sequence[int]] | None = None) -> list[Work]:
        """The next step, at most ``step_tokens`` tokens. :meth:`commit` must follow, unless it is empty.

        ``drafts``: guesses for requests that decode. They are fed as far as there is room for them.
        Where the step before is not committed, there are no drafts, and nothing is planned if somebody might have to be
        preempted. Then state must be such that it ``trims``.
        """
        ahead = bool(self._planned.steps)
        assert not ahead or (self.cache.trims and not drafts), "a step cannot be planned ahead of the last one"
        works = self._planner.plan(now, drafts, ahead=ahead)
        if works:
            self._planned.begin(works, now)
        return list(works.values())

    def commit(self, outcomes: Mapping[str, WorkResult], now: float) -> list[Finished]:
        """What came of the planned work; requests that have ended meanwhile may be missing. Who has ended."""
        fed, decodes, drafts, failed, finished = 0, 0, 0, False, list[Finished]()
        requests, step, served = self._requests, self._planned.end(now), dict[str, int]()
        for sequence, work in step.works.items():
            # Of those that have ended, too: the step took its time for them.
            count = len(work.tokens)
            fed += count
            drafts += work.drafts
            decodes += work.samples and count - work.drafts == 1
            if sequence.ended:
                if not sequence.planned:
                    requests.release(sequence)
                continue
            id, outcome = sequence.id, outcomes[sequence.id]
            if outcome.failed:
                failed = True
                finished.append(requests.finish(id, "error"))
                continue
            served[sequence.tenant] = served.get(sequence.tenant, 0) + count
            sequence.computed = work.start + count - work.drafts
            if work.samples:
                assert 1 <= len(outcome.tokens) <= work.drafts + 1, f"request {id} got {len(outcome.tokens)} tokens"
                sequence.tokens += outcome.tokens
                sequence.last = now
                sequence.computed += len(outcome.tokens) - 1
            if not sequence.planned:
                sequence.fed = sequence.computed
            if sequence.computed >= sequence.lease.due:
                self.cache.commit(sequence.lease, sequence.tokens, sequence.computed)
            if outcome.stop:
                finished.append(requests.finish(id, "stop"))
            elif len(sequence.tokens) == sequence.most_tokens and (
                work.samples or sequence.computed == len(sequence.tokens)
            ):
                finished.append(requests.finish(id, "length"))
        self._order.feed(served, now)
        if not failed:  # else it is not known what took the time
            self.costs.observe(decodes, fed - decodes - drafts, drafts, now - step.began)
        self._measure(fed, now - (step.began if self._busy_since is None else self._busy_since))
        self._busy_since = now if self.running or self.waiting else None
        return finished

    def check(self) -> None:
        """The bookkeeping adds up; for tests, and for a server that is idle."""
        self._requests.check()
        running, waiting = self._requests.running.values(), self._requests.waiting.values()
        self.cache.check(sequence.lease for sequence in {*running, *self._planned.sequences})
        for sequence in (*running, *waiting):
            self._planned.check(sequence)

    def _measure(self, fed: int, seconds: float) -> None:
        if fed and seconds > 0:
            speed = fed / seconds
            self._speed = speed if self._speed is None else 0.9 * self._speed + 0.1 * speed
