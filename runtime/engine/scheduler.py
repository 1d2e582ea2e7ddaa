"""Which tokens of which requests the next step feeds: iteration-level scheduling over a cache of sequences.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from runtime.engine.cache.kinds import Demand, Lease
from runtime.engine.cache.sequences import SequenceCache
from runtime.engine.step_costs import StepCosts
from runtime.engine.tenant_shares import TenantShares
from runtime.engine.waiting import Rank, WaitingQueue
from runtime.engine.work import UNDECIDED, Finished, Work, WorkResult
from runtime.wire.limits import Limits, QueueFullError
from runtime.wire.messages import EngineLoad, FinishReason, GenerateRequest
from tapeout.errors import RequestError

SHARED_SECONDS = 60.0  # after two tenants had requests at once, an engine counts as shared for so long
KEPT_PLACES = 8  # one in so many of the requests that run at once is kept from tenants that take a large part
LEAST_REST = 0.25  # of the longest rest: for less, a prompt does not have a step alone


@dataclass(eq=False)
class _Sequence:
    request: GenerateRequest
    arrival: float
    computed: int = 0  # positions that its state holds
    fed: int = 0  # positions that it holds once all planned steps have ended
    undecided: int = 0  # tokens that these steps decide
    planned: int = 0  # these steps
    missing: int | None = None  # while it waits: tokens that the cache did not have when the load was asked for
    cached: int = 0  # prompt tokens that were found in the cache when it first ran
    lost: int = 0  # prompt tokens behind those that one kind of state was found of, and another was not
    started: bool = False
    last: float = 0.0  # when its last token came

    def __post_init__(self) -> None:
        request = self.request
        self.id, self.tenant, self.priority = request.id, request.tenant, request.priority
        # Tokens of the answer follow, those that another engine has brought already among them.
        self.tokens, self.lease = [*request.prompt, *request.answered], Lease(request.cache_salt)
        # The logits of all prompt tokens are wanted, so none of them is taken from the cache.
        self.scored = request.prompt_logprobs is not None

    @property
    def answered(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass
class _PlannedStep:
    """A planned step. ``began``: when the engine began it, as far as is known."""

    works: dict[_Sequence, Work]
    began: float


_Deadline = tuple[float, int, str, _Sequence]  # when, a number that makes it unique, until what, of whom


class Scheduler:
    def __init__(self, cache: SequenceCache, limits: Limits) -> None:
        self.cache, self.limits = cache, limits
        self.costs = StepCosts(limits.itl_factor, limits.itl_seconds, limits.backlog_seconds, limits.step_seconds)
        self.preemptions = 0
        self._queue = WaitingQueue(self._rank)
        self._waiting = self._queue.sequences
        self._running: dict[str, _Sequence] = {}
        self._planned: list[_PlannedStep] = []  # not committed, in order
        self._works: dict[_Sequence, Work] = {}  # of the step that is planned
        self._deadlines: list[_Deadline] = []  # a heap
        self._numbers = count()
        self._served: dict[str, float] = {}  # tokens fed, by tenant
        self._shares = TenantShares()
        self._heavy: frozenset[str] = frozenset()  # tenants that take much more than another one that is active
        self._large: frozenset[str] = frozenset()  # tenants that take a large part of an engine that is shared
        self._shared_until = -inf
        self._owed = 0  # prompt tokens that follow the last decodes in steps of their own
        self._piece = 0  # of such a step
        self._active: dict[str, int] = {}  # requests, by tenant
        self._speed: float | None = None  # tokens per second, smoothed
        self._answer_tokens: float | None = None  # of a request, smoothed
        self._busy_since: float | None = None  # the last commit, unless there was nothing to do after it

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return self._queue.tokens

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def preempted(self) -> list[str]:
        """Requests that have begun and wait for memory."""
        return [id for id, sequence in self._waiting.items() if sequence.started]

    def cached_tokens(self, id: str) -> int:
        """Prompt tokens of a running request that it did not have to compute."""
        return self._running[id].cached

    def lost_tokens(self, id: str) -> int:
        """Prompt tokens of a running request that it computes only because no snapshot of their state was there."""
        return self._running[id].lost

    @property
    def feeds_prompts(self) -> bool:
        """A running request has more than one token to feed: the next step has room for prompts first."""
        return any(self._pending(sequence) > 1 for sequence in self._running.values())

    def decoding(self) -> list[tuple[str, Sequence[int], int]]:
        """Requests that feed one token in the next step: id, tokens so far, and how many guesses there is room for."""
        return [
            (id, sequence.tokens, self._room(sequence))
            for id, sequence in self._running.items()
            if self._pending(sequence) == 1
        ]

    def load(self) -> EngineLoad:
        """How much there is to do, and how fast it is done. Of a request that waits, the cache is asked once."""
        backlog = decodes = others = 0
        large = self._shares.large(self._active)
        for sequence in self._waiting.values():
            if sequence.missing is None:
                match = self.cache.match(sequence.lease, sequence.tokens, self._most_cached(sequence))
                sequence.missing = len(sequence.tokens) - match.tokens
            backlog += sequence.missing
            others += 0 if sequence.tenant in large else sequence.missing
        for sequence in self._running.values():
            pending = self._pending(sequence)
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
            prompt_seconds=costs.prompt_seconds,
            decode_seconds=costs.decode_seconds(decodes),
            answer_tokens=int(self._answer_tokens or 0),
            step_seconds=self._next_seconds(decodes, min(chunk, backlog), others if large else 0),
            large=tuple(large),
            others_tokens=others,
        )

    def _next_seconds(self, decodes: int, prompts: int, others: int) -> float:
        """How long the next step is expected to take. ``prompts``: tokens that it might have beside its decodes.
        ``others``: of those, tokens of tenants for which large ones rest.
        """
        costs, several = self.costs, len(self._active) > 1
        if others and several:
            return min(others, self.limits.step_tokens) * costs.prompt_seconds
        if prompts and self._owed:
            return min(self._owed, self._piece, prompts) * costs.prompt_seconds
        if several and decodes and prompts > costs.piece(decodes):
            prompts = 0
        return costs.decode_seconds(decodes) + prompts * costs.prompt_seconds

    def add(self, request: GenerateRequest, now: float) -> list[str]:
        """Queue a request that arrived at ``now``. Those that lose their place in a full queue have ended.

        :class:`RequestError` for one that can never run, :class:`QueueFullError` where the queue has no room.
        """
        timeouts, prompt = _timeouts(request), len(request.prompt)
        if request.id in self._waiting or request.id in self._running:
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
        displaced = self._make_room(request, now)
        tenant = request.tenant
        if tenant not in self._active:
            # A tenant that was away has not saved up its share.
            self._served[tenant] = min(self._served.values(), default=0.0)
        self._active[tenant] = self._active.get(tenant, 0) + 1
        sequence = _Sequence(request, now)
        self._queue.add(sequence)
        for until, seconds in timeouts.items():
            heappush(self._deadlines, (now + seconds, next(self._numbers), until, sequence))
        return displaced

    def cancel(self, id: str) -> Finished | None:
        """End a request now; its memory is free for the next step. None if there is no such request."""
        return self._finish(id, "cancelled") if self._find(id) else None

    def expire(self, now: float) -> list[Finished]:
        """End the requests whose deadline has passed."""
        expired: list[Finished] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, until, sequence = heappop(self._deadlines)
            id = sequence.id
            kept = (until == "queue" and sequence.started) or (until == "first token" and sequence.answered)
            if not kept and self._find(id) is sequence:
                expired.append(self._finish(id, "timeout"))
        if len(self._deadlines) > 256 + 6 * (self.waiting + self.running):  # mostly of requests that have ended
            self._deadlines = [entry for entry in self._deadlines if self._find(entry[3].request.id) is entry[3]]
            heapify(self._deadlines)
        return expired

    def plan(self, now: float, drafts: Mapping[str, Sequence[int]] | None = None) -> list[Work]:
        """The next step, at most ``step_tokens`` tokens. :meth:`commit` must follow, unless it is empty.

        ``drafts``: guesses for requests that decode. They are fed as far as there is room for them.
        Where the step before is not committed, there are no drafts, and nothing is planned if somebody might have to be
        preempted. Then state must be such that it ``trims``.
        """
        assert not self._planned or (self.cache.trims and not drafts), "a step cannot be planned ahead of the last one"
        works = self._works = dict[_Sequence, Work]()
        self._heavy = frozenset[str]()
        if len(self._active) > 1:
            self._heavy, self._shared_until = self._shares.heavy(self._active, now), now + SHARED_SECONDS
        shared = now < self._shared_until
        self._large = self._shares.large(self._active) if shared else frozenset()
        decoding, prompts = list[_Sequence](), list[_Sequence]()
        for sequence in self._running.values():
            if pending := self._pending(sequence):
                (decoding if pending == 1 else prompts).append(sequence)
        if self._planned and not self.cache.can_grow(len(decoding)):
            return []
        # The order decides who gets memory, which matters only where there is too little.
        if len(decoding) > self.limits.step_tokens or not self.cache.can_grow(len(decoding)):
            decoding.sort(key=lambda sequence: self._rank(sequence, now))
        if len(prompts) > 1:
            prompts.sort(key=lambda sequence: self._rank(sequence, now))
        rest, fed = self._rest(decoding, prompts, now), 0
        if rest is not None:
            fed = self._fill(self._light(decoding), self._light(prompts), now, rest=rest)
        if not fed and self._owed and not works:
            # The last token of a prompt is fed like one of an answer, and should not wait for other prompts.
            first = [sequence for sequence in decoding if not sequence.answered]
            fed = self._fill(first, prompts, now, most=min(self._owed, self._piece))
            self._owed = self._owed - fed if fed else 0
        if not fed:  # no prompt could be fed for which others would rest, or that had been put off
            fed = self._fill(decoding, prompts, now, splits=shared)
        # Not beside prompts: their tokens must be computed in any case, and a guess may be wrong.
        if drafts and not fed and not self._owed:
            decodes = len(works)
            self._add_drafts(drafts, self.costs.draft_budget(decodes, self.limits.step_tokens - decodes))
        for sequence, work in works.items():
            sequence.planned += 1
            sequence.fed = work.start + len(work.tokens)
            sequence.undecided += work.samples
        if works:
            self._planned.append(_PlannedStep(works, now))
        return list(works.values())

    def _fill(
        self,
        decoding: Sequence[_Sequence],
        prompts: Sequence[_Sequence],
        now: float,
        *,
        rest: float | None = None,
        most: int = 0,
        splits: bool = False,
    ) -> int:
        """Plan these requests and some of those that wait, beside decodes that are planned; prompt tokens that are fed.

        ``rest``: see :meth:`_rest`; then heavy tenants get nothing, and the step ends with the first prompt that does.
        ``most``: prompt tokens, where these were put off before. ``splits``: they may be put off now.
        """
        budget, before = self.limits.step_tokens - len(self._works), self.preemptions
        # A decoding request feeds one token: prompts wait for them, since each would delay all of them.
        for sequence in decoding:
            if budget and sequence.id in self._running and sequence not in self._works:
                budget -= self._feed(sequence, 1, now)
        decodes = len(self._works)
        if most:
            budget = min(budget, most)
        elif rest is None:
            # One long prompt is no backlog: it takes its time, and nobody else waits longer for that.
            pending = [self._pending(sequence) for sequence in prompts]
            backlog = self.waiting_tokens + sum(pending) - max(self._queue.longest, *pending, 0)
            budget = self.costs.prompt_budget(decodes, budget, backlog)
            if splits and decodes and budget > (piece := self.costs.piece(decodes)):
                self._owed, self._piece, budget = budget, piece, 0
        else:
            budget = self.costs.prompt_tokens(decodes, budget, rest)
        whole, scored, light = budget, self.limits.scored_tokens, rest is not None
        if prompts and len(self._active) > 1 and self.preemptions == before:
            # A tenant that was served less does not wait for the prompts of others that run.
            budget, scored = self._admit(budget, scored, now, self._rank(prompts[0], now), light=light)
        for sequence in prompts:
            if budget and sequence.id in self._running:
                fed, scored = self._feed_prompt(sequence, budget, scored, now)
                budget -= fed
        if self.preemptions == before:  # else those that were preempted would be admitted right away
            budget, _ = self._admit(budget, scored, now, light=light)
        return whole - budget

    def _completes(self) -> bool:
        """A prompt ends in the step that is planned: others would only make it wait longer for its first token."""
        return any(work.samples and len(work.tokens) > 1 for work in self._works.values())

    def _light(self, found: Sequence[_Sequence]) -> list[_Sequence]:
        return [sequence for sequence in found if sequence.tenant not in self._heavy]

    def _rest(self, decoding: Sequence[_Sequence], prompts: Sequence[_Sequence], now: float) -> float | None:
        """Seconds for which requests of heavy tenants rest in the next step, so that prompts of others have it to
        themselves; None where there is no such prompt, where one of theirs has a higher priority, or where they have
        rested long enough.
        """
        if not self._heavy:
            return None
        groups = {(sequence.tenant, sequence.priority) for sequence in prompts} | self._queue.groups
        light = [priority for tenant, priority in groups if tenant not in self._heavy]
        resting = [sequence for sequence in decoding if sequence.tenant in self._heavy]
        heavy = [priority for tenant, priority in groups if tenant in self._heavy]
        heavy += [sequence.priority for sequence in resting]
        if not light or min(heavy, default=min(light)) < min(light):
            return None
        left = min((sequence.last for sequence in resting), default=now) + self.limits.rest_seconds - now
        least = LEAST_REST * self.limits.rest_seconds
        if own := [self._pending(sequence) for sequence in prompts if sequence.tenant not in self._heavy]:
            least = min(least, min(own) * self.costs.prompt_seconds)
        return left if left > least else None

    def commit(self, outcomes: Mapping[str, WorkResult], now: float) -> list[Finished]:
        """What came of the planned work; requests that have ended meanwhile may be missing. Who has ended."""
        fed, decodes, drafts, failed, finished, shares = 0, 0, 0, False, list[Finished](), dict[str, int]()
        step = self._planned.pop(0)
        for sequence, work in step.works.items():
            id = sequence.id
            sequence.planned -= 1
            sequence.undecided -= work.samples
            # Of those that have ended, too: the step took its time for them.
            count = len(work.tokens)
            fed += count
            drafts += work.drafts
            decodes += work.samples and count - work.drafts == 1
            if self._running.get(id) is not sequence:
                if not sequence.planned:
                    self._release(sequence)
                continue
            outcome = outcomes[id]
            if outcome.failed:
                failed = True
                finished.append(self._finish(id, "error"))
                continue
            request = sequence.request
            self._served[request.tenant] += count
            shares[request.tenant] = shares.get(request.tenant, 0) + count
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
                finished.append(self._finish(id, "stop"))
            elif sequence.answered == request.max_new_tokens and (
                work.samples or sequence.computed == len(sequence.tokens)
            ):
                finished.append(self._finish(id, "length"))
        for tenant, count in shares.items():
            self._shares.add(tenant, count, now)
        if not failed:  # else it is not known what took the time
            self.costs.observe(decodes, fed - decodes - drafts, drafts, now - step.began)
        self._measure(fed, now - (step.began if self._busy_since is None else self._busy_since))
        self._busy_since = now if self._running or self._waiting else None
        for later in self._planned:
            later.began = now
        return finished

    def check(self) -> None:
        """The bookkeeping adds up; for tests, and for a server that is idle."""
        sequences = [*self._waiting.values(), *self._running.values()]
        planned = {sequence for step in self._planned for sequence in step.works}
        self.cache.check(sequence.lease for sequence in {*self._running.values(), *planned})
        assert not self._waiting.keys() & self._running.keys()
        for sequence in sequences:
            assert sequence.computed < len(sequence.tokens)
            assert sequence.fed >= sequence.computed and (sequence.planned or sequence.fed == sequence.computed)
            assert sequence.planned == sum(sequence in step.works for step in self._planned)
            assert sequence.lease.room >= sequence.computed
        for sequence in self._waiting.values():
            assert not sequence.lease.room and not sequence.computed, "a waiting request has state"
        self._queue.check()
        assert sum(self._active.values()) == len(sequences) and self._active.keys() == self._served.keys()

    def _feed(self, sequence: _Sequence, count: int, now: float) -> int:
        """Plan ``count`` tokens of a running request; 0 if it had to give up its state."""
        start, lease = sequence.fed, sequence.lease
        end = start + count
        while end > lease.room and not self.cache.grow(lease, end):
            assert not self._planned, "the state of a request that runs cannot be given up"
            others = [other for other in self._running.values() if other not in self._works]
            victim = max(others, key=lambda other: self._rank(other, now))
            self._preempt(victim)
            if victim is sequence:
                return 0
        follows = end > len(sequence.tokens)
        tokens = UNDECIDED if follows else sequence.tokens[start:end]
        samples = end >= len(sequence.tokens) and sequence.request.max_new_tokens > 0
        self._works[sequence] = Work(sequence.id, tokens, start, lease, samples, follows=follows)
        return count

    def _feed_prompt(self, sequence: _Sequence, budget: int, scored: int, now: float) -> tuple[int, int]:
        """Plan as many tokens as the budgets allow; how many, and what is left of the tokens that may be scored."""
        count = min(self._pending(sequence), budget)
        if sequence.scored and sequence.fed < len(sequence.request.prompt):
            count = min(count, scored)
            scored -= count
        return (self._feed(sequence, count, now) if count else 0), scored

    def _add_drafts(self, drafts: Mapping[str, Sequence[int]], budget: int) -> None:
        """Append guesses to the planned work, as far as free memory and the requests' limits allow.

        Where there is room for some only, everybody gets the first ones: later ones hold less often.
        """
        wanted = list[tuple[int, _Sequence, Work, Sequence[int]]]()
        for id, guesses in drafts.items():
            sequence = self._running.get(id)
            work = self._works.get(sequence) if sequence else None
            if work is None or sequence is None or not work.samples or len(work.tokens) > 1:  # a prompt is no decode
                continue
            if (count := min(len(guesses), self._room(sequence))) > 0:
                wanted.append((count, sequence, work, guesses))
        wanted.sort(key=lambda found: found[0])
        for number, (most, sequence, work, guesses) in enumerate(wanted):
            end, count = work.start + 1, min(most, budget // (len(wanted) - number))
            lease = sequence.lease
            if end + count > lease.room and not self.cache.grow(lease, end + count):
                count = lease.room - end
            if count > 0:
                tokens = [*work.tokens, *guesses[:count]]
                self._works[sequence] = work._replace(tokens=tokens, drafts=count)
                budget -= count

    def _admit(
        self, budget: int, scored: int, now: float, before: Rank | None = None, *, light: bool = False
    ) -> tuple[int, int]:
        """Waiting requests run while there is budget, and room for their tokens so far and those that are expected.
        What is left of the budgets. ``before``: only those of a higher rank. ``light``: none of heavy tenants, and
        nobody once a prompt of the step ends.

        One that does not fit is not overtaken by smaller ones of a lower rank, or it would starve.
        """
        if not budget or len(self._running) >= self.limits.max_running:
            return budget, scored
        kept = self.limits.max_running - self.limits.max_running // KEPT_PLACES
        for sequence in self._queue.ranked(now):
            if not budget or len(self._running) >= self.limits.max_running:
                break
            if before is not None and self._rank(sequence, now) >= before:
                break
            if light and (sequence.tenant in self._heavy or self._completes()):
                break
            if sequence.tenant in self._large and len(self._running) >= kept:
                continue
            match = self.cache.match(sequence.lease, sequence.tokens, self._most_cached(sequence))
            if match.awaited:
                continue
            if not self.cache.open(sequence.lease, match, len(sequence.tokens), self._demands(sequence, now)):
                break
            sequence.computed = sequence.fed = match.tokens
            if not sequence.started:
                sequence.cached, sequence.lost, sequence.started = sequence.computed, match.known - match.tokens, True
            self._queue.remove(sequence)
            self._running[sequence.id] = sequence
            fed, scored = self._feed_prompt(sequence, budget, scored, now)
            budget -= fed
        return budget, scored

    def _demands(self, candidate: _Sequence, now: float) -> list[Demand]:
        """What a candidate and the running requests are expected to need.

        Those of lower rank can be preempted, so their memory counts as free. Answers are as long as those before them,
        or as long as they may be while there were none. If more is needed in the end, somebody is preempted. Where
        nobody runs there are no demands: then the candidate fits, as it may take all memory.
        """
        if not self._running:
            return []
        rank, demands = self._rank(candidate, now), list[Demand]()
        for sequence in (candidate, *self._running.values()):
            end = None
            if sequence is candidate or self._rank(sequence, now) <= rank:
                most = sequence.request.max_new_tokens
                expected = most if self._answer_tokens is None else min(most, int(self._answer_tokens))
                end = len(sequence.request.prompt) + max(expected - 1, sequence.answered)
            demands.append((sequence.lease, len(sequence.tokens), end))
        return demands

    def _make_room(self, request: GenerateRequest, now: float) -> list[str]:
        """End waiting requests of lower priority, the lowest and latest first, until there is room for this one.

        :class:`QueueFullError`, and nobody ends, if that would not be enough.
        """
        limits, displaced = self.limits, list[_Sequence]()
        places, tokens = limits.max_waiting - self.waiting, limits.max_waiting_tokens - self.waiting_tokens
        needed = len(request.prompt) + len(request.answered)
        if places >= 1 and tokens >= needed:
            return []
        for sequence in self._queue.below(request.priority, now):
            if sequence.started or sequence.answered:  # it has begun its answer, and keeps its place
                continue
            if self._rank(sequence, now)[0] <= request.priority:
                break
            displaced.append(sequence)
            places, tokens = places + 1, tokens + len(sequence.tokens)
            if places >= 1 and tokens >= needed:
                return [self._finish(sequence.id, "error").id for sequence in displaced]
        raise QueueFullError(
            f"{self.waiting} requests of {self.waiting_tokens} tokens are waiting",
            expected=f"at most {limits.max_waiting} requests and {limits.max_waiting_tokens} tokens",
            retry_after=self.retry_after,
        )

    @property
    def retry_after(self) -> float | None:
        """Seconds in which the tokens that wait now can be fed; None before any was."""
        return self.waiting_tokens / self._speed if self._speed else None

    def _find(self, id: str) -> _Sequence | None:
        return self._running.get(id) or self._waiting.get(id)

    def _room(self, sequence: _Sequence) -> int:
        """Guesses that may be fed after its tokens. The last new token is never fed."""
        return sequence.request.max_new_tokens - sequence.answered - 1 if self.cache.trims else 0

    def _most_cached(self, sequence: _Sequence) -> int:
        """The last token is computed in any case: its logits decide the next one."""
        return 0 if sequence.scored else len(sequence.tokens) - 1

    def _pending(self, sequence: _Sequence) -> int:
        """Tokens that are to be fed, those among them that a planned step decides."""
        undecided = sequence.undecided
        if undecided and sequence.answered + undecided >= sequence.request.max_new_tokens:
            return 0  # the last new token is never fed
        return len(sequence.tokens) + undecided - sequence.fed

    def _preempt(self, sequence: _Sequence) -> None:
        self._release(sequence)
        self._queue.add(self._running.pop(sequence.id))
        self.preemptions += 1

    def _finish(self, id: str, reason: FinishReason) -> Finished:
        if sequence := self._waiting.get(id):
            self._queue.remove(sequence)
        else:
            sequence = self._running.pop(id)
            if not sequence.planned:  # else once those steps have ended
                self._release(sequence)
        if reason in ("stop", "length"):
            mean = self._answer_tokens
            self._answer_tokens = sequence.answered if mean is None else mean + 0.1 * (sequence.answered - mean)
        tenant = sequence.request.tenant
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant], self._served[tenant]
        return Finished(id, reason)

    def _release(self, sequence: _Sequence) -> None:
        self.cache.close(sequence.lease)
        sequence.computed, sequence.fed, sequence.missing = 0, 0, None

    def _rank(self, sequence: _Sequence, now: float) -> Rank:
        """Who comes first: by priority, which rises with waiting; then tenants that do not take much more than others;
        then those that were served least; then by age.
        """
        request, heavy = sequence.request, sequence.tenant in self._heavy
        priority = request.priority - (now - sequence.arrival) // self.limits.aging_seconds
        if heavy:  # however long it waits by what its own tenant sends, it does not pass others by that
            priority = max(priority, min(request.priority, 0))
        return priority, heavy, self._served[request.tenant], sequence.arrival, request.id

    def _measure(self, fed: int, seconds: float) -> None:
        if fed and seconds > 0:
            speed = fed / seconds
            self._speed = speed if self._speed is None else 0.9 * self._speed + 0.1 * speed


def _timeouts(request: GenerateRequest) -> dict[str, float]:
    """Seconds by what must have happened until then."""
    timeouts = {
        "queue": request.queue_timeout,
        "first token": request.first_token_timeout,
        "last token": request.timeout,
    }
    found = {until: seconds for until, seconds in timeouts.items() if seconds is not None}
    for seconds in found.values():
        if not seconds >= 0:  # NaN has no place among deadlines
            raise RequestError(f"a timeout of {seconds} seconds", expected="at least 0")
    return found
