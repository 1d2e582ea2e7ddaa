"""Simulate the online test: how often it is wrong when it is looked at after every conversation, and when it decides.

``python -m benchmarks.gate.online`` writes docs/benchmarks/online.md with the code that judges
(``evals.kinds.online.sequential``).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.random import Generator
from scipy.special import stdtrit

from benchmarks.gate.evidence import (
    Floats,
    Run,
    Shape,
    all_or_little,
    clustered,
    disagreeing,
    lognormal,
    scaled_to_share,
    standard_error,
)
from benchmarks.gate.simulate import ROOT
from evals.check import Outcome
from evals.kinds.online import Online
from evals.kinds.online.sequential import AnytimeTest

PAGE = ROOT / "docs" / "benchmarks" / "online.md"
RUNS, CONVERSATIONS, PERIOD = 1000, 2000, 200
FIRST_LOOK = 30  # of the test of a fixed sample
BOUND, CONFIDENCE = Online().max_disagreement, Online().confidence
# What a row promises, where "often" is 1 - confidence of all runs:
ON = "the truth lies on the bound"  # neither a pass nor a fail more often
ABOVE = "the truth is never below the bound"  # no pass more often
BELOW = "the truth is never above the bound"  # no fail more often
HALF = "the truth is half the bound"  # a pass after at most 400 conversations, in the median
NONE = "nothing is promised"
MEDIAN = 400

Traffic = Callable[[Generator, int], Floats]  # disagreement of each conversation, in order


@dataclass(frozen=True)
class Row:
    title: str
    promise: str
    traffic: Traffic
    first_look: int = 1  # conversations before
    peeking: bool = False  # a test of a fixed sample, repeated after each conversation


@dataclass(frozen=True)
class Result:
    """``passed_after``: conversations until PASS, of each run that passes."""

    title: str
    promise: str
    runs: int
    passed_after: tuple[int, ...]
    failed: int

    @property
    def median(self) -> float:
        """Conversations until half of all runs have passed; infinite if fewer do."""
        return float(np.median([*self.passed_after, *[math.inf] * (self.runs - len(self.passed_after))]))

    def holds(self) -> bool:
        """As far as so many runs can tell: three standard errors are allowed."""

        def seldom(count: int) -> bool:
            return count / self.runs <= 1 - CONFIDENCE + 3 * standard_error(count, self.runs)

        passed = len(self.passed_after)
        return {
            ON: seldom(passed) and seldom(self.failed),
            ABOVE: seldom(passed),
            BELOW: seldom(self.failed),
            HALF: self.median <= MEDIAN and seldom(self.failed),
            NONE: True,
        }[self.promise]


def run_row(row: Row, runs: int, conversations: int = CONVERSATIONS, seed: int = 0) -> Result:
    rng = np.random.default_rng([seed, *f"{row.title} {row.promise}".encode()])
    passed: list[int] = []
    failed = 0
    for _ in range(runs):
        values = row.traffic(rng, conversations)
        after, fails = _peeked(values) if row.peeking else _tested(values, row.first_look)
        passed += [after] if after else []
        failed += fails
    return Result(row.title, row.promise, runs, tuple(passed), failed)


def _tested(values: Floats, first_look: int) -> tuple[int, bool]:
    """Conversations until the first PASS that is seen (0: never), and whether it ever fails."""
    test, passed = AnytimeTest(BOUND, CONFIDENCE), 0
    for value in values.tolist():
        test = test.after(value)
        if test.outcome is Outcome.FAIL:
            return passed, True
        if not passed and test.units >= first_look and test.outcome is Outcome.PASS:
            passed = test.units
    return passed, False


def _peeked(values: Floats) -> tuple[int, bool]:
    """Student's t after each conversation, each time as if it were the only look."""
    n = np.arange(1, len(values) + 1)
    mean = np.cumsum(values) / n
    spread = np.maximum(np.cumsum(values**2) / n - mean**2, 0) * n / np.maximum(n - 1, 1)
    reach = stdtrit(np.maximum(n - 1, 1), CONFIDENCE) * np.sqrt(spread / n)
    below = np.flatnonzero((mean + reach < BOUND) & (n >= FIRST_LOOK))
    above = bool(((mean - reach > BOUND) & (n >= FIRST_LOOK)).any())
    return (int(below[0]) + 1 if len(below) else 0), above


# traffic


def steady(shape: Shape, mean: float) -> Traffic:
    """Conversations of one law; a share of the tokens of each disagrees, of this shape and with this mean."""
    tokens = Run.kept().column("shadow", 0)

    @cache
    def factor() -> float:
        return scaled_to_share(shape, tokens, 1.0, mean)

    return lambda rng, count: disagreeing(shape, factor(), tokens, rng, (1, count))[1][0]


def drifting(level: Callable[[Generator, int], Floats]) -> Traffic:
    """``level``: the mean of each conversation as a multiple of the bound; it changes with time."""
    tokens = Run.kept().column("shadow", 0)

    def traffic(rng: Generator, count: int) -> Floats:
        mean = np.clip(BOUND * level(rng, count), 1e-6, 1 - 1e-6)
        size = 1 / 0.1 - 1  # tokens of a conversation correlate by 0.1
        sizes = rng.choice(tokens, count).astype(int)
        return rng.binomial(sizes, rng.beta(mean * size, (1 - mean) * size)) / sizes

    return traffic


def walk(low: float, high: float) -> Callable[[Generator, int], Floats]:
    """A random walk between two multiples of the bound; it begins at 1."""

    def level(rng: Generator, count: int) -> Floats:
        at, found = 1.0, np.empty(count)
        for number, step in enumerate(rng.normal(0, 0.05, count).tolist()):
            at = min(max(at + step, low), high)
            found[number] = at
        return found

    return level


def swing(low: float, high: float, phase: float | None = None) -> Callable[[Generator, int], Floats]:
    """Up and down within each period, as day and night; from a random ``phase`` if none is given."""

    def level(rng: Generator, count: int) -> Floats:
        start = rng.random() if phase is None else phase
        wave = np.sin(2 * np.pi * (np.arange(count) / PERIOD + start))
        return (low + high) / 2 + (high - low) / 2 * wave

    return level


def shapes(mean: float) -> Iterator[tuple[str, Shape]]:
    yield "independent tokens", lambda rng, size: np.full(size, mean)
    yield "correlation of tokens 0.1", clustered(mean, 0.1)
    yield "correlation of tokens 0.5", clustered(mean, 0.5)
    yield "heavy-tailed: log-normal, σ = 1.5", lognormal(1.5)
    yield "1 % of conversations disagree everywhere", all_or_little(mean, 0.01)
    yield "all or nothing", all_or_little(mean, mean)


def rows() -> list[Row]:
    return [
        *(Row(title, ON, steady(shape, BOUND)) for title, shape in shapes(BOUND)),
        Row("drifts between the bound and three times it", ABOVE, drifting(walk(1, 3))),
        Row("swings between the bound and twice it", ABOVE, drifting(swing(1, 2))),
        Row("twice the bound, all the time", ABOVE, steady(clustered(2 * BOUND, 0.1), 2 * BOUND)),
        Row("drifts between the bound and none", BELOW, drifting(walk(0, 1))),
        *(Row(title, HALF, steady(shape, BOUND / 2)) for title, shape in shapes(BOUND / 2)),
        Row("swings between none and the bound", HALF, drifting(swing(0, 1))),
        *(
            Row(
                f"swings around the bound{title}, first look after {look}", NONE, drifting(swing(0.5, 1.5, phase)), look
            )
            for title, phase in (("", None), (", begins with the easy half", 0.5))
            for look in (1, PERIOD, 2 * PERIOD)
        ),
        *(
            Row(f"Student's t after each conversation: {title}", NONE, steady(shape, BOUND), peeking=True)
            for title, shape in shapes(BOUND)
        ),
    ]


def run_number(number: int, runs: int) -> Result:
    """For another process: a row itself cannot be sent there."""
    return run_row(rows()[number], runs)


def page(results: list[Result]) -> str:
    lines = [
        "# How often the online test is wrong",
        "",
        "Written by `python -m benchmarks.gate.online` with the code that judges (`evals/kinds/online/sequential.py`):",
        f"bound {BOUND:g}, confidence {CONFIDENCE:g}, {CONVERSATIONS:,} conversations a run, a look after each one.",
        "[statistics.md](../statistics.md) says what is promised. ± is one standard error of the simulation.",
        "PASS and FAIL are shares of runs in which the test ever says so; the last columns count conversations",
        "until PASS.",
    ]
    for promise in dict.fromkeys(result.promise for result in results):
        lines += ["", f"## {promise[0].upper()}{promise[1:]}", ""]
        lines += ["| traffic | runs | PASS | FAIL | median | 90 % |", "|---|--:|--:|--:|--:|--:|"]
        lines += [_line(result) for result in results if result.promise == promise]
    kept = sum(result.holds() for result in results)
    return "\n".join([*lines, "", f"{kept} of {len(results)} rows keep their promise."]) + "\n"


def _line(result: Result) -> str:
    def share(count: int) -> str:
        return f"{100 * count / result.runs:.1f} ± {100 * standard_error(count, result.runs):.1f} %"

    after = sorted(result.passed_after)
    place = math.ceil(0.9 * result.runs)
    most = str(after[place - 1]) if place <= len(after) else ""
    median = f"{result.median:g}" if math.isfinite(result.median) else ""
    return f"| {result.title} | {result.runs:,} | {share(len(after))} | {share(result.failed)} | {median} | {most} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    results: list[Result] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for result in pool.map(partial(run_number, runs=options.runs), range(len(rows()))):
            print(_line(result), flush=True)
            results.append(result)
    options.page.write_text(page(results))
    broken = [result.title for result in results if not result.holds()]
    print("\n".join(f"does not keep its promise: {title}" for title in broken) or "every row keeps its promise")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
