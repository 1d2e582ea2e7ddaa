"""dvc.yaml and the code it calls agree: the same stages, files that are there, parameters that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from pipeline.stages.wiring import STAGES, run
from tapeout.errors import RecipeError
from tapeout.recipe import Recipe

ROOT = Path(__file__).parents[2]
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
        if path.startswith("artifacts/"):
            assert path in MADE, f"nothing makes {path}"
            assert order.index(MADE[path]) < order.index(name)
        else:
            assert (ROOT / path).exists(), f"{path} is not there"


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


@pytest.mark.parametrize(
    "stage", ["plan", "build-baseline", "build-candidate", "parity", "benchmark", "evaluate", "shadow"]
)
def test_a_change_of_any_target_makes_engines_stale(stage: str) -> None:
    """So a new target needs no change of dvc.yaml."""
    assert {"engines/target.py", "engines/targets"} <= set(DVC["stages"][stage]["deps"])


def test_no_two_stages_make_the_same_file() -> None:
    paths = [path for stage in DVC["stages"].values() for path in outputs(stage)]
    assert len(paths) == len(set(paths))


def test_metrics_lie_in_what_stages_make() -> None:
    for path in DVC["metrics"]:
        assert str(Path(path).parent) in MADE


def test_a_stage_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(RecipeError) as caught:
        run("compile", Path("params.yaml"))
    assert "export" in caught.value.expected and "'compile'" in caught.value.found
