"""Release: the receipt of a registered model version. The registry holds the truth; this says where to look."""

from __future__ import annotations

from typing import ClassVar

from evals.check import Outcome
from tapeout.artifact import ParentTypes, Record


class Release(Record):
    artifact_type: ClassVar[str] = "Release"
    remedy: ClassVar[str] = "run `dvc repro register`"
    schema_version: ClassVar[int] = 3
    parent_types: ClassVar[ParentTypes] = {"bundle": ("EngineBundle",), "verdict": ("Verdict",)}

    registry: str  # tracking URI without credentials
    model_name: str
    version: int
    run_id: str
    outcome: Outcome
    candidate: str  # bundle digest
    compared_with: str | None  # digest of the engine shadow traffic was replayed against
    champion_is_baseline: bool
    evidence: str  # one digest over all reports of the verdict
    policy: str  # digest of the policy that it was judged by
    recipe: str  # digest of the whole recipe
