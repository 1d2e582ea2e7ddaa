"""Verdict: every check with its value, bound, confidence bounds, counts, outcome and reason.

A verdict also names what was judged (digests of both engines and of the quantized model), on which evidence
(digests of the reports) and by which bounds, so that a registry can refuse a verdict about something else.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar, Literal

from tapeout.artifact import Frozen, Record, Roles
from tapeout.errors import ExitCode
from tapeout.recipe import Gate

COLUMNS = ("outcome", "check", "value", "bound", "confidence bounds", "n", "reason")


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
    ``n`` counts ``unit`` (items, tokens, repeats); ``clusters`` counts the independent units the bounds rest on.
    """

    name: str
    title: str
    outcome: Outcome
    reason: str
    direction: Literal["at_least", "at_most"] | None = None
    value: float | None = None
    bound: float | None = None
    lower: float | None = None
    upper: float | None = None
    unit: str = ""
    n: int | None = None
    clusters: int | None = None


class Slice(Frozen):
    """Accuracy on one task. Informational: a single task is too small to be judged by itself."""

    task: str
    items: int
    baseline_accuracy: float
    candidate_accuracy: float
    difference: float
    lower: float
    upper: float
    lost: int  # items only the baseline answers rightly
    gained: int


class Fact(Frozen):
    """A number worth reading that decides nothing."""

    name: str
    title: str
    value: float
    lower: float | None = None
    upper: float | None = None


class Verdict(Record):
    noun: ClassVar[str] = "Verdict"
    remedy: ClassVar[str] = "run `dvc repro gate`"
    parent_roles: ClassVar[Roles] = {
        "baseline": ("EngineBundle",),
        "candidate": ("EngineBundle",),
        "quantized": ("QuantizedModel", "LoweredGraph"),
        "evaluation": ("EvalReport",),
        "shadow": ("ShadowReport",),
        "parity": ("ParityReport",),
        "benchmark": ("Benchmark",),
        "portable": ("PortableReport",),
    }

    outcome: Outcome
    checks: tuple[Check, ...]
    slices: tuple[Slice, ...]
    facts: tuple[Fact, ...]
    bounds: Gate
    baseline: str  # bundle digests
    candidate: str
    quantized: str  # digest of the QuantizedModel
    champion: str | None  # the engine shadow traffic was replayed against; None when there was no replay
    champion_is_baseline: bool
    target: str  # hardware the candidate was built for
    executed_on: str | None
    evidence: dict[str, str]  # noun of each report -> its digest

    @property
    def exit_code(self) -> ExitCode:
        return {
            Outcome.PASS: ExitCode.PASS,
            Outcome.FAIL: ExitCode.GATE_FAILED,
            Outcome.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
        }[self.outcome]

    def check(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def explain(self) -> tuple[tuple[str, ...], ...]:
        """One row of plain text per check, in the order of ``COLUMNS``."""
        return tuple(_row(check) for check in self.checks)

    def metrics(self) -> dict[str, float]:
        """Flat numbers for experiment trackers: ``name``, ``name.lower``, ``name.upper`` of checks and facts."""
        named = [
            (f"{entry.name}{suffix}", number)
            for entry in (*self.checks, *self.facts)
            for suffix, number in (("", entry.value), (".lower", entry.lower), (".upper", entry.upper))
        ]
        return {"exit_code": float(self.exit_code)} | {name: number for name, number in named if number is not None}


def _row(check: Check) -> tuple[str, ...]:
    sign = {"at_least": "≥ ", "at_most": "≤ ", None: ""}[check.direction]
    limits = "" if check.lower is check.upper is None else f"{_number(check.lower)} … {_number(check.upper)}"
    count = "" if check.n is None else f"{check.n} {check.unit}"
    if check.clusters not in (None, check.n):
        count += f" in {check.clusters} clusters"
    return (
        check.outcome.value,
        check.title,
        "" if check.value is None else _number(check.value),
        "" if check.bound is None else sign + _number(check.bound),
        limits,
        count,
        check.reason,
    )


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
