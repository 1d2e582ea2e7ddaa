"""Which part of a step counts as Python, on a model of a few layers."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest

from benchmarks.overhead import arguments, overhead, recorded_runs, run
from tapeout.errors import EvidenceError
from tests.exported import build_float, family_graph


def test_every_path_is_measured_and_the_session_class_is_restored(tmp_path: Path) -> None:
    build_float(family_graph("llama"), tmp_path / "bundle", slots=1)
    before = ort.InferenceSession.run_with_iobinding
    options = ["--batches", "1", "3", "--steps", "4", "--prompt-tokens", "6", "--threads", "1"]
    found = run(arguments([str(tmp_path / "bundle"), *options]))
    assert ort.InferenceSession.run_with_iobinding is before
    assert list(found) == ["batch 1", "batch 3", "generate"]
    assert all(0 < m.share < 1 and m.python_us < 1e3 * m.step_ms for m in found.values())


def test_a_step_lasts_from_the_end_of_one_run_to_the_end_of_the_next() -> None:
    found = overhead([(0.0, 1.0), (1.5, 2.0), (2.25, 3.0), (3.25, 4.0)])
    assert (found.step_ms, found.python_us, found.share) == (1000, 250_000, 0.25)


def test_an_engine_that_runs_no_session_is_no_evidence() -> None:
    with recorded_runs() as runs:
        pass
    with pytest.raises(EvidenceError, match="0 runs of the session"):
        overhead(runs)
