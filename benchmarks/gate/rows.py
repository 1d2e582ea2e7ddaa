"""A row of the simulation: evidence of one law, what is promised of its checks, and how often each passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.random import Generator

from benchmarks.gate.evidence import standard_error
from evals.check import Outcome
from evals.kind import Bounds, EvidenceKind, Report
from evals.kinds.tasks import ChoiceItem
from tapeout.artifact import ArtifactRef

# What a row promises, where "often" is 1 - confidence of all runs:
BOUND = "bound"  # the truth lies on the bound: the check passes no more often, and fails no more often
EQUAL = "equal"  # both engines are equal in law: the gate fails no more often
GOOD = "good"  # the engine is good: the gate passes in 95 % of all runs
BAD = "bad"  # the engine is worse than a bound: the gate passes no more often
RARE = "rare"  # the mean without a limit for a document lies on the bound: the check passes no more often
NONE = "none"  # the same, and nothing is promised: a sample of this size cannot see it

Outcomes = Callable[[Generator, int], Iterator[Mapping[str, Outcome]]]


@dataclass(frozen=True)
class Row:
    """Evidence of one law. ``checks``: what is counted of it, and the distribution that matters to it."""

    checks: Mapping[str, str]
    units: str
    promise: str
    outcomes: Outcomes


@dataclass(frozen=True)
class Result:
    check: str
    distribution: str
    units: str
    promise: str
    runs: int
    passed: int
    failed: int

    def holds(self, confidence: float) -> bool:
        """Whether the promise is kept, as far as so many runs can tell: three standard errors are allowed."""

        def most(count: int) -> bool:
            return count / self.runs <= 1 - confidence + 3 * standard_error(count, self.runs)

        return {
            BOUND: most(self.passed) and most(self.failed),
            EQUAL: most(self.failed),
            GOOD: most(self.runs - self.passed),
            BAD: most(self.passed),
            RARE: most(self.passed),
            NONE: True,
        }[self.promise]


def run_row(row: Row, runs: int, seed: int = 0) -> list[Result]:
    rng = np.random.default_rng([seed, *f"{dict(row.checks)} {row.units} {row.promise}".encode()])
    counts = {check: Counter[Outcome]() for check in row.checks}
    for outcomes in row.outcomes(rng, runs):
        for check, count in counts.items():
            count[outcomes[check]] += 1
    return [
        Result(check, row.checks[check], row.units, row.promise, runs, count[Outcome.PASS], count[Outcome.FAIL])
        for check, count in counts.items()
    ]


def judged(
    kind: EvidenceKind[Any, Any, Any],
    record: Any,
    items: tuple[Any, ...],
    bounds: Bounds,
    answered: tuple[ChoiceItem, ...] = (),
) -> dict[str, Outcome]:
    """The outcome of each check of one kind. ``answered``: what another kind has of tasks."""
    report: Report[Any, Any] = Report(ArtifactRef(kind.name, "digest"), record, items)
    rest: Any = SimpleNamespace(reports={"tasks": Report(report.ref, record, answered)} if answered else {})
    return {check.name: check.outcome for check in kind.judge(report, rest, bounds).checks}
