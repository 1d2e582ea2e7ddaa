"""Gathers what the report shows from the artifacts of one run: plain rows out of typed records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from engines.bundle import EngineBundle
from evals.known import kinds
from evals.verdict import Verdict
from pipeline.recipe import Recipe
from pipeline.report.data import LayerRow, LineageRow, Planned, ReportData
from quantization.checkpoint import LinearReport, QuantizedModel
from quantization.frontier import Frontier, read
from quantization.plan import COLUMNS, FRONTIER_FILE, PrecisionPlan, summary, table
from tapeout import artifact
from tapeout.artifact import RECORD, Artifact, read_payload
from tapeout.schemes import FLOAT

MADE = ("source", "graph", "calibration", "sensitivity", "plan", "quantized", "baseline", "candidate")


def gather(recipe: Recipe, artifacts: Path) -> ReportData:
    """Everything :mod:`pipeline.report.write` draws, from finished artifacts under ``artifacts``."""
    verdict = artifact.load(artifacts / "verdict", Verdict).record
    quantized = artifact.load(artifacts / "quantized", QuantizedModel)
    candidate = artifact.load(artifacts / "candidate", EngineBundle).record
    shown = [(kind, artifacts / kind.folder) for kind in kinds()]
    found = (
        kind.block(folder, verdict) if _is_there(folder, kind.artifact_types) else kind.absent
        for kind, folder in shown
        if kind.folder
    )
    blocks = tuple(block for block in found if block)
    lineage = dict.fromkeys((*MADE, *(kind.folder for kind in kinds() if kind.folder), "verdict"))
    return ReportData(
        model_name=recipe.register_.model_name,
        verdict=verdict,
        blocks=blocks,
        plan=_plan(artifact.load(artifacts / "plan", PrecisionPlan)),
        layers=tuple(_layer(linear) for linear in quantized.record.linears),
        notes=quantized.record.notes,
        kernels=candidate.operator_counts,
        lineage=tuple(_lineage(artifacts / name) for name in lineage if _is_there(artifacts / name)),
        recipe=recipe.model_dump(mode="json", by_alias=True),
        machine={
            "Executed on": verdict.executed_on or "no hardware",
            "Carries kernels for": ", ".join(one.level or one.machine for one in candidate.hardware),
            **{name: value for block in blocks for name, value in block.machine.items()},
            **candidate.hardware[0].libraries,
        },
    )


def _is_there(folder: Path, artifact_types: Sequence[str] = ()) -> bool:
    """Whether an artifact lies there, of one of these types where some are given."""
    if not (folder / RECORD).is_file():
        return False
    return not artifact_types or read_payload(folder)["artifact_type"] in artifact_types


def _plan(plan: Artifact[PrecisionPlan]) -> Planned:
    search, frontier = plan.record.search, None
    if search is not None:
        points = read((plan.folder / FRONTIER_FILE).read_text())
        frontier = Frontier(points, search.max_kl, by_bytes=search.goal == "memory")
    return Planned(summary(plan.record), COLUMNS, tuple(table(plan.record)), frontier)


def _layer(linear: LinearReport) -> LayerRow:
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", linear.group)
    scheme = linear.scheme
    return LayerRow(
        group=linear.name,
        layer=int(found.group(1)) if found else None,
        unit=found.group(2) if found else linear.group,
        format=scheme.name if scheme == FLOAT else f"{scheme.name}, {linear.method}",
        bits=scheme.bits,
        # Scales in float32, as the engine holds them.
        bits_per_weight=32.0 if scheme == FLOAT else scheme.bits_per_weight(linear.in_features, scale_bits=32),
        error_before=linear.error_rtn,
        error_after=linear.error,
    )


def _lineage(folder: Path) -> LineageRow:
    body = read_payload(folder)
    record = body["record"]
    versions = record.get("versions") or next(iter(record.get("hardware", [])), {}).get("libraries") or {}
    parents = {name: parent["digest"] for name, parent in body["parents"].items()}
    return LineageRow(body["artifact_type"], folder.name, body["digest"], parents, versions)
