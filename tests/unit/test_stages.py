"""dvc.yaml and the code it calls agree: the same stages, artifacts that are made, parameters that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from engines.load import find_target
from pipeline.recipe import Recipe
from pipeline.stages.candidate import require_kept, require_recurrent
from pipeline.stages.inputs import stage_progress
from pipeline.stages.wiring import STAGES, run
from tapeout import progress
from tapeout.errors import BuildError, RecipeError
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
CODE = "artifacts/environment/code"
DVC: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())


def outputs(stage: dict[str, Any]) -> list[str]:
    """Paths of a stage's outputs; those with options are one-key mappings."""
    return [next(iter(out)) if isinstance(out, dict) else out for out in stage.get("outs", [])]


MADE = {path: name for name, stage in DVC["stages"].items() for path in outputs(stage)}


def test_dvc_names_exactly_the_stages_there_are_in_their_order() -> None:
    assert list(DVC["stages"]) == list(STAGES)
    for name, stage in DVC["stages"].items():
        assert stage["cmd"] == f"tapeout stage {name}" and stage["desc"]


@pytest.mark.parametrize("name", STAGES)
def test_what_a_stage_depends_on_is_there_or_made_by_an_earlier_one(name: str) -> None:
    order = list(STAGES)
    for path in DVC["stages"][name].get("deps", []):
        made_by = [stage for out, stage in MADE.items() if path == out or path.startswith(f"{out}/")]
        assert made_by, f"nothing makes {path}"
        assert order.index(made_by[0]) < order.index(name)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_its_own_code_unless_it_always_runs(name: str) -> None:
    stage = DVC["stages"][name]
    code = [path for path in stage.get("deps", []) if path.startswith(f"{CODE}/")]
    assert code == ([] if stage.get("always_changed") else [f"{CODE}/{name}.json"])


@pytest.mark.parametrize("name", STAGES)
def test_parameters_a_stage_reads_exist_in_the_recipe(name: str) -> None:
    for key in DVC["stages"][name].get("params", []):
        if key == {"params.yaml": None}:
            continue  # the whole file
        model: Any = Recipe
        for part in key.split("."):
            assert isinstance(model, type) and issubclass(model, BaseModel), f"{key} goes below a value"
            fields = {field.alias or field_name: field for field_name, field in model.model_fields.items()}
            assert part in fields, f"no parameter {key}"
            model = fields[part].annotation


def test_no_two_stages_make_the_same_file() -> None:
    paths = [path for stage in DVC["stages"].values() for path in outputs(stage)]
    assert len(paths) == len(set(paths))


def test_metrics_lie_in_what_stages_make() -> None:
    for path in DVC["metrics"]:
        assert str(Path(path).parent) in MADE


def test_what_takes_long_in_a_stage_is_named_by_stage_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "params.yaml").write_text("model: {source: 'file:x'}\ndata: {source: 'file:x'}\n")
    shown = [""]

    def said(text: str) -> bool:
        shown[0] += capsys.readouterr().err
        return text in shown[0]

    def slow(_: Recipe) -> None:
        wait_for(lambda: said("  gate, 00:00 gone\n"), seconds=60)
        stage_progress("gate")("judging")
        wait_for(lambda: said("  gate: judging, 00:00 gone\n"), seconds=60)

    monkeypatch.setattr(progress, "LOG_SECONDS", 0.02)
    monkeypatch.setitem(STAGES, "gate", slow)
    run("gate", tmp_path / "params.yaml")


def test_a_stage_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(RecipeError) as caught:
        run("compile", Path("params.yaml"))
    assert "export" in caught.value.expected and "'compile'" in caught.value.found


@pytest.mark.parametrize(
    ("plan", "target", "found"),
    [
        ({"kv_cache": {"dtype": "fp8"}}, "ort-cpu", "plan.kv_cache.dtype: fp8, which ort-cpu does not keep"),
        ({"kv_cache": {"dtype": "int4"}}, "cuda", "plan.kv_cache.dtype: int4, which cuda does not keep"),
        (
            {"schemes": "auto", "kv_cache": {"dtype": "fp8"}},
            "ort-cpu",
            "plan.kv_cache.dtype: fp8, which ort-cpu does not keep",
        ),
        ({"schemes": [{"match": "*", "format": "fp8"}]}, "ort-cpu", "linears in fp8, which ort-cpu does not compute"),
        ({"recurrent_state": "bfloat16"}, "cuda", "plan.recurrent_state: bfloat16, which cuda does not keep"),
    ],
)
def test_the_first_stage_refuses_what_the_target_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], target: str, found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = {"source": "file:/nowhere"}
    recipe = {"model": source, "data": source, "plan": plan, "build": {"target": target}}
    Path("params.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(BuildError) as refused:
        run("environment", Path("params.yaml"))
    assert found in refused.value.found
    assert not Path("artifacts").exists()


@pytest.mark.parametrize(("dtype", "target"), [("fp8", "cuda"), ("int4", "ort-cpu"), ("float32", "ort-cuda")])
def test_a_target_takes_the_caches_that_it_has(dtype: str, target: str) -> None:
    require_kept(find_target(target), dtype)


@pytest.mark.parametrize(("dtype", "target"), [("bfloat16", "ort-cpu"), ("auto", "cuda"), ("float32", "ort-cuda")])
def test_a_target_takes_the_recurrent_states_that_it_has(dtype: str, target: str) -> None:
    require_recurrent(find_target(target), dtype)
