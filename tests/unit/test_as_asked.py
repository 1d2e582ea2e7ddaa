"""Engines that were not made as the recipe in force asks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evals.as_asked import not_as_asked
from evals.evidence import LINEAGE
from pipeline.cli.main import main
from tapeout.artifact import load_header
from tapeout.errors import ExitCode
from tests.judged import edit_record, recipe, write_params, write_run

EIGHT = [{"match": "*", "bits": 8, "group_size": 64, "symmetric": True}]
PIN = "0" * 64


def found(artifacts: Path, **sections: Mapping[str, Any]) -> list[str]:
    headers = {name: load_header(artifacts / name) for name in LINEAGE}
    return list(not_as_asked(headers, recipe(**sections)))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "artifacts"
    write_run(folder)
    return folder


def test_a_run_is_as_its_recipe_asks(artifacts: Path) -> None:
    assert found(artifacts) == []


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"model": {"source": "file:other"}}, "the model's source file:model, not with file:other"),
        ({"model": {"source": "file:model", "sha256": PIN}}, f"the model's sha256 None, not with {PIN}"),
        ({"model": {"source": "file:model", "adapter": "file:lora"}}, "the adapter's source None, not with file:lora"),
        ({"data": {"source": "file:other"}}, "source was made with the data's source file:data, not with file:other"),
        ({"data": {"source": "file:data", "traffic": "file:log"}}, "the traffic's source None, not with file:log"),
        ({"export": {"max_positions": 512}}, "graph was made with export.max_positions 2048, not with 512"),
        ({"calibrate": {"tokens": 64}}, "calibration was made with calibrate.tokens 256, not with 64"),
        ({"calibrate": {"column": "question"}}, "made with calibrate.column passage, not with question"),
        ({"plan": {"schemes": EIGHT}}, "plan was made with plan.schemes [{'match': 'layers.*.gate_up', 'bits': 6"),
        ({"plan": {"schemes": "auto"}}, "not with auto"),
        ({"plan": {"kv_cache": {"dtype": "float32"}}}, "plan was made with plan.kv_cache {'dtype': 'int8'"),
        ({"quantize": {"candidates": ["rtn"]}}, "quantized was made with quantize.candidates ['scale_fit', 'gptq', "),
        ({"quantize": {"scale_grid": 4}}, "quantized was made with quantize.scale_grid 20, not with 4"),
        ({"build": {"slots": 8}}, "candidate was made with build.slots 4, not with 8"),
    ],
)  # fmt: skip
def test_a_parameter_that_was_changed_and_not_built(
    artifacts: Path, sections: dict[str, Mapping[str, Any]], complaint: str
) -> None:
    complaints = found(artifacts, **sections)
    assert any(complaint in one for one in complaints), complaints


def test_parameters_that_a_written_plan_does_not_read_may_change(artifacts: Path) -> None:
    assert found(artifacts, plan={"goal": "latency", "layers_per_group": 2, "samples": 3}) == []


def test_more_positions_than_the_model_has_are_not_asked_for(artifacts: Path) -> None:
    assert found(artifacts, export={"max_positions": 1 << 20}) == []


def test_credentials_of_a_url_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path)
    edit_record(tmp_path / "source", lambda body: body["record"].update(model_source="https://host/m.gguf"))
    assert found(tmp_path, model={"source": "https://me:secret@host/m.gguf?token=1"}) == []
    assert found(tmp_path, model={"source": "https://me:secret@host/other.gguf"})


@pytest.mark.parametrize(
    ("levels", "target", "as_asked"),
    [
        (["x86-64-avx2", "x86-64-avx512vnni"], "ort-cpu", True),
        (["x86-64-avx2", "x86-64-avx512vnni"], "ort-cpu:x86-64-avx2", False),
        (["x86-64-avx2"], "ort-cpu", False),
        (["x86-64-avx2"], "ort-cpu:x86-64-avx2", True),
        (["x86-64-avx512vnni"], "ort-cpu:x86-64-avx2", False),
        ([], "ort-cpu:x86-64-avx2", True),  # ONNX Runtime's operators alone
    ],
)
def test_levels_of_the_kernels(tmp_path: Path, levels: list[str], target: str, as_asked: bool) -> None:
    write_run(tmp_path)
    hardware = [{"level": level, "more_features": True} for level in levels] or [{"level": None}]
    for name in ("baseline", "candidate"):
        edit_record(tmp_path / name, lambda body: body["record"].update(hardware=hardware))
    assert (found(tmp_path, build={"target": target, "slots": 4}) == []) is as_asked


@pytest.mark.parametrize("name", ["source", "graph", "calibration", "plan", "quantized", "candidate"])
def test_a_record_that_does_not_say(tmp_path: Path, name: str) -> None:
    write_run(tmp_path)
    edit_record(tmp_path / name, lambda body: body["record"].clear())
    assert found(tmp_path)


def test_the_gate_refuses_a_plan_that_was_changed_and_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "artifacts")
    write_params(tmp_path / "params.yaml", recipe())
    assert main(["gate"]) == ExitCode.PASS
    write_params(tmp_path / "params.yaml", recipe(plan={"schemes": EIGHT}))
    assert main(["gate"]) == ExitCode.BROKEN
    assert main(["stage", "gate"]) == ExitCode.BROKEN
    assert "plan was made with plan.schemes" in capsys.readouterr().err
