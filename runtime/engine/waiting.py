"""Requests that wait to run, in order within each tenant and priority. Pure bookkeeping."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

MAX_PASSED = 64  # requests that a step may pass over because another computes their prefix


class Waits(Protocol):
    """What the queue reads of a sequence. None of it changes while it waits."""

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrival(self) -> float: ...
    @property
    def tokens(self) -> Sequence[int]: ...


S = TypeVar("S", bound=Waits)
Rank = tuple[float, bool, float, float, str]
_Place = tuple[float, str]  # arrival and id
_Group = tuple[str, int]  # tenant and priority


class WaitingQueue(Generic[S]):
    """``rank``: of a sequence among all; within one tenant and priority it is the order of arrival."""

    def __init__(self, rank: Callable[[S, float], Rank]) -> None:
        self._rank = rank
        self._sequences: dict[str, S] = {}
        self._places: dict[_Group, list[_Place]] = {}  # the earliest first
        self.tokens = 0

    @property
    def sequences(self) -> Mapping[str, S]:
        """By id."""
        return self._sequences

    @property
    def groups(self) -> Set[_Group]:
        """Tenant and priority of those that wait."""
        return self._places.keys()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; 0 without any."""
        return max((len(sequence.tokens) for sequence in self._sequences.values()), default=0)

    def add(self, sequence: S) -> None:
        self._sequences[sequence.id] = sequence
        self.tokens += len(sequence.tokens)
        insort(self._places.setdefault((sequence.tenant, sequence.priority), []), (sequence.arrival, sequence.id))

    def remove(self, sequence: S) -> None:
        del self._sequences[sequence.id]
        self.tokens -= len(sequence.tokens)
        group = sequence.tenant, sequence.priority
        places = self._places[group]
        del places[bisect_left(places, (sequence.arrival, sequence.id))]
        if not places:
            del self._places[group]

    def ranked(self, now: float) -> Iterator[S]:
        """The highest rank first, until ``MAX_PASSED`` were passed over. Sequences may be removed meanwhile."""
        heads = [(self._rank(self._sequences[places[0][1]], now), group, 0) for group, places in self._places.items()]
        heapify(heads)
        all_passed = 0
        while heads and all_passed <= MAX_PASSED:
            rank, group, passed = heappop(heads)
            sequence = self._sequences[rank[-1]]
            yield sequence
            if sequence.id in self._sequences:
                passed, all_passed = passed + 1, all_passed + 1
            places = self._places.get(group, [])
            if passed < len(places):
                heappush(heads, (self._rank(self._sequences[places[passed][1]], now), group, passed))

    def below(self, priority: int, now: float) -> list[S]:
        """Sequences of lower priorities, the lowest rank first."""
        found = [self._sequences[id] for (_, own), places in self._places.items() if own > priority for _, id in places]
        return sorted(found, key=lambda sequence: self._rank(sequence, now), reverse=True)

    def check(self) -> None:
        """The bookkeeping adds up; for tests."""
        assert sorted(id for places in self._places.values() for _, id in places) == sorted(self._sequences)
        assert self.tokens == sum(len(sequence.tokens) for sequence in self._sequences.values())
