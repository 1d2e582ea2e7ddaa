"""The gate: a pure function from evidence and bounds to a verdict, and the stage that writes the verdict.

evals/soundness.py says which evidence is refused, the folders of evals/kinds what is required of the rest, and
evals/conditions.py when a requirement is met, missed or undecided.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engines.bundle import EngineBundle
from evals.check import combine
from evals.items import write_metrics
from evals.kind import Bounds, Evidence
from evals.known import kinds, missing
from evals.soundness import require_sound
from evals.verdict import Verdict
from tapeout.artifact import Artifact, ArtifactRef, create, load


def judge(evidence: Evidence, bounds: Bounds) -> Verdict:
    """Judge sound evidence; :class:`tapeout.errors.EvidenceError` lists every problem of evidence that is not.

    ``bounds``: section ``gate`` of the recipe, with the bounds of every kind.
    """
    require_sound(evidence)
    evidence = replace(evidence, absent=missing(evidence))
    found = [kind.findings(evidence, bounds) for kind in kinds()]
    checks = tuple(check for part in found for check in part.checks)
    champion = next((part.champion for part in found if part.champion), None)
    return Verdict(
        outcome=combine(check.outcome for check in checks),
        checks=checks,
        slices=tuple(row for part in found for row in part.slices),
        facts=tuple(fact for part in found for fact in part.facts),
        bounds=bounds.model_dump(mode="json"),
        settings=dict(evidence.settings),
        baseline=evidence.baseline,
        candidate=evidence.candidate,
        built_from=evidence.built_from,
        champion=champion.digest if champion else None,
        champion_is_baseline=champion.is_baseline if champion else False,
        target=evidence.target,
        executed_on=next((part.executed_on for part in found if part.executed_on), None),
        evidence=dict(sorted((report.ref.artifact_type, report.ref.digest) for report in evidence.reports.values())),
    )


def gate(evidence: Evidence, bounds: Bounds, folder: Path) -> Artifact[Verdict]:
    """Write the Verdict artifact: its record, and ``metrics.json`` for DVC.

    The verdict is written whatever its outcome; the caller turns ``record.exit_code`` into the process's own.
    """
    verdict = judge(evidence, bounds)
    with create(folder, Verdict) as draft:
        write_metrics(draft.folder, verdict.metrics())
        draft.finish(
            verdict,
            parents={
                "baseline": ArtifactRef(EngineBundle.artifact_type, verdict.baseline),
                "candidate": ArtifactRef(EngineBundle.artifact_type, verdict.candidate),
                **{kind.folder: report.ref for kind in kinds() if (report := kind.given(evidence))},
            },
        )
    return load(folder, Verdict)
