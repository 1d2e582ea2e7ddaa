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
from evals.statistics import (
    Estimate,
    bounded_mean,
    log_ratios,
    perplexity_ratio,
    proportion,
    required_documents,
    required_units,
)

# A document counts for at most so many times what the bound allows: as many as the fewest documents can decide, since
# a sample says nothing of documents too rare to be in it (docs/statistics.md).
MOST_TIMES_BOUND = 32
LEAST_TIMES_BOUND = 4
DOCUMENTS_PER_TIME = 8


def times_bound(minimum: int) -> float:
    """How many times what a bound allows one of at least ``minimum`` documents counts for at most."""
    return min(max(minimum / DOCUMENTS_PER_TIME, LEAST_TIMES_BOUND), MOST_TIMES_BOUND)


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
        self,
        estimate: Estimate,
        *,
        n: int | None = None,
        variance: float | None = None,
        gap: float | None = None,
        needed: int | None = None,
        note: str = "",
    ) -> Check:
        """The check of a measured value.

        ``n``: tokens, where a unit is a cluster of them. ``needed``: units that would decide; planned from
        ``variance`` and ``gap``, or from the estimate, where it is not given. ``note``: what the reason adds.
        """
        if needed is None:
            spread = estimate.variance if variance is None else variance
            needed = required_units(spread, estimate.value - self.bound if gap is None else gap, self.confidence)
        outcome, reason = self._compare(estimate, needed)
        if note and not self.too_few(estimate.units):
            reason = f"{reason}; {note}"
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

    def _compare(self, estimate: Estimate, needed: int | None) -> tuple[Outcome, str]:
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
        more = "more" if needed is None else f"about {max(needed - estimate.units, 1):,} more"
        between = f"{self.bound:g} lies between the {level} bounds {estimate.lower:.4g} and {estimate.upper:.4g}"
        return Outcome.INCONCLUSIVE, f"{between}: {more} {self.units} would decide"


def finite(value: float) -> float | None:
    """None for what a verdict cannot hold: JSON knows no infinity."""
    return value if math.isfinite(value) else None


def divergence_checks(
    items: Sequence[Scored], tokens: Sequence[int], kl: Condition, agreement: Condition
) -> tuple[Check, Check]:
    """Mean KL and top-token agreement, of documents that count equally; ``tokens``: positions of each item.

    The tokens of one document are correlated, so the document is the independent unit. It counts for at most
    ``times_bound`` times the KL, or the disagreement, that the bound allows.
    """
    means = [item.kl_sum / count for item, count in zip(items, tokens, strict=True)]
    disagreement = [1 - item.agree / count for item, count in zip(items, tokens, strict=True)]
    most = times_bound(kl.minimum) * kl.bound
    divergence = bounded_mean(means, 0, most, kl.confidence)
    allowed = 1 - agreement.bound
    worst = min(times_bound(agreement.minimum) * allowed, 1.0)
    differ = bounded_mean(disagreement, 0, worst, agreement.confidence)
    agree = Estimate(1 - differ.value, 1 - differ.upper, 1 - differ.lower, differ.units, differ.variance)
    note = "one of the {} counts for at most {:.4g}"
    return (
        kl.check(
            divergence,
            n=sum(tokens),
            needed=required_documents(means, 0, most, kl.bound, kl.confidence),
            note=note.format(kl.units, most),
        ),
        agreement.check(
            agree,
            n=sum(tokens),
            needed=required_documents(disagreement, 0, worst, allowed, agreement.confidence),
            note=note.format(agreement.units, worst) + " of disagreement" if worst < 1 else "",
        ),
    )


def perplexity_check(
    baseline_nll: Sequence[float], candidate_nll: Sequence[float], tokens: Sequence[int], condition: Condition
) -> Check:
    """Perplexity ratio of the documents; ``condition.bound`` is above 1. See :func:`divergence_checks`."""
    worst = condition.bound ** times_bound(condition.minimum)
    ratio = perplexity_ratio(baseline_nll, candidate_nll, tokens, worst, condition.confidence)
    limit, logs = math.log(worst), log_ratios(baseline_nll, candidate_nll, tokens)
    return condition.check(
        ratio,
        n=sum(tokens),
        needed=required_documents(logs, -limit, limit, math.log(condition.bound), condition.confidence),
        note=f"one of the {condition.units} counts for at most {worst:.4g}",
    )


def share_fact(name: str, title: str, count: float, n: int, confidence: float) -> Fact:
    share = proportion(count, n, confidence)
    return Fact(name=name, title=title, value=share.value, lower=share.lower, upper=share.upper)
