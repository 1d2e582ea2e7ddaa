"""The gate: a pure function from evidence and bounds to a verdict, and the stage that writes it down.

What evidence is refused says evals/soundness.py; what is demanded of the rest, evals/checks.py; when a demand is
met, missed or undecided, evals/conditions.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from engines.bundle import EngineBundle
from evals import checks, facts
from evals.evidence import Evidence
from evals.soundness import require_sound
from evals.verdict import Check, Fact, Outcome, Slice, Verdict, combine
from tapeout.artifact import Artifact, ArtifactRef, create, load
from tapeout.recipe import Gate


def judge(evidence: Evidence, bounds: Gate) -> Verdict:
    """Judge sound evidence; :class:`tapeout.errors.EvidenceError` lists every problem of evidence that is not."""
    require_sound(evidence)
    found: list[Check] = [checks.executed(evidence), checks.quantized(evidence)]
    slices: tuple[Slice, ...] = ()
    noted: list[Fact] = []
    if evidence.quality is not None:
        found += [*checks.task_checks(evidence.task_items, bounds), *checks.text_checks(evidence.text_items, bounds)]
        slices = facts.task_slices(evidence.task_items, bounds.confidence)
        noted += facts.task_facts(evidence.task_items, bounds.confidence)
    if evidence.shadow is not None:
        found += checks.shadow_checks(evidence.shadow_items, evidence.shadow, bounds)
        noted += facts.shadow_facts(evidence.shadow_items, bounds.confidence)
    if evidence.parity is not None:
        found += checks.parity_checks(evidence.parity_items, bounds)
    if evidence.speed is not None:
        found += checks.speed_checks(evidence.speed, bounds)
    return Verdict(
        outcome=combine(check.outcome for check in found),
        checks=tuple(found),
        slices=slices,
        facts=tuple(noted),
        bounds=bounds,
        baseline=evidence.baseline,
        candidate=evidence.candidate,
        quantized=evidence.quantized,
        champion=evidence.shadow.champion if evidence.shadow else None,
        champion_is_baseline=evidence.shadow.champion_is_baseline if evidence.shadow else False,
        target=evidence.target,
        executed_on=evidence.executed_on,
        evidence=dict(sorted(evidence.digests.items())),
    )


def gate(evidence: Evidence, bounds: Gate, folder: Path) -> Artifact[Verdict]:
    """Write the Verdict artifact: its record, ``verdict.json``, ``junit.xml`` for CI, ``metrics.json`` for DVC.

    The verdict is written whatever its outcome; the caller turns ``record.exit_code`` into the process's own.
    """
    verdict = judge(evidence, bounds)
    with create(folder, Verdict) as draft:
        _write_json(draft.folder / "verdict.json", verdict.model_dump(mode="json"))
        _write_json(draft.folder / "metrics.json", verdict.metrics())
        ElementTree.ElementTree(junit(verdict)).write(
            draft.folder / "junit.xml", encoding="utf-8", xml_declaration=True
        )
        draft.finish(
            verdict,
            parents={
                "baseline": ArtifactRef(EngineBundle.noun, verdict.baseline),
                "candidate": ArtifactRef(EngineBundle.noun, verdict.candidate),
                **{_role(noun): ArtifactRef(noun, digest) for noun, digest in verdict.evidence.items()},
            },
        )
    return load(folder, Verdict)


def _role(noun: str) -> str:
    return next(role for role, nouns in Verdict.parent_roles.items() if noun in nouns)


def junit(verdict: Verdict) -> ElementTree.Element:
    """One test case per check. INCONCLUSIVE is an error, not a skip: CI shows skipped tests as green."""
    counts = {outcome: sum(check.outcome is outcome for check in verdict.checks) for outcome in Outcome}
    suite = ElementTree.Element(
        "testsuite",
        name="tapeout gate",
        tests=str(len(verdict.checks)),
        failures=str(counts[Outcome.FAIL]),
        errors=str(counts[Outcome.INCONCLUSIVE]),
    )
    for check in verdict.checks:
        case = ElementTree.SubElement(suite, "testcase", classname="gate", name=check.name)
        if check.outcome is Outcome.FAIL:
            ElementTree.SubElement(case, "failure", message=check.reason, type="FAIL")
        elif check.outcome is Outcome.INCONCLUSIVE:
            ElementTree.SubElement(case, "error", message=check.reason, type="INCONCLUSIVE")
    return suite


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
