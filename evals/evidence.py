"""Reads the evidence that the gate may look at, and judges it again where a verdict is to be believed.

Which of it is refused says evals/soundness.py. Here the records are followed back to the source: every artifact
must have been made from the others that lie beside it. That takes records (``LINEAGE``) and no weights, so a
registry can keep all of it with a verdict and judge again years later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engines.bundle import EngineBundle
from evals.as_asked import not_as_asked
from evals.gate import judge
from evals.kind import Bounds, Evidence, EvidenceKind
from evals.known import kinds
from evals.not_executed import NotExecuted
from evals.policy import settings_of
from evals.rules import short
from evals.verdict import Verdict
from quantization.calibration import SAMPLES_FILE, CalibrationSample, samples_hash
from tapeout.artifact import Artifact, Header, load_header, load_record
from tapeout.errors import EvidenceError
from tapeout.recipe import BaseRecipe

# Folders below ``artifacts``: what the engines were made from, and the parents that each must have.
LINEAGE: Mapping[str, tuple[str, ...]] = {
    "source": (),
    "graph": ("source",),
    "calibration": ("graph",),
    "plan": ("graph", "calibration"),
    "quantized": ("graph", "calibration", "plan"),
    "baseline": ("graph",),
    "candidate": ("graph", "quantized"),
}


def measured() -> tuple[str, ...]:
    """Folders below ``artifacts`` that hold reports of executed engines."""
    return tuple(dict.fromkeys(kind.folder for kind in kinds() if kind.needed == "executed"))


def load_evidence(artifacts: Path, recipe: BaseRecipe) -> Evidence:
    """Every report that an executed engine needs, and what the engines were made from, from below ``artifacts``.

    The files of reports are hashed again. :class:`EvidenceError` lists every artifact that was made from another one
    than lies beside it, or with other parameters than the recipe has, and every report that was not measured as the
    recipe asks.
    """
    headers = {name: load_header(artifacts / name) for name in dict.fromkeys((*LINEAGE, *measured()))}
    problems = [problem for name in headers for problem in _parents(name, headers)]
    problems += not_as_asked(headers, recipe)
    reports = {
        kind.name: kind.load(artifacts / kind.folder, recipe)
        for kind in kinds()
        if _is_of(kind, headers.get(kind.folder))
    }
    for kind in kinds():
        if (report := reports.get(kind.name)) is not None:
            problems += kind.deviations(report, recipe)
    if problems:
        raise EvidenceError(
            "the evidence is not of one run of this recipe:" + "".join(f"\n  - {problem}" for problem in problems),
            expected="engines and reports that were made from one another, as the recipe asks",
            remedy="run `dvc repro`; it makes again whatever belongs to another run",
        )
    candidate = load_record(artifacts / "candidate", EngineBundle)
    return Evidence(
        baseline=load_record(artifacts / "baseline", EngineBundle).digest,
        candidate=candidate.digest,
        built_from=candidate.parents["quantized"],
        target=candidate.record.target,
        hardware=candidate.record.hardware,
        reports=reports,
        settings=settings_of(recipe),
        calibrated_on=_calibrated_on(artifacts / "calibration", headers["calibration"]),
        not_executed=next(
            (
                header.record["reason"]
                for header in headers.values()
                if header.artifact_type == NotExecuted.artifact_type
            ),
            "",
        ),
    )


def _is_of(kind: EvidenceKind[Any, Any, Any], found: Header | None) -> bool:
    """Whether what lies in the kind's folder is to be read as its report.

    A kind that an engine needs is read, and refused, unless a stage says there why it has no such report.
    """
    if found is None or found.artifact_type in kind.artifact_types:
        return found is not None
    instead = {name for other in kinds() if other.folder == kind.folder for name in other.artifact_types}
    return kind.needed != "never" and found.artifact_type not in {NotExecuted.artifact_type, *instead}


def require_reproducible(verdict: Artifact[Verdict], artifacts: Path, recipe: BaseRecipe) -> None:
    """Judge the evidence below ``artifacts`` again; :class:`EvidenceError` unless it gives the same verdict.

    So an edited verdict is found even if its digest was computed anew.
    """
    again = judge(load_evidence(artifacts, recipe), recipe.section(Bounds))
    found, expected = (record.model_dump(mode="json") for record in (verdict.record, again))
    if differing := [name for name in expected if not _alike(found[name], expected[name])]:
        raise EvidenceError(
            f"the evidence gives another verdict than the recorded {verdict.record.outcome.value}: "
            f"{again.outcome.value}, with other {', '.join(differing)}",
            expected="a verdict that its own evidence gives",
            remedy="run `dvc repro gate`; if it was registered, `dvc repro register` too",
        )


def _alike(one: Any, other: Any) -> bool:
    """Equal, but for the last digits that another processor rounds differently, and for words."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one if key != "reason")
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)
    return one == other


def _parents(name: str, headers: Mapping[str, Header]) -> Iterator[str]:
    """Where an artifact was made from another one than lies beside it, or does not say what it was made from."""
    parents, record = headers[name].parents, headers[name].record
    if name in LINEAGE:
        for parent_name in LINEAGE[name]:
            if parent_name not in parents:
                yield f"{name} does not say from which {parent_name} it was made"
    elif not parents:
        yield f"{name} does not say of what it is"
    for parent_name, parent in parents.items():
        if parent_name in headers and parent != headers[parent_name].ref:
            yield (
                f"{name} was made from {parent_name} {short(parent.digest)}, "
                f"not from {short(headers[parent_name].digest)} which lies beside it"
            )
        if isinstance(named := record.get(parent_name), str) and named != parent.digest:
            yield f"{name} names {parent_name} {short(named)}, but was made from {short(parent.digest)}"


def _calibrated_on(calibration: Path, header: Header) -> frozenset[str]:
    lines = (calibration / SAMPLES_FILE).read_text().splitlines()
    samples = [CalibrationSample.model_validate_json(line) for line in lines]
    if samples_hash(samples) != header.record["samples_hash"]:
        raise EvidenceError(
            f"{calibration / SAMPLES_FILE} does not list the samples that were calibrated on",
            expected="the samples of the record",
            remedy="run `dvc repro calibrate`",
        )
    return frozenset(sample.sample_hash for sample in samples)
