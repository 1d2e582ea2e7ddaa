"""When a request may be tried again, and how long after. Pure bookkeeping: the caller says what time it is."""

from __future__ import annotations

from random import Random

BUDGET_SHARE = 0.1  # retries per request
BUDGET_PER_SECOND = 10.0  # and in any case so many
BUDGET_MOST = 100.0  # retries that can be saved up
BUDGET_SPARE = BUDGET_MOST / 2  # of them, for requests alone
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.02, 1.0
FIRST_PROBE_SECONDS, LONGEST_PROBE_SECONDS = 0.5, 30.0


class RetryBudget:
    """Retries of requests that have not begun: a fleet that refuses everything is not sent everything three times.
    Hand-overs take from it, too, but leave :data:`BUDGET_SPARE`: they can wait, where a request without one fails.

    >>> budget = RetryBudget(now=0.0)
    >>> sum(budget.take(0.0) for _ in range(1000)), sum(budget.take(2.0) for _ in range(1000))
    (100, 20)
    """

    def __init__(self, now: float) -> None:
        self._level, self._at = BUDGET_MOST, now

    def arrived(self) -> None:
        """A request came for the first time."""
        self._level = min(BUDGET_MOST, self._level + BUDGET_SHARE)

    def take(self, now: float, spare: float = 0.0) -> bool:
        """Whether there is a retry left beside ``spare`` others, which is used up then."""
        self._level = min(BUDGET_MOST, self._level + (now - self._at) * BUDGET_PER_SECOND)
        self._at = now
        if self._level < 1 + spare:
            return False
        self._level -= 1
        return True


def retry_seconds(attempt: int, random: Random) -> float:
    """Before retry number ``attempt``, counted from 1."""
    return _jittered(FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS, attempt, random)


def probe_seconds(failures: int, random: Random) -> float:
    """Before an engine that has failed ``failures`` times in turn is connected to again."""
    return _jittered(FIRST_PROBE_SECONDS, LONGEST_PROBE_SECONDS, failures, random)


def _jittered(first: float, longest: float, number: int, random: Random) -> float:
    """Doubled each time, then shortened by up to a half, so that what failed together does not come back together.

    >>> all(4 <= _jittered(1, 30, 4, Random(seed)) <= 8 for seed in range(99)), _jittered(1, 30, 99, Random(0)) <= 30
    (True, True)
    """
    return min(longest, first * 2.0 ** min(number - 1, 32)) * random.uniform(0.5, 1.0)
