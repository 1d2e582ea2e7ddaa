"""An engine compared with its quantized model by the stage of parity, and judged by its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.load import open_probe
from evals.check import Check
from evals.kind import Report
from evals.kinds.parity import KIND, ParityBounds, ParityItem, ParityReport
from evals.kinds.parity.measure import parity
from tapeout import artifact
from tapeout.artifact import ArtifactRef
from tests.fake_engine import MACHINE
from tests.family_engines import Made, reference_of


def compared(
    made: Made, folder: Path, documents: Sequence[Sequence[int]], max_tokens: int
) -> Report[ParityReport, ParityItem]:
    """``max_tokens``: positions of the engine, for one document of all of them."""
    written = parity(
        open_probe(made.bundle, folder, threads=1),
        reference_of(made),
        documents,
        folder / "parity",
        max_tokens=max_tokens,
        head=next(group.members[0] for group in made.graph.record.groups if group.name == "lm_head"),
        candidate="a" * 64,
        built_from="b" * 64,
        executed_on=MACHINE,
        parents={},
    )
    record = artifact.load_record(written.folder, ParityReport).record
    return Report(ArtifactRef("ParityReport", "0" * 64), record, KIND.load(written.folder, None).items)  # type: ignore[arg-type]


def checks_of(report: Report[ParityReport, ParityItem], min_documents: int) -> dict[str, Check]:
    """By their names."""
    bounds = ParityBounds(min_documents=min_documents)
    return {check.name: check for check in KIND.judge(report, None, bounds).checks}  # type: ignore[arg-type]
