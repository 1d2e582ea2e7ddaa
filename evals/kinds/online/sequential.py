"""A test of a mean that may be looked at after every observation, and still errs as seldom as it promises.

A test of a fixed sample that is repeated after each observation errs ever more often: each look is another chance. Here
capital is bet against a claim about the mean. If the claim is true, no strategy of stopping gains on average, so the
capital ever reaches 1 / (1 - confidence) with probability 1 - confidence at most (Ville's inequality).

Source: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, Journal of the Royal
Statistical Society B 86 (2024), 1-27. docs/statistics.md has simulated error rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from evals.check import Outcome
from evals.statistics import CAPITAL, FRACTIONS

# No fraction bets everything: one unit of total disagreement must not end a bet for good.
_FRACTIONS: tuple[float, ...] = tuple(min(float(fraction), 1 - 2**-10) for fraction in FRACTIONS)
_START: tuple[float, ...] = tuple(math.log(share) for share in CAPITAL.tolist())


def _bet(logs: tuple[float, ...], gain: float) -> tuple[float, ...]:
    """``gain``: of all the capital, -1 at the worst value."""
    return tuple(log + math.log1p(fraction * gain) for log, fraction in zip(logs, _FRACTIONS, strict=True))


def _log_sum(logs: tuple[float, ...]) -> float:
    best = max(logs)
    return best + math.log(sum(math.exp(log - best) for log in logs))


@dataclass(frozen=True)
class AnytimeTest:
    """Whether the mean of values in [0, 1] is below ``bound`` (PASS) or above it (FAIL), each wrong in at most
    1 - ``confidence`` of all runs, however often one looks.

    The state is a value of its own: :meth:`after` gives the next one, and JSON keeps its numbers exactly.
    ``below``, ``above``: for each fraction, the logarithm of the capital that is bet on a mean below, and above, the
    bound. ``most_above``: the largest logarithm of the sum of ``above`` so far. A FAIL stays; a PASS can be lost again,
    as traffic can change.

    Each value's mean, given the values before it, may change: the claim that is rejected is "at least ``bound`` all the
    time". The fractions do not depend on the values, so their order does not change the capital.

    >>> test = AnytimeTest(bound=0.1, confidence=0.95)
    >>> for _ in range(60):
    ...     test = test.after(0.02)
    >>> test.outcome.value, test.units
    ('PASS', 60)
    """

    bound: float
    confidence: float
    units: int = 0
    total: float = 0.0
    below: tuple[float, ...] = _START
    above: tuple[float, ...] = _START
    most_above: float = _log_sum(_START)

    def __post_init__(self) -> None:
        if not (0 < self.bound < 1 and 0.5 < self.confidence < 1):
            raise ValueError(f"bound {self.bound} must lie in (0, 1) and confidence {self.confidence} in (0.5, 1)")

    def after(self, value: float) -> AnytimeTest:
        """The state after one more unit; :class:`ValueError` for a value outside [0, 1]."""
        if not 0 <= value <= 1:
            raise ValueError(f"value {value} must lie between 0 and 1")
        lower = _bet(self.below, (self.bound - value) / (1 - self.bound))
        upper = _bet(self.above, (value - self.bound) / self.bound)
        return AnytimeTest(
            self.bound,
            self.confidence,
            self.units + 1,
            self.total + value,
            lower,
            upper,
            max(self.most_above, _log_sum(upper)),
        )

    @cached_property
    def needed(self) -> float:
        """Logarithm of the capital that decides."""
        return -math.log1p(-self.confidence)

    @property
    def log_below(self) -> float:
        """Logarithm of the capital that is bet on a mean below the bound."""
        return _log_sum(self.below)

    @property
    def outcome(self) -> Outcome:
        if self.most_above >= self.needed:
            return Outcome.FAIL
        return Outcome.PASS if self.log_below >= self.needed else Outcome.INCONCLUSIVE

    @property
    def mean(self) -> float | None:
        return self.total / self.units if self.units else None
