"""What a stage writes on a machine without the candidate's hardware: that its evidence was not taken, and why.

It stands where a report would, so that later stages run and the gate can say what is missing. It is no evidence: a
verdict without reports of an executed engine is INCONCLUSIVE at best.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from engines.bundle import EngineBundle
from evals.items import write_metrics
from tapeout.artifact import Artifact, ParentTypes, Record, create, load


class NotExecuted(Record):
    artifact_type: ClassVar[str] = "NotExecuted"
    remedy: ClassVar[str] = "run `dvc repro` on a machine with the candidate's hardware"
    parent_types: ClassVar[ParentTypes] = {"candidate": ("EngineBundle",)}

    candidate: str  # bundle digest
    reason: str  # a clause


def write_not_executed(folder: Path, candidate: Artifact[EngineBundle], reason: str) -> Artifact[NotExecuted]:
    """With a ``metrics.json`` that has none."""
    with create(folder, NotExecuted) as draft:
        write_metrics(draft.folder, {})
        draft.finish(NotExecuted(candidate=candidate.digest, reason=reason), parents={"candidate": candidate})
    return load(folder, NotExecuted)
