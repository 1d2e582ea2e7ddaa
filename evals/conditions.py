"""A measured value compared with a bound: PASS, FAIL, or INCONCLUSIVE and how much more evidence would decide.

A condition holds when the confidence bound of its value, not the mean, lies on the good side; fails when even the
opposite bound lies on the bad side; else it is inconclusive. "Not significantly worse" is never a pass: with little
evidence nothing is significant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evals.check import Check, Direction, Fact, Outcome
from evals.rules import Scored
from evals.statistics import Estimate, clustered_proportion, proportion, ratio_of_sums, required_units


@dataclass(frozen=True)
class Condition:
    """What is required of one value.

    ``units``: the name of the independent units of its evidence; ``minimum``: how many there must be.
    """

    name: str
    title: str
    direction: Direction
    bound: float
    units: str
    minimum: int
    confidence: float

    def check(
        self, estimate: Estimate, *, n: int | None = None, variance: float | None = None, gap: float | None = None
    ) -> Check:
        """The check of a measured value.

        ``n``: tokens, where a unit is a cluster of them. ``variance`` and ``gap`` plan how many more units would
        decide, where those of the estimate are not the right ones.
        """
        outcome, reason = self._compare(estimate, variance, gap)
        return Check(
            name=self.name,
            title=self.title,
            outcome=outcome,
            reason=reason,
            direction=self.direction,
            value=finite(estimate.value),
            bound=self.bound,
            lower=finite(estimate.lower),
            upper=finite(estimate.upper),
            unit=self.units if n is None else "tokens",
            n=estimate.units if n is None else n,
            clusters=estimate.units,
        )

    def too_few(self, units: int) -> str:
        """Why so many units cannot decide; empty where they can."""
        if units >= self.minimum:
            return ""
        return f"{units:,} of at least {self.minimum:,} {self.units}: {self.minimum - units:,} more needed"

    def _compare(self, estimate: Estimate, variance: float | None, gap: float | None) -> tuple[Outcome, str]:
        if reason := self.too_few(estimate.units):
            return Outcome.INCONCLUSIVE, reason
        level = f"{100 * self.confidence:g} %"
        if self.direction == "at_least":
            good, bad = estimate.lower >= self.bound, estimate.upper < self.bound
            near, far, side = estimate.lower, estimate.upper, ("lower", "at least", "upper", "below")
        else:
            good, bad = estimate.upper <= self.bound, estimate.lower > self.bound
            near, far, side = estimate.upper, estimate.lower, ("upper", "at most", "lower", "above")
        if good:
            return Outcome.PASS, f"{level} {side[0]} bound {near:.4g} is {side[1]} {self.bound:g}"
        if bad:
            return Outcome.FAIL, f"even the {level} {side[2]} bound {far:.4g} is {side[3]} {self.bound:g}"
        needed = required_units(
            estimate.variance if variance is None else variance,
            estimate.value - self.bound if gap is None else gap,
            self.confidence,
        )
        more = "more" if needed is None else f"about {max(needed - estimate.units, 1):,} more"
        between = f"{self.bound:g} lies between the {level} bounds {estimate.lower:.4g} and {estimate.upper:.4g}"
        return Outcome.INCONCLUSIVE, f"{between}: {more} {self.units} would decide"


def finite(value: float) -> float | None:
    """None for what a verdict cannot hold: JSON knows no infinity."""
    return value if math.isfinite(value) else None


def divergence_checks(
    items: Sequence[Scored], tokens: Sequence[int], kl: Condition, agreement: Condition
) -> tuple[Check, Check]:
    """Mean KL and top-token agreement per token, each item one cluster of ``tokens`` correlated positions."""
    divergence = ratio_of_sums([item.kl_sum for item in items], tokens, kl.confidence)
    agree = clustered_proportion([item.agree for item in items], tokens, agreement.confidence)
    return kl.check(divergence, n=sum(tokens)), agreement.check(agree, n=sum(tokens))


def share_fact(name: str, title: str, count: int, n: int, confidence: float) -> Fact:
    share = proportion(count, n, confidence)
    return Fact(name=name, title=title, value=share.value, lower=share.lower, upper=share.upper)
