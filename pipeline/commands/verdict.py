"""The verdict that lies in the artifacts folder, refused if it is about something else than what lies beside it."""

from __future__ import annotations

from pathlib import Path

from evals.verdict import Verdict
from pipeline.artifact import RECORD, Artifact, load, read_payload
from pipeline.errors import EvidenceError

# Folder -> the field of the verdict that names the digest judged.
JUDGED = {"candidate": "candidate", "baseline": "baseline", "quantized": "quantized"}
EVIDENCE = ("evaluation", "shadow", "parity", "benchmark")


def load_verdict(artifacts: Path) -> Artifact[Verdict]:
    """:class:`EvidenceError` if an engine or a report beside the verdict is not the one it was reached on."""
    found = load(artifacts / "verdict", Verdict)
    for folder, field in JUDGED.items():
        if (artifacts / folder / RECORD).is_file():
            _same(folder, read_payload(artifacts / folder)["digest"], getattr(found.record, field))
    for folder in EVIDENCE:
        if (artifacts / folder / RECORD).is_file():
            body = read_payload(artifacts / folder)
            _same(folder, body["digest"], found.record.evidence.get(body["noun"]))
    return found


def _same(folder: str, digest: str, judged: str | None) -> None:
    if digest != judged:
        raise EvidenceError(
            f"the verdict judged {folder} {(judged or 'none')[:12]}, but {digest[:12]} lies beside it",
            expected="a verdict about these artifacts",
            remedy="run `dvc repro gate`",
        )
