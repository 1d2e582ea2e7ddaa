"""With DVC's cache of an earlier CI run and nothing else, a stage whose inputs are unchanged does not run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from evals.verdict import Verdict
from tapeout.artifact import load
from tests import judged

ROOT = Path(__file__).parents[2]
STAGE = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["gate"]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DVC_NO_ANALYTICS": "1",
        "DVC_SITE_CACHE_DIR": str(folder / "site-cache"),
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def repro(folder: Path, *options: str) -> str:
    done = run(folder, "dvc", "repro", *options, "gate")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A checkout whose other stages have run: evidence lies there, and no verdict."""
    folder = tmp_path / "first"
    judged.write_run(folder / "artifacts")
    shutil.rmtree(folder / "artifacts" / "verdict")
    judged.write_params(folder / "params.yaml", judged.recipe())
    code = folder / "artifacts" / "environment" / "code"
    code.mkdir(parents=True)
    (code / "gate.json").write_text("{}")
    (code.parent / "libraries.json").write_text("{}")
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"gate": STAGE}}))
    (folder / ".gitignore").write_text("/artifacts/\n")
    assert run(folder, "dvc", "init", "--no-scm").returncode == 0
    return folder


def test_an_unchanged_engine_is_not_judged_again_on_the_next_runner(first: Path, tmp_path: Path) -> None:
    assert "Running stage 'gate'" in repro(first)
    digest = load(first / "artifacts/verdict", Verdict).digest

    second = tmp_path / "second"
    shutil.copytree(first, second, symlinks=False)  # the evidence, and .dvc/cache as the action restores it
    shutil.rmtree(second / "artifacts/verdict")
    (second / "dvc.lock").unlink()
    shutil.rmtree(second / ".dvc/tmp", ignore_errors=True)
    printed = repro(second)
    assert "is cached - skipping run" in printed and "Running stage" not in printed
    assert load(second / "artifacts/verdict", Verdict).digest == digest
    assert run(second, "tapeout", "gate").returncode == 0

    text = (second / "params.yaml").read_text()
    changed = text.replace("max_kl: 0.03\n", "max_kl: 0.001\n")
    assert changed != text
    (second / "params.yaml").write_text(changed)
    assert "Running stage 'gate'" in repro(second)
    assert run(second, "tapeout", "gate", "--format", "none").returncode == 1


def test_a_remote_without_a_lock_file_is_enough(first: Path, tmp_path: Path) -> None:
    """The run cache names what a stage has made; only ``repro --pull`` fetches it. Without, the stage runs again."""
    assert run(first, "dvc", "remote", "add", "--default", "store", str(tmp_path / "remote")).returncode == 0
    repro(first)
    assert run(first, "dvc", "push", "--run-cache").returncode == 0
    for options, runs in (("--pull",), False), ((), True):
        second = tmp_path / f"second{len(options)}"
        shutil.copytree(first, second, ignore=shutil.ignore_patterns("cache", "tmp", "dvc.lock"))
        shutil.rmtree(second / "artifacts/verdict")
        assert run(second, "dvc", "pull", "--run-cache", "--allow-missing").returncode == 0
        assert ("Running stage 'gate'" in repro(second, *options)) == runs
