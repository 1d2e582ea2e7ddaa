"""Which requests that wait may run: those of the highest rank, as far as memory is expected to suffice.

It knows order and memory, and nothing of a step's budgets: the planner stops asking where these are used up.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.engine.cache.kinds import Demand
from runtime.engine.cache.sequences import SequenceCache
from runtime.engine.scheduling.order import Rank, ServiceOrder
from runtime.engine.scheduling.requests import Requests
from runtime.engine.scheduling.sequence import ScheduledSequence

KEPT_PLACES = 8  # one in so many of the requests that run at once is kept from tenants that take a large part


class Admission:
    def __init__(self, requests: Requests, cache: SequenceCache, order: ServiceOrder, max_running: int) -> None:
        self._requests, self._cache, self._order, self._max_running = requests, cache, order, max_running
        self._kept_from = max_running - max_running // KEPT_PLACES  # tenants that take a large part

    def admit(self, now: float, before: Rank | None = None, *, light: bool = False) -> Iterator[ScheduledSequence]:
        """Each has begun to run when it is returned, with room for its tokens so far and for those that are expected.

        ``before``: only those of a higher rank. ``light``: none of heavy tenants. One that does not fit is not
        overtaken by smaller ones of a lower rank, or it would starve.
        """
        requests, cache, order = self._requests, self._cache, self._order
        if len(requests.running) >= self._max_running:
            return
        for sequence in requests.queue.ranked(now, self._kept_out):
            if len(requests.running) >= self._max_running:
                break
            if before is not None and order.rank(sequence, now) >= before:
                break
            if light and order.heavy(sequence):
                break
            match = cache.match(sequence.lease, sequence.tokens, sequence.most_cached)
            if match.awaited:
                continue
            if not cache.open(sequence.lease, match, len(sequence.tokens), self._demands(sequence, now)):
                break
            sequence.computed = sequence.fed = match.tokens
            if not sequence.started:
                sequence.cached, sequence.lost, sequence.started = match.tokens, match.known - match.tokens, True
            requests.run(sequence)
            yield sequence

    def _kept_out(self, sequence: ScheduledSequence) -> bool:
        """The places that are left are kept from its tenant."""
        return len(self._requests.running) >= self._kept_from and self._order.large(sequence)

    def _demands(self, candidate: ScheduledSequence, now: float) -> list[Demand]:
        """What a candidate and the running requests are expected to need.

        Those of lower rank can be preempted, so their memory counts as free. Answers are as long as those before them,
        or as long as they may be while there were none. If more is needed in the end, somebody is preempted. Where
        nobody runs there are no demands: then the candidate fits, as it may take all memory.
        """
        running, answer = self._requests.running, self._requests.answer_tokens
        if not running:
            return []
        rank, demands = self._order.rank(candidate, now), list[Demand]()
        for sequence in (candidate, *running.values()):
            end = None
            if sequence is candidate or self._order.rank(sequence, now) <= rank:
                most = sequence.request.max_new_tokens
                expected = most if answer is None else min(most, int(answer))
                end = len(sequence.request.prompt) + max(expected - 1, sequence.answered)
            demands.append((sequence.lease, len(sequence.tokens), end))
        return demands
