"""The verdict in the artifacts folder, refused unless it judged the artifacts beside it, whole and unchanged."""

from __future__ import annotations

from pathlib import Path

from evals.kind import Bounds
from evals.known import kinds
from evals.verdict import Verdict
from pipeline.recipe import load_recipe
from tapeout.artifact import Artifact, identify, load, verify_files
from tapeout.errors import EvidenceError


def load_verdict(artifacts: Path, params: Path | None = None) -> Artifact[Verdict]:
    """:class:`EvidenceError` if an engine or a report is missing, or is not the one the verdict was reached on.

    Every file of the candidate and of the measured reports is hashed again. With ``params``, the bounds there must be
    those the verdict was judged by.
    """
    found = load(artifacts / "verdict", Verdict)
    found.verify()
    for folder, judged in (("candidate", found.record.candidate), ("baseline", found.record.baseline)):
        _, digest, files = identify(artifacts / folder)
        _same(folder, digest, judged)
        if folder == "candidate":  # what ships
            verify_files(artifacts / folder, files)
    needed = {kind.role: kind.needed for kind in kinds() if kind.needed != "never"}
    for folder, when in needed.items():
        noun, digest, files = identify(artifacts / folder)
        _same(folder, digest, found.record.evidence.get(noun))
        if when == "executed":
            verify_files(artifacts / folder, files)
    if params is not None and load_recipe(params).section(Bounds).model_dump(mode="json") != found.record.bounds:
        raise EvidenceError(
            f"the verdict was judged by other bounds than those in {params}",
            expected="a verdict by the bounds of the recipe",
            remedy="run `dvc repro gate`",
        )
    return found


def _same(folder: str, digest: str, judged: str | None) -> None:
    if digest != judged:
        raise EvidenceError(
            f"the verdict judged {folder} {(judged or 'none')[:12]}, but {digest[:12]} lies beside it",
            expected="a verdict about these artifacts",
            remedy="run `dvc repro gate`",
        )
