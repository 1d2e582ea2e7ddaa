"""The benchmark of sampling runs every case; what it measures is not asserted."""

from __future__ import annotations

import pytest

from benchmarks.sampling import CASES, arguments, constraint_times, run
from tests.unit.test_constraints import V, tokenizer


def test_every_case_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = arguments(["--vocab-size", "300", "--rounds", "2", "--entries", "1", "3", "--step-ms", "1e6"])
    assert run(options) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in CASES:
        assert len([line for line in lines if line.startswith(f"| {name} |") and "numpy" in line]) == 2


def test_masks_of_a_schema_are_timed(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer().to_str())
    assert set(constraint_times(path, V)) == {"compile", "mask, mean", "mask, largest"}
