"""What the gate finds: checks with their outcomes, and numbers that decide nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from tapeout.artifact import Frozen

Direction = Literal["at_least", "at_most"]


class Outcome(StrEnum):
    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"


def combine(outcomes: Iterable[Outcome]) -> Outcome:
    """FAIL if any fails, else INCONCLUSIVE if any is, else PASS; no outcome at all is INCONCLUSIVE.

    All checks must pass, so testing each at full confidence needs no correction for their number
    (intersection-union test; Berger, Technometrics 24 (1982), 295-300).
    """
    found = set(outcomes)
    if Outcome.FAIL in found:
        return Outcome.FAIL
    return Outcome.PASS if found == {Outcome.PASS} else Outcome.INCONCLUSIVE


class Check(Frozen):
    """One condition. Measured ones carry numbers; statements (``executed``) leave them None.

    ``lower`` and ``upper`` are each one-sided at the verdict's confidence; None where the data give no bound.
    ``n`` counts ``unit`` (items, tokens, repeats); ``clusters`` counts the independent units behind the bounds.
    """

    name: str
    title: str
    outcome: Outcome
    reason: str
    direction: Direction | None = None
    value: float | None = None
    bound: float | None = None
    lower: float | None = None
    upper: float | None = None
    unit: str = ""
    n: int | None = None
    clusters: int | None = None


class Slice(Frozen):
    """Accuracy on one task, each bound one-sided at the verdict's confidence.

    Informational: of all tasks, the check ``accuracy_worst_task`` judges the worst.
    """

    task: str
    items: int
    baseline_accuracy: float
    candidate_accuracy: float
    difference: float
    lower: float
    upper: float
    lost: int  # items that the baseline answers better; where answers are right or wrong, that only it has right
    gained: int


class Fact(Frozen):
    """A number worth reading that decides nothing."""

    name: str
    title: str
    value: float
    lower: float | None = None
    upper: float | None = None


class JudgedVerdict(Protocol):
    """A verdict, as far as report blocks read it."""

    @property
    def slices(self) -> tuple[Slice, ...]: ...
    @property
    def confidence(self) -> float: ...
    def check(self, name: str) -> Check: ...


class Champion(Frozen):
    """The engine that traffic was replayed against."""

    digest: str
    is_baseline: bool  # no champion is registered: the float engine stood in


@dataclass(frozen=True)
class Findings:
    """What one kind of evidence adds to the verdict."""

    checks: tuple[Check, ...] = ()
    facts: tuple[Fact, ...] = ()
    slices: tuple[Slice, ...] = ()
    champion: Champion | None = None
    executed_on: str | None = None  # the hardware that the candidate ran on
