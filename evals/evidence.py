"""Reads the evidence that the gate may look at. Which of it is refused says evals/soundness.py."""

from __future__ import annotations

from pathlib import Path

from evals.kind import Evidence
from evals.known import kinds
from tapeout.artifact import ArtifactRef
from tapeout.fingerprint import Fingerprint
from tapeout.recipe import Recipe


def load_evidence(
    artifacts: Path,
    recipe: Recipe,
    *,
    baseline: str,
    candidate: str,
    built_from: ArtifactRef,
    target: str,
    fingerprint: Fingerprint,
) -> Evidence:
    """Every report that an executed engine needs, from its folder below ``artifacts``; its files are hashed again."""
    return Evidence(
        baseline=baseline,
        candidate=candidate,
        built_from=built_from,
        target=target,
        fingerprint=fingerprint,
        reports={kind.name: kind.load(artifacts / kind.role, recipe) for kind in kinds() if kind.needed != "never"},
    )
