"""The gate's statistics: one-sided confidence bounds for paired, proportional and clustered data.

Every function returns an :class:`Estimate` whose ``lower`` and ``upper`` are each a one-sided bound at
``confidence`` (so together a two-sided interval at ``2 * confidence - 1``). Nothing here knows of models or files.

n  items      G  clusters (documents, prompts)      D  accuracy of the candidate minus accuracy of the baseline
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Estimate:
    """A point estimate with one-sided bounds. Bounds are infinite where the data cannot bound the value.

    ``variance``: variance contributed by one independent unit (item or cluster), so that the standard error of
    ``units`` of them is ``sqrt(variance / units)``; :func:`required_units` plans further sampling with it.
    """

    value: float
    lower: float
    upper: float
    units: int
    variance: float


def tango_score(lost: int, gained: int, n: int, difference: float) -> float:
    """Tango's score statistic for H0: accuracy difference = ``difference``; large when the data lie above it.

    ``lost``: items only the baseline answers rightly; ``gained``: only the candidate; ``n``: all items.
    The variance is the one under H0, from the maximum likelihood estimate of P(lost) constrained to
    P(gained) - P(lost) = difference, so it stays positive when no answer changed; the Wald variance would not.

    Source: Tango, Equivalence test and confidence interval for the difference in proportions for the
    paired-sample design, Statistics in Medicine 17 (1998), 891-908.
    """
    _require_counts(lost, gained, n)
    surplus = gained - lost - n * difference
    variance = n * null_variance(lost, gained, n, difference)
    if variance > 0:
        return surplus / math.sqrt(variance)
    return 0.0 if surplus == 0 else math.copysign(math.inf, surplus)


def null_variance(lost: int, gained: int, n: int, difference: float) -> float:
    """Variance of one item's paired difference under H0: accuracy difference = ``difference``."""
    _require_counts(lost, gained, n)
    linear = lost + gained + (gained - lost - 2 * n) * difference
    # The discriminant is a sum of squares on paper; rounding near D = -1 can leave it a hair below zero.
    constant = 2 * lost * difference * (1 - difference)
    root = math.sqrt(max(linear**2 + 4 * n * constant, 0.0))
    # The positive root of 2n p² - linear p - constant / 2 = 0, in the form that subtracts no two nearly equal numbers.
    p_lost = (linear + root) / (4 * n) if linear > 0 else (constant / (root - linear) if root > linear else 0.0)
    return max(2 * p_lost + difference * (1 - difference), 0.0)


def paired_difference(lost: int, gained: int, n: int, confidence: float) -> Estimate:
    """Accuracy difference of two paired arms with Tango's score bounds.

    ``lower > -margin`` exactly when :func:`tango_score` at ``-margin`` exceeds the normal quantile.

    >>> interval = paired_difference(lost=16, gained=6, n=161, confidence=0.975)
    >>> print(f"{interval.value:.4f} {interval.lower:.4f} {interval.upper:.4f}")
    -0.0621 -0.1240 -0.0054
    """
    _require_counts(lost, gained, n)
    value = (gained - lost) / n
    quantile = normal_quantile(confidence)
    return Estimate(
        value=value,
        lower=_tango_lower(lost, gained, n, quantile),
        upper=-_tango_lower(gained, lost, n, quantile),
        units=n,
        variance=(lost + gained) / n - value**2,
    )


def _tango_lower(lost: int, gained: int, n: int, quantile: float) -> float:
    """The difference at which the score equals ``quantile``: bisection, for the score falls as it grows."""
    low, high = -1.0, (gained - lost) / n
    while True:
        middle = (low + high) / 2
        if not low < middle < high:  # no float lies between them any more
            return low
        if tango_score(lost, gained, n, middle) > quantile:
            low = middle
        else:
            high = middle


def proportion(successes: int, n: int, confidence: float) -> Estimate:
    """A share of independent items with exact bounds, which hold at every n and every share.

    Source: Clopper and Pearson, The use of confidence or fiducial limits, Biometrika 26 (1934), 404-413.

    >>> share = proportion(0, 10, confidence=0.975)
    >>> print(f"{share.lower:.4f} {share.upper:.4f}")
    0.0000 0.3085
    """
    from scipy.special import betaincinv

    _require_confidence(confidence)
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} of {n} is not a share")
    failures = n - successes
    value = successes / n
    lower = float(betaincinv(successes, failures + 1, 1 - confidence)) if successes else 0.0
    upper = float(betaincinv(successes + 1, failures, confidence)) if failures else 1.0
    return Estimate(value, lower, upper, n, value * (1 - value))


def ratio_of_sums(sums: ArrayLike, weights: ArrayLike, confidence: float) -> Estimate:
    """Weighted mean over clusters, ``sum(sums) / sum(weights)``, with a cluster-robust standard error.

    ``sums`` ``[G]``: a quantity summed over each cluster (KL in nats over a document's tokens);
    ``weights`` ``[G]``: the cluster's size (its tokens, positive). Tokens of one document are correlated, so the
    document is the independent unit: linearized (Taylor) variance of a ratio estimator with the G / (G - 1)
    correction and Student t with G - 1 degrees of freedom. One cluster bounds nothing: the bounds are infinite.

    Source: Cochran, Sampling Techniques (1977), section 6.3; Cameron and Miller, A practitioner's guide to
    cluster-robust inference, Journal of Human Resources 50 (2015), section II.
    """
    from scipy.special import stdtrit

    _require_confidence(confidence)
    y, x = _clusters(sums, weights)
    clusters = len(x)
    value = float(y.sum() / x.sum())
    if clusters < 2:
        return Estimate(value, -math.inf, math.inf, clusters, math.inf)
    residuals = (y - value * x) / x.mean()
    variance = float(residuals @ residuals) / (clusters - 1)
    reach = float(stdtrit(clusters - 1, confidence)) * math.sqrt(variance / clusters)
    return Estimate(value, value - reach, value + reach, clusters, variance)


def clustered_proportion(successes: ArrayLike, totals: ArrayLike, confidence: float) -> Estimate:
    """A share of tokens, clustered by document, inside [0, 1] and never tighter than independent tokens allow.

    When every token agrees, the spread between documents is zero and says nothing about the next token. The exact
    bounds of as many independent tokens do, so the wider of the two is taken on each side.
    """
    y, x = _clusters(successes, totals)
    spread = ratio_of_sums(y, x, confidence)
    exact = proportion(round(float(y.sum())), round(float(x.sum())), confidence)
    lower, upper = max(min(spread.lower, exact.lower), 0.0), min(max(spread.upper, exact.upper), 1.0)
    return Estimate(spread.value, lower, upper, spread.units, spread.variance)


def perplexity_ratio(
    baseline_nll: ArrayLike, candidate_nll: ArrayLike, tokens: ArrayLike, confidence: float
) -> Estimate:
    """Candidate perplexity over baseline perplexity: the exponential of the paired mean difference per token.

    All ``[G]``: summed negative log-likelihoods in nats and tokens of each document. Pairing removes the spread
    between easy and hard documents, which dwarfs the effect of quantization. ``variance`` is of the logarithm.
    """
    worse_by = np.asarray(candidate_nll, dtype=np.float64) - np.asarray(baseline_nll, dtype=np.float64)
    log_ratio = ratio_of_sums(worse_by, tokens, confidence)
    return Estimate(
        value=_exp(log_ratio.value),
        lower=_exp(log_ratio.lower),
        upper=_exp(log_ratio.upper),
        units=log_ratio.units,
        variance=log_ratio.variance,
    )


def median_bounds(samples: Sequence[float], confidence: float) -> Estimate:
    """Median of independent repeats with distribution-free (sign test) bounds from their order statistics.

    With r repeats the smallest lies above the true median with probability 2**-r. Fewer than five repeats cannot
    reach 95 %: then the whole range is the interval, the widest one the data can give.

    Source: Conover, Practical Nonparametric Statistics (1999), section 3.2.

    >>> median_bounds([1.2, 1.0, 1.1], confidence=0.95).lower
    1.0
    """
    _require_confidence(confidence)
    ordered = sorted(samples)
    repeats = len(ordered)
    if not repeats:
        raise ValueError("no samples")
    drop, tail = 0, 2.0**-repeats  # tail: P(at most `drop` repeats fall below the median)
    while drop + 1 <= (repeats - 1) // 2:
        tail += math.comb(repeats, drop + 1) * 2.0**-repeats
        if tail > 1 - confidence:
            break
        drop += 1
    spread = float(np.var(ordered, ddof=1)) if repeats > 1 else math.inf
    return Estimate(float(np.median(ordered)), ordered[drop], ordered[repeats - 1 - drop], repeats, spread)


def required_units(variance: float, gap: float, confidence: float, power: float = 0.8) -> int | None:
    """Items or clusters needed to tell a value from a bound ``gap`` away, with this ``power``; None if none suffices.

    The usual sample size of a one-sided normal test: ``(z_confidence + z_power)**2 * variance / gap**2``. For paired
    accuracy the variance is about the share of items whose correctness changed.

    >>> required_units(variance=0.04, gap=0.02, confidence=0.95)
    619
    """
    if gap == 0 or not math.isfinite(variance):
        return None
    needed = (normal_quantile(confidence) + normal_quantile(power)) ** 2 * variance / gap**2
    return max(1, math.ceil(needed)) if math.isfinite(needed) else None


def normal_quantile(confidence: float) -> float:
    _require_confidence(confidence)
    return NormalDist().inv_cdf(confidence)


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < 700 else math.inf  # math.exp overflows at 709.8


def _clusters(sums: ArrayLike, weights: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    y, x = np.asarray(sums, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if y.ndim != 1 or y.shape != x.shape or not len(y):
        raise ValueError(f"sums {y.shape} and weights {x.shape} must be equally long, one entry a cluster")
    if not (np.isfinite(y).all() and np.isfinite(x).all() and (x > 0).all()):
        raise ValueError("sums must be finite, and weights finite and positive")
    order = np.lexsort((y, x))  # a fixed summation order: the same clusters give the same bits however they are listed
    return y[order], x[order]


def _require_counts(lost: int, gained: int, n: int) -> None:
    if n < 1 or lost < 0 or gained < 0 or lost + gained > n:
        raise ValueError(f"{lost} lost and {gained} gained of {n} are not counts of a paired table")


def _require_confidence(confidence: float) -> None:
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence {confidence} must lie between 0.5 and 1")
