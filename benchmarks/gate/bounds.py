"""Upper bounds on the mean of a document, compared: how often each lies below the true mean, and how wide it is.

``python -m benchmarks.gate.bounds`` prints the tables of docs/statistics.md. The gate uses the last of the bounds.

n  documents      m  their mean as observed      s  their standard deviation
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from scipy.special import stdtrit

from benchmarks.gate.evidence import Floats, Run, Shape, lognormal, rare, resampled
from evals.conditions import MOST_TIMES_BOUND
from evals.statistics import bounded_mean

CONFIDENCE = 0.95
RUNS = 2000
RESAMPLES = 500

Bound = Callable[[Floats, Generator], float]


def student(values: Floats, _: Generator) -> float:
    """m + t s / √n, which the gate used before."""
    n = len(values)
    return float(values.mean() + stdtrit(n - 1, CONFIDENCE) * values.std(ddof=1) / math.sqrt(n))


def hall(values: Floats, _: Generator) -> float:
    """Student's t by Hall's cubic transformation, which removes the skewness.

    Source: Hall, On the removal of skewness by transformation, Journal of the Royal Statistical Society B 54 (1992).
    """
    n, spread = len(values), values.std(ddof=1)
    if spread == 0:
        return float(values.mean())
    skewness = float(((values - values.mean()) ** 3).mean() / spread**3)
    z = -stdtrit(n - 1, CONFIDENCE)
    if abs(skewness) < 1e-9:
        root = z / math.sqrt(n)
    else:
        cube = 1 + skewness * (z / math.sqrt(n) - skewness / (6 * n))
        root = 3 * (math.copysign(abs(cube) ** (1 / 3), cube) - 1) / skewness
    return float(values.mean() - root * spread)


def bootstrap_t(values: Floats, rng: Generator) -> float:
    """m - q s / √n, with the 5 % quantile q of the t statistics of resampled documents.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 12.5.
    """
    n = len(values)
    drawn = values[rng.integers(0, n, (RESAMPLES, n))]
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(n)
    differences = drawn.mean(axis=1) - values.mean()
    statistics = np.divide(differences, errors, out=np.zeros(RESAMPLES), where=errors > 0)
    quantile = float(np.quantile(statistics, 1 - CONFIDENCE))
    return float(values.mean() - quantile * values.std(ddof=1) / math.sqrt(n))


def empirical_likelihood(values: Floats, _: Generator) -> float:
    """The largest mean whose likelihood ratio over weighted documents is within the chi-squared limit.

    Source: Owen, Empirical Likelihood (2001), chapter 2.
    """
    from scipy.special import chdtri

    limit, low, high = float(chdtri(1, 2 * (1 - CONFIDENCE))), float(values.mean()), float(values.max())

    def excess(mean: float) -> float:
        gaps = values - mean
        ends = -(1 - 1 / len(values)) / gaps.max(), -(1 - 1 / len(values)) / gaps.min()
        weight = _root(lambda w: float((gaps / (1 + w * gaps)).sum()), *ends)
        return 2 * float(np.log1p(weight * gaps).sum()) - limit

    near = high - 1e-9 * (high - low)
    return _root(excess, low + 1e-12 * (high - low), near) if high > low and excess(near) > 0 else high


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq

    return float(brentq(function, low, high))  # type: ignore[arg-type]


def betting(values: Floats, _: Generator) -> float:
    return bounded_mean(values, 0, MOST_TIMES_BOUND, CONFIDENCE).upper


BOUNDS: dict[str, Bound] = {
    "Student's t": student,
    "skew-corrected t (Hall)": hall,
    "bootstrap-t": bootstrap_t,
    "empirical likelihood": empirical_likelihood,
    "betting": betting,
}


def shapes() -> dict[str, Shape]:
    own = resampled(Run.kept().column("text", 1))
    return {
        "the run's own": own,
        "log-normal, σ = 1": lognormal(1.0),
        "log-normal, σ = 1.5": lognormal(1.5),
        "1 % of documents, 50 times": rare(0.01, 50, own),
        "2 % of documents, 50 times": rare(0.02, 50, own),
    }


def main() -> None:
    found = shapes()
    for n in (64, 300):
        print(f"\n{n} documents\n\n| bound | {' | '.join(found)} | width, the run's own |")
        print(f"|---|{'--:|' * (len(found) + 1)}")
        for name, bound in BOUNDS.items():
            wrong: list[str] = []
            widths: list[float] = []
            for shape in found.values():
                rng = np.random.default_rng(0)
                uppers = np.array([bound(values, rng) for values in shape(rng, (RUNS, n))])
                wrong.append(f"{100 * float((uppers < 1).mean()):.1f} %")
                widths.append(float(uppers.mean()) - 1)
            print(f"| {name} | {' | '.join(wrong)} | {widths[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
