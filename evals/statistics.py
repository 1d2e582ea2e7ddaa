"""The gate's statistics: one-sided confidence bounds for paired, proportional and clustered data (docs/statistics.md).

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


def tango_score(lost: float, gained: float, n: int, difference: float) -> float:
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


def null_variance(lost: float, gained: float, n: int, difference: float) -> float:
    """Variance of one item's paired difference under H0: accuracy difference = ``difference``."""
    _require_counts(lost, gained, n)
    linear = lost + gained + (gained - lost - 2 * n) * difference
    # The discriminant is a sum of squares on paper; rounding near D = -1 can leave it a hair below zero.
    constant = 2 * lost * difference * (1 - difference)
    root = math.sqrt(max(linear**2 + 4 * n * constant, 0.0))
    # The positive root of 2n p² - linear p - constant / 2 = 0, in the form that subtracts no two nearly equal numbers.
    p_lost = (linear + root) / (4 * n) if linear > 0 else (constant / (root - linear) if root > linear else 0.0)
    return max(2 * p_lost + difference * (1 - difference), 0.0)


def paired_difference(lost: float, gained: float, n: int, confidence: float) -> Estimate:
    """Accuracy difference of two paired arms with Tango's score bounds.

    Items that are scored between 0 and 1 count in part: ``lost`` and ``gained`` are the sums of their differences. The
    variance of a difference d is then taken for larger than it is, by E|d| - E[d²], so the bounds hold.

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


def _tango_lower(lost: float, gained: float, n: int, quantile: float) -> float:
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


def proportion(successes: float, n: int, confidence: float) -> Estimate:
    """A share of independent items with exact bounds, which hold at every n and every share.

    Items that count in part, from 0 to 1, spread less than those that the bounds are of.

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


def bounded_mean(values: ArrayLike, low: float, high: float, confidence: float) -> Estimate:
    """Mean of independent documents, each value clipped to ``[low, high]``, with bounds that no distribution breaks.

    A mean without limits cannot be bounded: a document too rare to be in the sample can be as bad as it likes. So a
    document counts for at most ``high``, and the bounds are of that mean. They need independent documents, not equal
    distributions. Capital 1 is bet on "the mean is below m", the fraction ``f`` of it that survives the worst document,
    on every document: if the mean is m or more, the expected capital is at most 1 in the end, so it reaches
    1 / (1 - confidence) with at most that probability, and m is rejected (Markov). The capital is shared out over the
    ``FRACTIONS``, since the best one depends on the spread.

    ``value`` is the mean as observed, without clipping, and the bounds contain it.

    Source: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, Journal of the Royal
    Statistical Society B 86 (2024), 1-27, section 4; docs/statistics.md compares other bounds.

    >>> mean = bounded_mean([0.0] * 300, 0, 1, confidence=0.95)
    >>> print(f"{mean.lower:.4f} {mean.upper:.4f}")
    0.0000 0.0120
    """
    _require_confidence(confidence)
    shares, value, variance = _shares(values, low, high)
    upper = low + (high - low) * _upper_bound(shares, confidence)
    lower = high - (high - low) * _upper_bound(np.sort(1 - shares), confidence)
    return Estimate(value, min(lower, value), max(upper, value), len(shares), variance)


def required_documents(values: ArrayLike, low: float, high: float, bound: float, confidence: float) -> int | None:
    """Documents like these that :func:`bounded_mean` needs to tell their mean from ``bound``; None if none suffices."""
    shares, value, _ = _shares(values, low, high)
    limit = (bound - low) / (high - low)
    gains = _log_gains(shares, limit) if value < bound else _log_gains(1 - shares, 1 - limit)
    wanted = -math.log1p(-confidence) - np.log(CAPITAL)
    needed = [float(w / g) for w, g in zip(wanted, gains / len(shares), strict=True) if g > 0]
    return math.ceil(min(needed)) if needed else None


# Half of the capital bets all that the worst document leaves: that is best where documents differ little.
FRACTIONS: NDArray[np.float64] = 2.0 ** -np.arange(12.0)
CAPITAL: NDArray[np.float64] = 1 / (np.arange(1.0, 13.0) * np.arange(2.0, 14.0))  # sums to 12/13


def _log_gains(shares: NDArray[np.float64], mean: float) -> NDArray[np.float64]:
    """For each fraction, the logarithm of what capital 1 becomes when it is bet on a mean below ``mean``."""
    with np.errstate(divide="ignore"):  # a fraction of 1 loses everything at a share of 1
        return np.log1p(FRACTIONS[:, None] * ((mean - shares) / (1 - mean))).sum(axis=1)


def _upper_bound(shares: NDArray[np.float64], confidence: float) -> float:
    """The lowest mean of values in [0, 1] that is rejected; the capital grows with the mean that is bet against."""
    from scipy.optimize import brentq

    log_capital, wanted = np.log(CAPITAL), -math.log1p(-confidence)

    def excess(mean: float) -> float:
        logs = _log_gains(shares, mean) + log_capital
        best = float(logs.max())
        return best + math.log(float(np.exp(logs - best).sum())) - wanted

    low, high = float(shares.mean()), 1 - 1e-12
    if low >= high or excess(high) <= 0:
        return 1.0
    return float(brentq(excess, low, high, xtol=1e-14, rtol=1e-10))  # type: ignore[arg-type]


def _shares(values: ArrayLike, low: float, high: float) -> tuple[NDArray[np.float64], float, float]:
    """Values as shares of the way from ``low`` to ``high``, sorted; their mean as observed; variance when clipped."""
    observed = np.sort(np.asarray(values, dtype=np.float64))
    if observed.ndim != 1 or not len(observed) or not np.isfinite(observed).all() or not low < high:
        raise ValueError(f"values {observed.shape} must be finite, at least one, and {low} below {high}")
    clipped = np.clip(observed, low, high)
    variance = float(clipped.var(ddof=1)) if len(clipped) > 1 else math.inf
    shares: NDArray[np.float64] = (clipped - low) / (high - low)
    return shares, float(observed.mean()), variance


def perplexity_ratio(
    baseline_nll: ArrayLike, candidate_nll: ArrayLike, tokens: ArrayLike, worst: float, confidence: float
) -> Estimate:
    """Candidate perplexity over baseline perplexity: the geometric mean of the ratios of the documents.

    All ``[G]``: summed negative log-likelihoods in nats and tokens of each document. Pairing removes the spread
    between easy and hard documents, which dwarfs the effect of quantization. A document counts for a ratio of at most
    ``worst``, and at least ``1 / worst``. ``variance`` is of the logarithm.
    """
    limit = math.log(worst)
    log_ratio = bounded_mean(log_ratios(baseline_nll, candidate_nll, tokens), -limit, limit, confidence)
    return Estimate(
        value=_exp(log_ratio.value),
        lower=_exp(log_ratio.lower),
        upper=_exp(log_ratio.upper),
        units=log_ratio.units,
        variance=log_ratio.variance,
    )


def log_ratios(baseline_nll: ArrayLike, candidate_nll: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
    """Logarithm of each document's perplexity ratio, ``[G]``."""
    worse_by = np.asarray(candidate_nll, dtype=np.float64) - np.asarray(baseline_nll, dtype=np.float64)
    return worse_by / np.asarray(tokens, dtype=np.float64)


def median_bounds(samples: Sequence[float], confidence: float) -> Estimate:
    """Median of independent repeats with distribution-free (sign test) bounds from their order statistics.

    With r repeats the smallest lies above the true median with probability 2**-r. Fewer than
    :func:`required_repeats` bound nothing: the bounds are infinite.

    Source: Conover, Practical Nonparametric Statistics (1999), section 3.2.

    >>> median_bounds([1.2, 1.0, 1.1, 1.3, 1.2], confidence=0.95).lower
    1.0
    >>> median_bounds([1.2, 1.0, 1.1], confidence=0.95).lower
    -inf
    """
    _require_confidence(confidence)
    ordered = sorted(samples)
    repeats = len(ordered)
    if not repeats:
        raise ValueError("no samples")
    middle = float(np.median(ordered))
    spread = float(np.var(ordered, ddof=1)) if repeats > 1 else math.inf
    if repeats < required_repeats(confidence):
        return Estimate(middle, -math.inf, math.inf, repeats, spread)
    drop, tail = 0, 2.0**-repeats  # tail: P(at most `drop` repeats fall below the median)
    while drop + 1 <= (repeats - 1) // 2:
        tail += math.comb(repeats, drop + 1) * 2.0**-repeats
        if tail > 1 - confidence:
            break
        drop += 1
    return Estimate(middle, ordered[drop], ordered[repeats - 1 - drop], repeats, spread)


def required_repeats(confidence: float) -> int:
    """Fewest repeats that bound a median.

    >>> required_repeats(0.95), required_repeats(0.99)
    (5, 7)
    """
    _require_confidence(confidence)
    return math.ceil(-math.log2(1 - confidence))


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


def _require_counts(lost: float, gained: float, n: int) -> None:
    if n < 1 or lost < 0 or gained < 0 or lost + gained > n:
        raise ValueError(f"{lost} lost and {gained} gained of {n} are not counts of a paired table")


def _require_confidence(confidence: float) -> None:
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence {confidence} must lie between 0.5 and 1")
