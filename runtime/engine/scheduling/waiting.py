"""Requests that wait to run, in order within each tenant and priority. Pure bookkeeping."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from heapq import heapify, heappop, heappush, merge

from runtime.engine.scheduling.order import Group, Rank
from runtime.engine.scheduling.sequence import ScheduledSequence
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest

MAX_PASSED = 64  # requests that a step may pass over because another computes their prefix


class WaitingQueue:
    """``rank``: of a sequence among all; within one tenant and priority it is the order of arrival."""

    def __init__(self, rank: Callable[[ScheduledSequence, float], Rank]) -> None:
        self._rank = rank
        self._sequences: dict[str, ScheduledSequence] = {}
        self._places: dict[Group, list[tuple[float, str]]] = {}  # arrival and id, the earliest first
        self._counts, self._sums = Counter[str](), Counter[str]()  # requests and their tokens, by tenant
        self.tokens = 0

    @property
    def sequences(self) -> Mapping[str, ScheduledSequence]:
        """By id."""
        return self._sequences

    @property
    def groups(self) -> Set[Group]:
        """Tenant and priority of those that wait."""
        return self._places.keys()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; 0 without any."""
        return max((len(sequence.tokens) for sequence in self._sequences.values()), default=0)

    def add(self, sequence: ScheduledSequence) -> None:
        self._sequences[sequence.id] = sequence
        self._count(sequence, 1)
        insort(self._places.setdefault((sequence.tenant, sequence.priority), []), (sequence.arrival, sequence.id))

    def remove(self, sequence: ScheduledSequence) -> None:
        del self._sequences[sequence.id]
        self._count(sequence, -1)
        group = sequence.tenant, sequence.priority
        places = self._places[group]
        del places[bisect_left(places, (sequence.arrival, sequence.id))]
        if not places:
            del self._places[group]

    def ranked(self, now: float, left_out: Callable[[ScheduledSequence], bool]) -> Iterator[ScheduledSequence]:
        """The highest rank first, until ``MAX_PASSED`` were passed over. Sequences may be removed meanwhile.

        ``left_out``: whether a sequence is, and with it all that follow of its tenant and priority: they are not
        passed over one by one, or others would not have their turn behind many of them.
        """
        heads = [(self._rank(self._sequences[places[0][1]], now), group, 0) for group, places in self._places.items()]
        heapify(heads)
        all_passed = 0
        while heads and all_passed <= MAX_PASSED:
            rank, group, passed = heappop(heads)
            sequence = self._sequences[rank[-1]]
            if left_out(sequence):
                continue
            yield sequence
            if sequence.id in self._sequences:
                passed, all_passed = passed + 1, all_passed + 1
            places = self._places.get(group, [])
            if passed < len(places):
                heappush(heads, (self._rank(self._sequences[places[passed][1]], now), group, passed))

    def displaced(self, request: GenerateRequest, limits: Limits, now: float) -> list[ScheduledSequence] | None:
        """Who must end so that there is room for a request: those of lower priority, the lowest and latest first. Where
        all of them would not be enough, those of the tenants that take most of the queue, the latest first.

        None where there is no room so either. One that has begun its answer keeps its place.
        """
        places, tokens = limits.max_waiting - len(self._sequences), limits.max_waiting_tokens - self.tokens
        needed = len(request.prompt) + len(request.answered)
        if places >= 1 and tokens >= needed:
            return []
        found = list[ScheduledSequence]()
        for sequence in self._below(request.priority, now):
            if sequence.started or sequence.answered:
                continue
            if self._rank(sequence, now)[0] <= request.priority:
                break
            found.append(sequence)
            places, tokens = places + 1, tokens + len(sequence.tokens)
            if places >= 1 and tokens >= needed:
                return found
        return self._of_other_tenants(request, limits, needed)

    def _of_other_tenants(
        self, request: GenerateRequest, limits: Limits, needed: int
    ) -> list[ScheduledSequence] | None:
        """Each of the tenant that has most of what is short, places or tokens, as long as that tenant then has no less
        than the request's own: none can keep others out by what it sends.
        """
        own = request.tenant
        if len(self._counts.keys() | {own}) < 2:
            return None
        # Where a queue is full, each request that comes asks this: it must not look at all that wait.
        latest = self._latest(request.priority)
        leaves = {tenant: last for tenant, sequences in latest.items() if (last := next(sequences, None)) is not None}
        counts, sums, found = Counter(self._counts), Counter(self._sums), list[ScheduledSequence]()
        count, tokens = len(self._sequences), self.tokens + needed
        while count >= limits.max_waiting or tokens > limits.max_waiting_tokens:
            short, more = (counts, 1) if count >= limits.max_waiting else (sums, needed)
            tenant = max(leaves, key=lambda one: (short[one], one), default=own)
            if tenant == own:
                return None
            last = leaves.pop(tenant)
            if (following := next(latest[tenant], None)) is not None:
                leaves[tenant] = following
            counts[tenant] -= 1
            sums[tenant] -= len(last.tokens)
            if short[tenant] < short[own] + more:
                return None
            found.append(last)
            count, tokens = count - 1, tokens - len(last.tokens)
        return found

    def _latest(self, priority: int) -> dict[str, Iterator[ScheduledSequence]]:
        """By tenant, the latest first: those of this priority and lower ones that may lose their place."""
        places = dict[str, list[Iterator[tuple[float, str]]]]()
        for (tenant, own), waiting in self._places.items():
            if own >= priority:
                places.setdefault(tenant, []).append(reversed(waiting))

        def sequences(found: list[Iterator[tuple[float, str]]]) -> Iterator[ScheduledSequence]:
            for _, id in merge(*found, reverse=True):
                sequence = self._sequences[id]
                if not (sequence.started or sequence.answered):
                    yield sequence

        return {tenant: sequences(found) for tenant, found in places.items()}

    def _count(self, sequence: ScheduledSequence, sign: int) -> None:
        tenant, tokens = sequence.tenant, sign * len(sequence.tokens)
        self.tokens += tokens
        self._counts[tenant] += sign
        self._sums[tenant] += tokens
        if not self._counts[tenant]:
            del self._counts[tenant], self._sums[tenant]

    def _below(self, priority: int, now: float) -> list[ScheduledSequence]:
        """Sequences of lower priorities, the lowest rank first."""
        found = [self._sequences[id] for (_, own), places in self._places.items() if own > priority for _, id in places]
        return sorted(found, key=lambda sequence: self._rank(sequence, now), reverse=True)

    def check(self) -> None:
        """The bookkeeping adds up; for tests."""
        assert sorted(id for places in self._places.values() for _, id in places) == sorted(self._sequences)
        assert self.tokens == sum(len(sequence.tokens) for sequence in self._sequences.values()) == self._sums.total()
        assert self._counts == Counter(sequence.tenant for sequence in self._sequences.values())
