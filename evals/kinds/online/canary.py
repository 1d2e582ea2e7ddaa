"""May a candidate take the place of the bundle beside it? From what a fleet's users got of both at the same time.

Of each call it is known whether the service failed on it, and how soon its first token came. A call is slow if it took
longer than all but 5 % of the stable bundle's calls. Both shares are tested like a disagreement (``sequential.py``), so
one may look as often as one likes. Where a challenger was shadowed, its disagreement decides as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from evals.check import Outcome
from evals.kinds.online.sequential import AnytimeTest
from tapeout.artifact import Frozen

SLOW_SHARE = 0.05  # of the stable bundle's calls


class CanaryBounds(Frozen):
    """``max_failed``, ``max_slow``: of the candidate's calls. ``min_calls``: of each bundle."""

    max_failed: float = 0.02
    max_slow: float = 0.2
    min_calls: int = 100
    confidence: float = 0.95


class Figures(Frozen):
    """Of the calls of a bundle. ``first_tokens``: calls by bucket of their time to the first token, rising."""

    calls: int = 0
    failed: int = 0
    first_tokens: tuple[int, ...] = ()

    def plus(self, other: Figures) -> Figures:
        """
        >>> Figures(calls=2, first_tokens=(1, 1)).plus(Figures(calls=1, failed=1, first_tokens=(0, 1))).first_tokens
        (1, 2)
        """
        longest = max(len(self.first_tokens), len(other.first_tokens))
        padded = [(*one, *[0] * (longest - len(one))) for one in (self.first_tokens, other.first_tokens)]
        return Figures(
            calls=self.calls + other.calls,
            failed=self.failed + other.failed,
            first_tokens=tuple(map(sum, zip(*padded, strict=True))),
        )


class CanaryVerdict(NamedTuple):
    outcome: Outcome
    reason: str


def judge_canary(stable: Figures, candidate: Figures, bounds: CanaryBounds) -> CanaryVerdict:
    """FAIL as soon as one share is too large; PASS once both are small enough. Missing calls never pass."""
    slow, first = slow_calls(stable.first_tokens, candidate.first_tokens), sum(candidate.first_tokens)
    shares = [
        ("failed", candidate.failed, candidate.calls, bounds.max_failed),
        ("are slow", slow, first, bounds.max_slow),
    ]
    enough = min(stable.calls, candidate.calls) >= bounds.min_calls
    usual = sum(stable.first_tokens)  # calls that say how long a first token takes
    waiting = ""
    for name, count, calls, bound in shares:
        outcome = _share_test(count, calls, bound, bounds.confidence).outcome
        found = f"{count:,} of {calls:,} calls of the candidate {name}; the bound is {100 * bound:g} %"
        # What is slow shows only beside enough calls that are not, and that were answered.
        if outcome is Outcome.FAIL and (name == "failed" or (enough and usual >= bounds.min_calls)):
            return CanaryVerdict(Outcome.FAIL, found)
        if outcome is not Outcome.PASS:
            waiting = waiting or f"not yet decided: {found}"
    if not enough:
        calls = f"{candidate.calls:,} calls of the candidate and {stable.calls:,} of the stable bundle"
        return CanaryVerdict(Outcome.INCONCLUSIVE, f"{calls}; at least {bounds.min_calls:,} of each are needed")
    if usual < bounds.min_calls:
        answered = f"{usual:,} calls of the stable bundle got a first token; at least {bounds.min_calls:,} are needed"
        return CanaryVerdict(Outcome.INCONCLUSIVE, answered)
    if waiting:
        return CanaryVerdict(Outcome.INCONCLUSIVE, waiting)
    return CanaryVerdict(Outcome.PASS, f"{candidate.calls:,} calls: {candidate.failed:,} failed, {slow:,} slow")


def slow_calls(stable: Sequence[int], candidate: Sequence[int]) -> int:
    """Of the candidate, in buckets beyond the one that all but 5 % of the stable bundle's calls reach.

    >>> slow_calls([90, 9, 1, 0], [5, 3, 2, 1])
    3
    """
    most = (1 - SLOW_SHARE) * sum(stable)
    reached = next((place for place, count in enumerate(accumulate(stable)) if count >= most), 0)
    return sum(candidate[reached + 1 :])


def _share_test(count: int, calls: int, bound: float, confidence: float) -> AnytimeTest:
    """What was bet does not depend on the order of the values. Those that count against the candidate come last: so no
    capital is seen that there never was.
    """
    test = AnytimeTest(bound, confidence)
    for number in range(calls):
        test = test.after(float(number >= calls - count))
    return test
