"""Evidence that moves by DVC: a builder pushes its artifacts to a remote, and another checkout judges what it pulls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests import judged
from tests.command import COMMAND, ROOT

GIT = ["git", "-c", "user.name=builder", "-c", "user.email=builder@localhost", "-c", "init.defaultBranch=main"]


def run(folder: Path, *words: str, code: int = 0) -> str:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "1", "DVC_NO_ANALYTICS": "1"}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def dvc(folder: Path, *words: str) -> str:
    return run(folder, sys.executable, "-m", "dvc", *words)


def outputs_and_inputs(pipeline: dict[str, Any]) -> set[str]:
    """Every path that the stages read or write."""
    parts = [stage.get(part, ()) for stage in pipeline["stages"].values() for part in ("outs", "deps")]
    entries = [entry for part in parts for entry in part]
    return {entry if isinstance(entry, str) else next(iter(entry)) for entry in entries}


def test_another_checkout_judges_pulled_evidence(tmp_path: Path) -> None:
    builder, other = tmp_path / "builder", tmp_path / "other"
    builder.mkdir()
    judged.write_run(builder / "artifacts")
    judged.write_params(builder / "params.yaml", judged.recipe())
    shutil.copy(ROOT / "dvc.yaml", builder)
    (builder / ".gitignore").write_text("/artifacts/\n")
    for name in outputs_and_inputs(yaml.safe_load((ROOT / "dvc.yaml").read_text())):
        path = builder / name
        if path.suffix and not path.exists():  # of stages that no evidence names
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        elif not path.suffix:
            path.mkdir(parents=True, exist_ok=True)
    run(builder, *GIT, "init", "-q")
    dvc(builder, "init", "-q")
    dvc(builder, "remote", "add", "-d", "store", str(tmp_path / "remote"))
    dvc(builder, "commit", "-f")  # as if `dvc repro` had made them
    dvc(builder, "push")
    run(builder, *GIT, "add", ".")
    run(builder, *GIT, "commit", "-qm", "A judged candidate")
    run(tmp_path, *GIT, "clone", "-q", str(builder), str(other))
    shutil.rmtree(builder)
    assert "there is no folder artifacts/verdict" in run(other, *COMMAND, "gate", code=2)
    dvc(other, "pull")
    assert "PASS" in run(other, *COMMAND, "gate")
    # DVC's cache is linked or copied into the checkout: what is changed there is found.
    weights = other / "artifacts" / "candidate" / "model.onnx"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert "has sha256" in run(other, *COMMAND, "gate", code=2)
