"""Verdict: every check with its value, bound, confidence bounds, counts, outcome and reason.

A verdict also names what was judged (both engines, and what the candidate was built from), on which evidence
(digests of the reports) and by which policy, so that a registry can refuse a verdict about something else.
"""

from __future__ import annotations

from typing import ClassVar

from evals.check import Check, Fact, Outcome, Slice
from evals.known import kinds
from evals.policy import Policy, Settings
from tapeout.artifact import ArtifactRef, ParentTypes, Record
from tapeout.errors import ExitCode

EXIT_CODES = {
    Outcome.PASS: ExitCode.PASS,
    Outcome.FAIL: ExitCode.GATE_FAILED,
    Outcome.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
}
COLUMNS = ("outcome", "check", "value", "bound", "confidence bounds", "n", "reason")


class Verdict(Record):
    artifact_type: ClassVar[str] = "Verdict"
    remedy: ClassVar[str] = "run `dvc repro gate`"
    schema_version: ClassVar[int] = 4
    parent_types: ClassVar[ParentTypes] = {
        "baseline": ("EngineBundle",),
        "candidate": ("EngineBundle",),
        **{
            folder: tuple(
                dict.fromkeys(name for kind in kinds() if kind.folder == folder for name in kind.artifact_types)
            )
            for folder in dict.fromkeys(kind.folder for kind in kinds() if kind.folder)
        },
    }

    outcome: Outcome
    checks: tuple[Check, ...]
    slices: tuple[Slice, ...]
    facts: tuple[Fact, ...]
    bounds: dict[str, int | float]  # section ``gate`` of the recipe
    settings: Settings  # how the recipe asked for evidence to be measured
    baseline: str  # bundle digests
    candidate: str
    built_from: ArtifactRef  # what the candidate was built from
    champion: str | None  # the engine that traffic was replayed against; None when there was no replay
    champion_is_baseline: bool
    target: str  # what the candidate was built for
    executed_on: str | None  # the hardware of the reports; None: the candidate was not executed
    evidence: dict[str, str]  # type of each report -> its digest

    @property
    def policy(self) -> Policy:
        return Policy(bounds=self.bounds, settings=self.settings)

    @property
    def confidence(self) -> float:
        """Of each one-sided bound."""
        return self.bounds["confidence"]

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.outcome]

    @property
    def headline(self) -> str:
        """One sentence: why the outcome is what it is."""
        total = len(self.checks)
        if self.outcome is Outcome.PASS:
            return f"All {total} checks hold at {percent(self.confidence)} confidence."
        deciding = [check for check in self.checks if check.outcome is self.outcome]
        if not deciding:
            return "No check was made, and missing evidence never passes."
        did = "failed" if self.outcome is Outcome.FAIL else "could not be decided"
        rest = f" (and {len(deciding) - 1} more below)" if len(deciding) > 1 else ""
        return f"{len(deciding)} of {total} checks {did}: {deciding[0].title}, {deciding[0].reason}{rest}"

    @property
    def numbers(self) -> dict[str, float]:
        """Value of each fact, by name."""
        return {fact.name: fact.value for fact in self.facts}

    def check(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def explain(self) -> tuple[tuple[str, ...], ...]:
        """One row of plain text per check, in the order of ``COLUMNS``."""
        return tuple(row(check) for check in self.checks)

    def metrics(self) -> dict[str, float]:
        """Flat numbers for experiment trackers: ``name``, ``name.lower``, ``name.upper`` of checks and facts."""
        named = [
            (f"{entry.name}{suffix}", number)
            for entry in (*self.checks, *self.facts)
            for suffix, number in (("", entry.value), (".lower", entry.lower), (".upper", entry.upper))
        ]
        return {"exit_code": float(self.exit_code)} | {name: number for name, number in named if number is not None}


def row(check: Check) -> tuple[str, ...]:
    """Plain text in the order of ``COLUMNS``."""
    sign = {"at_least": "≥ ", "at_most": "≤ ", None: ""}[check.direction]
    limits = "" if check.lower is check.upper is None else f"{number(check.lower)} … {number(check.upper)}"
    count = "" if check.n is None else f"{check.n} {check.unit}"
    if check.clusters not in (None, check.n):
        count += f" in {check.clusters} clusters"
    return (
        check.outcome.value,
        check.title,
        "" if check.value is None else number(check.value),
        "" if check.bound is None else sign + number(check.bound),
        limits,
        count,
        check.reason,
    )


def number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"


def percent(confidence: float) -> str:
    """As reasons of checks say it, and never rounded up to 100."""
    return f"{100 * confidence:g} %"
