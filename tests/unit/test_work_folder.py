"""Parts of an artifact outlive an interruption, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapeout.errors import ArtifactError, QuantizationError
from tapeout.work_folder import source_hash, work_folder


def interrupted(folder: Path, key: str, error: type[BaseException]) -> None:
    with pytest.raises(error), work_folder(folder, {"key": key}) as work:
        (work / "part").write_text(key)
        raise error("stop")


def parts(folder: Path, key: str) -> list[str]:
    with work_folder(folder, {"key": key}) as work:
        return [path.name for path in work.iterdir() if path.name == "part"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit, ArtifactError])
def test_an_interrupted_run_is_continued_once(tmp_path: Path, error: type[BaseException]) -> None:
    interrupted(tmp_path / "artifact", "a", error)
    assert parts(tmp_path / "artifact", "a") == ["part"]
    assert parts(tmp_path / "artifact", "a") == []
    assert not list(tmp_path.iterdir())


def test_other_work_and_an_error_of_ours_start_again(tmp_path: Path) -> None:
    interrupted(tmp_path / "artifact", "a", KeyboardInterrupt)
    assert parts(tmp_path / "artifact", "b") == []
    interrupted(tmp_path / "artifact", "a", QuantizationError)
    assert not list(tmp_path.iterdir())


def test_a_changed_program_has_another_hash(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = source_hash(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert source_hash(tmp_path) != before
