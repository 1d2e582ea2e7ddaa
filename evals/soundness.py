"""Which evidence may be judged: not what is empty, incomplete, unequal, non-finite, impossible or of another engine.

Every problem is listed at once. Absence is never agreement: only an engine that was not executed may lack reports, and
then it cannot pass. Each kind of evidence adds the rules of its own report.
"""

from __future__ import annotations

from evals.kind import Evidence, Executed
from evals.known import kinds, missing
from evals.rules import short
from tapeout.errors import EvidenceError


def require_sound(evidence: Evidence) -> None:
    """Raise :class:`EvidenceError` with every problem found; return only for evidence that may be judged."""
    problems = [*_identity(evidence), *_engines(evidence), *_overlap(evidence)]
    for kind in kinds():
        if (report := kind.given(evidence)) is not None:
            problems += kind.problems(report, evidence)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise EvidenceError(
            f"the evidence has {count}:" + "".join(f"\n  - {problem}" for problem in problems),
            expected="complete, paired and finite reports about the engines being judged",
            remedy="run `dvc repro`; it measures again whatever is missing or belongs to another engine",
        )


def _identity(evidence: Evidence) -> list[str]:
    problems = [f"{title} has no digest" for title, digest in evidence.judged.values() if not digest]
    if evidence.baseline == evidence.candidate:
        problems.append(f"baseline and candidate are the same engine {short(evidence.candidate)}")
    problems += [f"{artifact_type} is missing" for artifact_type in missing(evidence, "always")]
    if any(isinstance(report.record, Executed) for report in evidence.reports.values()):
        problems += [
            f"{artifact_type} is missing although the engine was executed" for artifact_type in missing(evidence)
        ]
    digests: dict[str, str] = {}
    for ref in dict.fromkeys(report.ref for report in evidence.reports.values()):
        if not ref.digest:
            problems.append(f"no digest of {ref.artifact_type}")
        elif digests.setdefault(ref.artifact_type, ref.digest) != ref.digest:
            problems.append(f"two different artifacts {ref.artifact_type}")
    return problems


def _engines(evidence: Evidence) -> list[str]:
    """Every digest that a report names must be of what is being judged."""
    named = [
        (f"{report.ref.artifact_type}'s {title}", getattr(report.record, field), judged)
        for report in evidence.reports.values()
        for field, (title, judged) in evidence.judged.items()
        if hasattr(report.record, field)
    ]
    return [
        f"{what} is {short(found)}, not {short(judged)} which is being judged"
        for what, found, judged in dict.fromkeys(named)
        if found != judged
    ]


def _overlap(evidence: Evidence) -> list[str]:
    """No document may be scored that the candidate was calibrated on."""
    problems: list[str] = []
    for name, report in evidence.reports.items():
        seen = sum(getattr(item, "doc_hash", None) in evidence.calibrated_on for item in report.items)
        if seen:
            problems.append(f"{seen} of {len(report.items)} {name} items are documents that calibration saw")
    return problems
