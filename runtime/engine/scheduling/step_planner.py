"""What one step feeds: first requests that decode, then prompts in chunks, then guesses, each within its budget.

It knows running requests, budgets and memory. Where memory is short it preempts the running request of the lowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.engine.cache.sequences import SequenceCache
from runtime.engine.scheduling.admission import Admission
from runtime.engine.scheduling.order import Rank, ServiceOrder
from runtime.engine.scheduling.requests import Requests
from runtime.engine.scheduling.sequence import ScheduledSequence
from runtime.engine.scheduling.step_costs import StepCosts
from runtime.engine.scheduling.work import UNDECIDED, Work
from runtime.wire.limits import Limits


class StepPlanner:
    def __init__(
        self, requests: Requests, cache: SequenceCache, order: ServiceOrder, costs: StepCosts, limits: Limits
    ) -> None:
        self._requests, self._cache, self._order, self._costs, self._limits = requests, cache, order, costs, limits
        self._admission = Admission(requests, cache, order, limits.max_running)
        self._works: dict[ScheduledSequence, Work] = {}  # of the step that is planned
        self._ahead = False  # of a step that has not ended: nobody can be preempted
        self._owed = 0  # prompt tokens that follow the last decodes in steps of their own
        self._piece = 0  # of such a step

    def plan(
        self, now: float, drafts: Mapping[str, Sequence[int]] | None, *, ahead: bool
    ) -> dict[ScheduledSequence, Work]:
        """The work of each request that the step feeds."""
        works = self._works = dict[ScheduledSequence, Work]()
        self._ahead, order = ahead, self._order
        order.weigh(now)
        decoding, prompts = list[ScheduledSequence](), list[ScheduledSequence]()
        for sequence in self._requests.running.values():
            if pending := sequence.pending:
                (decoding if pending == 1 else prompts).append(sequence)
        enough = self._cache.can_grow(len(decoding))
        if ahead and not enough:
            return works
        # The order decides who gets memory, which matters only where there is too little.
        if len(decoding) > self._limits.step_tokens or not enough:
            decoding.sort(key=lambda sequence: order.rank(sequence, now))
        if len(prompts) > 1:
            prompts.sort(key=lambda sequence: order.rank(sequence, now))
        costs, groups = self._costs, self._requests.queue.groups
        rest = order.rest(decoding, prompts, groups, costs.prompt_seconds, costs.decode_seconds(len(decoding)), now)
        fed, splits = 0, order.lately_shared
        if rest is not None:
            fed = self._fill(order.light(decoding), order.light(prompts), now, rest=rest)
        if not fed and self._owed and not works:
            # The last token of a prompt is fed like one of an answer, and should not wait for other prompts.
            first = [sequence for sequence in decoding if not sequence.answered]
            fed = self._fill(first, prompts, now, most=min(self._owed, self._piece))
            self._owed = self._owed - fed if fed else 0
            splits = False  # if nothing was fed: there is nothing to put off
        if not fed:  # no prompt could be fed for which others would rest, or that had been put off
            fed = self._fill(decoding, prompts, now, splits=splits and bool(prompts or self._requests.waiting))
        # Not beside prompts: their tokens must be computed in any case, and a guess may be wrong.
        if drafts and not fed and not self._owed and self._cache.trims:
            decodes = len(works)
            self._add_drafts(drafts, self._costs.draft_budget(decodes, self._limits.step_tokens - decodes))
        return works

    def next_seconds(self, decodes: int, prompts: int, others: int) -> float:
        """How long the next step is expected to take. ``prompts``: tokens that it might have beside its decodes.
        ``others``: of those, tokens of tenants for which large ones rest.
        """
        costs, several = self._costs, self._order.shared
        if others and several:
            return min(others, self._limits.step_tokens) * costs.prompt_seconds
        if prompts and self._owed:
            return min(self._owed, self._piece, prompts) * costs.prompt_seconds
        if several and decodes and prompts > costs.piece(decodes):
            prompts = 0
        return costs.decode_seconds(decodes) + prompts * costs.prompt_seconds_beside(decodes, prompts)

    def _fill(
        self,
        decoding: Sequence[ScheduledSequence],
        prompts: Sequence[ScheduledSequence],
        now: float,
        *,
        rest: float | None = None,
        most: int = 0,
        splits: bool = False,
    ) -> int:
        """Plan these requests and some of those that wait, beside decodes that are planned; prompt tokens that are fed.

        ``rest``: see :meth:`ServiceOrder.rest`; then heavy tenants get nothing, and the step ends with the first prompt
        that does. ``most``: prompt tokens, where these were put off before. ``splits``: they may be put off now.
        """
        requests, works = self._requests, self._works
        budget, before = self._limits.step_tokens - len(works), requests.preemptions
        # A decoding request feeds one token: prompts wait for them, since each would delay all of them.
        for sequence in decoding:
            if budget and sequence.id in requests.running and sequence not in works:
                budget -= self._feed(sequence, 1, now)
        decodes = len(works)
        if most:
            budget = min(budget, most)
        elif rest is None:
            # One long prompt is no backlog: it takes its time, and nobody else waits longer for that.
            pending = [sequence.pending for sequence in prompts]
            backlog = requests.queue.tokens + sum(pending) - max(requests.queue.longest, *pending, 0)
            budget = self._costs.prompt_budget(decodes, budget, backlog)
            if splits and decodes and budget > (piece := self._costs.piece(decodes)):
                self._owed, self._piece, budget = budget, piece, 0
        else:
            budget = self._costs.prompt_tokens(decodes, budget, rest)
        whole, scored, light = budget, self._limits.scored_tokens, rest is not None
        if prompts and self._order.shared and requests.preemptions == before:
            # A tenant that was served less does not wait for the prompts of others that run.
            budget, scored = self._admit(budget, scored, now, self._order.rank(prompts[0], now), light=light)
        for sequence in prompts:
            if budget and sequence.id in requests.running:
                budget, scored = self._feed_prompt(sequence, budget, scored, now)
        if requests.preemptions == before:  # else those that were preempted would be admitted right away
            budget, _ = self._admit(budget, scored, now, light=light)
        return whole - budget

    def _admit(
        self, budget: int, scored: int, now: float, before: Rank | None = None, *, light: bool
    ) -> tuple[int, int]:
        """Feed requests that wait, as far as the budgets go; what is left of them. See :meth:`Admission.admit`.

        ``light``: also nobody once a prompt of the step ends.
        """
        if budget and self._requests.waiting and not (light and self._completes()):
            for sequence in self._admission.admit(now, before, light=light):
                budget, scored = self._feed_prompt(sequence, budget, scored, now)
                if not budget or (light and self._completes()):
                    break
        return budget, scored

    def _completes(self) -> bool:
        """A prompt ends in the step that is planned: others would only make it wait longer for its first token."""
        return any(work.samples and len(work.tokens) > 1 for work in self._works.values())

    def _feed(self, sequence: ScheduledSequence, count: int, now: float) -> int:
        """Plan ``count`` tokens of a running request; 0 if it had to give up its state."""
        start, lease = sequence.fed, sequence.lease
        end = start + count
        while end > lease.room and not self._cache.grow(lease, end):
            assert not self._ahead, "the state of a request that runs cannot be given up"
            others = [other for other in self._requests.running.values() if other not in self._works]
            victim = max(others, key=lambda other: self._order.rank(other, now))
            self._requests.preempt(victim)
            if victim is sequence:
                return 0
        follows = end > len(sequence.tokens)
        tokens = UNDECIDED if follows else sequence.tokens[start:end]
        samples = end >= len(sequence.tokens) and sequence.request.max_new_tokens > 0
        self._works[sequence] = Work(sequence.id, tokens, start, lease, samples, follows=follows)
        return count

    def _feed_prompt(self, sequence: ScheduledSequence, budget: int, scored: int, now: float) -> tuple[int, int]:
        """Plan as many tokens as the budgets allow, of all and of those that are scored; what is left of both."""
        count = min(sequence.pending, budget)
        if sequence.scored and sequence.fed < len(sequence.request.prompt):
            count = min(count, scored)
            scored -= count
        return budget - (self._feed(sequence, count, now) if count else 0), scored

    def _add_drafts(self, drafts: Mapping[str, Sequence[int]], budget: int) -> None:
        """Append guesses to the planned work, as far as free memory and the requests' limits allow.

        Where there is room for some only, everybody gets the first ones: later ones hold less often.
        """
        wanted = list[tuple[int, ScheduledSequence, Work, Sequence[int]]]()
        for id, guesses in drafts.items():
            sequence = self._requests.running.get(id)
            work = self._works.get(sequence) if sequence else None
            if work is None or sequence is None or not work.samples or len(work.tokens) > 1:  # a prompt is no decode
                continue
            if (count := min(len(guesses), sequence.draft_room)) > 0:
                wanted.append((count, sequence, work, guesses))
        wanted.sort(key=lambda found: found[0])
        for number, (most, sequence, work, guesses) in enumerate(wanted):
            end, count = work.start + 1, min(most, budget // (len(wanted) - number))
            lease = sequence.lease
            if end + count > lease.room and not self._cache.grow(lease, end + count):
                count = lease.room - end
            if count > 0:
                tokens = [*work.tokens, *guesses[:count]]
                self._works[sequence] = work._replace(tokens=tokens, drafts=count)
                budget -= count
