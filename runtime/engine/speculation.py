"""Speculation by prompt lookup: what followed the last tokens earlier is drafted, and the next step verifies it.

D  drafted tokens of a request in one step

A step is fed the last chosen token and the D drafts after it, and gives results for all 1 + D positions. The token that
is chosen at each position is the one that would be chosen without speculation, since a request's random numbers depend
on its seed and the position alone. Chosen tokens count up to and including the first that differs from its draft. So
the response is the same with and without speculation, to the bit, as far as the engine's logits are.

The scheduler's part: for each request that decodes, :meth:`Speculation.draft` before a step; feed the drafts and want
all positions; :func:`accept` for requests whose tokens the engine chooses, and
:meth:`runtime.engine.sampling.BatchSampler.choose_drafted` for the others; then :meth:`Speculation.observe`. KV
positions of drafts that were not accepted are overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.engine.scheduling.step_costs import StepCosts

SIZES = (4, 2)  # tokens that must match
WINDOW = 8192  # latest tokens of a sequence that are searched
INDEXED_AT_ONCE = 1024  # tokens, in less than 1 ms: a long prompt takes several calls
MOST_DRAFTED = 8
FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # drafts that are left out before one is tried again


def accept(chosen: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The new tokens: ``chosen``, ``[1 + D]``, up to and including the first that differs from its draft.

    >>> accept([5, 6, 9, 4], [5, 6, 7])
    [5, 6, 9]
    >>> accept([5, 6, 7, 4], [5, 6, 7])
    [5, 6, 7, 4]
    """
    agreed = next((at for at, draft in enumerate(drafts) if chosen[at] != draft), len(drafts))
    return list(chosen[: agreed + 1])


class PromptLookup:
    """Finds the last tokens of one sequence earlier in it: a match of four tokens, or else of two.

    Among equally long matches the latest counts. Takes constant time for each token, and memory for the last ``WINDOW``
    tokens.
    """

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}  # where the token after the latest occurrence is
        self._indexed = 0  # tokens whose predecessors are in the index

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow. ``tokens``: those of the call before, and perhaps more."""
        first = max(self._indexed, len(tokens) - WINDOW)
        self._indexed = min(first + INDEXED_AT_ONCE, len(tokens))
        for position in range(first, self._indexed):
            for key in _keys(tokens, position):
                self._follows[key] = position
            for key in _keys(tokens, position - WINDOW):
                if self._follows.get(key) == position - WINDOW:
                    del self._follows[key]
        if self._indexed < len(tokens):
            return []
        for key in _keys(tokens, len(tokens)):
            start = self._follows.get(key)
            if start is not None:
                # A match that overlaps the end repeats: its continuation follows itself.
                period = len(tokens) - start
                return [tokens[start + at % period] for at in range(most)]
        return []


def _keys(tokens: Sequence[int], position: int) -> list[tuple[int, ...]]:
    """The tokens before a position, in each of the sizes that there are."""
    return [tuple(tokens[position - size : position]) for size in SIZES if position >= size]


@dataclass
class Counts:
    """Of an engine: times that tokens were drafted, drafted tokens, and accepted ones."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class Gate:
    """How many tokens to draft for one request, from how often its drafts were accepted and what steps cost.

    A draft's k-th token is accepted with probability p ** k. As many are drafted as give most above what pays. Where no
    number of them pays, drafts pause, ever longer, and one is tried again after each pause.
    """

    costs: StepCosts
    hits: float = 2.0  # decaying counts of accepted and rejected drafts; at first p is 2 / 3
    misses: float = 1.0
    pause: int = FIRST_PAUSE
    left_out: int = 0

    DECAY = 0.95

    def length(self, requests: int) -> int:
        """Tokens to draft now, 0 to ``MOST_DRAFTED``."""
        p, length = self.hits / (self.hits + self.misses), 0
        expected = best = 0.0  # of accepted drafts, and how many more than must be accepted to pay
        for drafts in range(1, MOST_DRAFTED + 1):
            expected += p**drafts
            more = expected - drafts * self.costs.worth(requests, drafts)
            if more >= best:
                length, best = drafts, more
        if length >= 1:
            self.left_out, self.pause = 0, FIRST_PAUSE
            return length
        self.left_out += 1
        if self.left_out <= self.pause:
            return 0
        self.left_out, self.pause = 0, min(2 * self.pause, LONGEST_PAUSE)
        return 1

    def observe(self, drafted: int, accepted: int) -> None:
        rejected = accepted < drafted  # tokens after the first that was rejected say nothing
        self.hits = self.DECAY * self.hits + accepted
        self.misses = max(self.DECAY * self.misses + rejected, 0.02)


@dataclass
class Speculation:
    """Of one request."""

    costs: StepCosts
    counts: Counts
    lookup: PromptLookup = field(default_factory=PromptLookup)

    def __post_init__(self) -> None:
        self.gate = Gate(self.costs)

    def draft(self, tokens: Sequence[int], most: int, requests: int) -> list[int]:
        """Tokens to feed after the last of ``tokens`` (prompt and response so far); often none.

        ``most``: what the response and the step have room for: at most the new tokens that are left, less one.
        ``requests``: that decode in this step.
        """
        if most < 1 or not (found := self.lookup.propose(tokens, min(most, MOST_DRAFTED))):
            return []
        return found[: self.gate.length(requests)]

    def observe(self, drafted: int, accepted: int) -> None:
        """What came of a draft, where there was one. ``accepted``: new tokens that equal their drafts."""
        if not drafted:
            return
        self.gate.observe(drafted, accepted)
        self.counts.drafts += 1
        self.counts.drafted += drafted
        self.counts.accepted += accepted
