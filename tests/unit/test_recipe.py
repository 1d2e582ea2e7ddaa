"""params.yaml is validated once, at the edge, and its mistakes are explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from evals.kinds.shadow import ShadowBounds, ShadowSettings
from evals.kinds.tasks import TaskBounds, TaskSettings
from evals.kinds.text import TextBounds
from pipeline.cli.main import main
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipes import shipped
from tapeout.errors import RecipeError
from tapeout.recipe import KVCache

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {"model": {"source": "file:/m"}, "data": {"source": "file:/d"}}


def recipe(tmp_path: Path, **sections: Any) -> Recipe:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | sections))
    return load_recipe(path)


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Dotted name of every parameter, with its value; the list of rules is one."""
    if not isinstance(value, dict):
        return {name: value}
    return {key: v for part, below in value.items() for key, v in leaves(below, f"{name}.{part}").items()}


def test_params_yaml_says_every_parameter_and_what_the_code_says(tmp_path: Path) -> None:
    """A recipe that leaves something out is the default recipe there; and DVC can compare only what is written."""
    shipped = load_recipe(ROOT / "params.yaml").model_dump(mode="json", by_alias=True)
    bare = recipe(tmp_path).model_dump(mode="json", by_alias=True)
    # Where they come from has no default.
    differing = {name for name, value in leaves(bare).items() if leaves(shipped)[name] != value}
    sources = {".model.source", ".model.sha256", ".data.source", ".data.sha256"}
    assert differing == sources
    assert leaves(yaml.safe_load((ROOT / "params.yaml").read_text())).keys() == leaves(shipped).keys()


def test_shipped_recipes_are_found_with_their_sentence() -> None:
    assert {"default", "auto", "w4-rtn", "starved"} <= shipped.names().keys()
    assert all(len(sentence) > 10 for sentence in shipped.names().values())


@pytest.mark.parametrize("name", shipped.names())
def test_a_shipped_recipe_is_valid_and_default_leads_back(name: str, tmp_path: Path) -> None:
    changed = tmp_path / "params.yaml"
    changed.write_text(shipped.overlay(name, ROOT / "params.yaml"))
    assert (load_recipe(changed) == load_recipe(ROOT / "params.yaml")) is (name == "default")
    changed.write_text(shipped.overlay("default", changed))
    assert load_recipe(changed) == load_recipe(ROOT / "params.yaml")


def test_written_recipes_keep_the_ends_of_lines(tmp_path: Path) -> None:
    """Else an editor of Windows and git would show every line as changed."""
    unix, windows = tmp_path / "unix.yaml", tmp_path / "windows.yaml"
    unix.write_bytes((ROOT / "params.yaml").read_bytes())
    windows.write_bytes(unix.read_bytes().replace(b"\n", b"\r\n"))
    for path in (unix, windows):
        assert main(["recipe", "w4-awq", "--write", "--params", str(path)]) == 0
    assert windows.read_bytes() == unix.read_bytes().replace(b"\n", b"\r\n")


@pytest.mark.parametrize("first", shipped.names())
def test_a_shipped_recipe_can_be_laid_over_any_other(first: str, tmp_path: Path) -> None:
    changed, then = tmp_path / "params.yaml", tmp_path / "then.yaml"
    changed.write_text(shipped.overlay(first, ROOT / "params.yaml"))
    for second in shipped.names():
        then.write_text(shipped.overlay(second, changed))
        load_recipe(then)


def test_defaults_fill_what_is_not_said(tmp_path: Path) -> None:
    found = recipe(tmp_path, quantize={"candidates": ["rtn"]})
    assert found.quantize.candidates == ("rtn",) and found.plan.kv_cache == KVCache(dtype="int8")
    assert found.register_.model_name == "tapeout-default"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"quantise": {}}, "unknown key 'quantise' (did you mean 'quantize'?)"),
        ({"registr": {}}, "unknown key 'registr' (did you mean 'register'?)"),
        ({"gate": {"max_KL": 0.1}}, "unknown key 'gate.max_KL' (did you mean 'max_kl'?)"),
        ({"plan": {"kv_cache": {"dtyp": "int8"}}}, "(did you mean 'dtype'?)"),
        ({"plan": {"schemes": [{"match": "*", "bits": 4, "activations": "int8"}]}}, "int8 needs bits: 8"),
        ({"plan": {"embeddings": {"bits": 8, "activations": "int8"}}}, "plan.embeddings: activations must be float"),
        ({"plan": {"schemes": [{"match": "*", "bits": 4, "positive_scales": True}]}}, "needs symmetric: true"),
        ({"plan": {"schemes": "fast"}}, "plan.schemes: Input should be 'auto' (found 'fast')"),
        ({"plan": {"workload": {1: 0.5, 16: 0.4}}}, "plan.workload: shares of all tokens sum to 1, found 0.9"),
        ({"plan": {"workload": {0: 1.0}}}, "plan.workload"),
        ({"plan": {"goal": "speed"}}, "plan.goal"),
        ({"plan": {"schemes": "auto", "goal": "throughput"}}, "of 32 streams at once, but build.slots is 16"),
        ({"plan": {"schemes": [{"match": "*", "bits": 8, "groupsize": 32}]}}, "(did you mean 'group_size'?)"),
        ({"build": {"zzz": 1}}, "valid keys: "),
        (
            {"plan": {"schemes": [{"match": "*", "bits": 3}]}},
            "plan.schemes.0.bits: expected one of 4, ",
        ),
        (
            {"plan": {"schemes": [{"mach": "*", "bits": 8}]}},
            "unknown key 'plan.schemes.0.mach' (did you mean 'match'?)",
        ),
        ({"plan": {"schemes": [{"match": "*", "bits": 8, "group_size": None}]}}, "group_size: 8 bits need one"),
        (
            {"quantize": {"candidates": ["rtn", "magic"]}},
            "quantize.candidates: no method magic; expected some of awq, ",
        ),
        ({"quantize": {"candidates": ["gptq"]}}, "quantize.candidates: rtn must be among them"),
        ({"calibrate": {"samples": 0}}, "calibrate.samples"),
        ({"gate": {"confidence": 1.5}}, "gate.confidence"),
        ({"gate": {"confidence": 0.51}}, "gate.confidence: Input should be greater than or equal to 0.9"),
        ({"gate": {"confidence": 0.99}}, "gate.min_repeats is 5, but a median is bounded at gate.confidence 0.99 by 7"),
        ({"gate": {"min_repeats": 3}}, "gate.min_repeats is 3, but a median is bounded at gate.confidence 0.95 by 5"),
        ({"model": {"source": "file:/m", "sha256": "abc"}}, "model.sha256"),
        ({"model": {}}, "model.source"),
        ({"build": {"target": "abacus"}}, "build.target: no target 'abacus'; expected one of cuda, ort-cpu, "),
        ({"calibrate": {"samples": 1}}, "calibrate.samples"),
        ({"plan": {"embeddings": {"match": "layers.*", "bits": 8}}}, "unknown key 'plan.embeddings.match'"),
        ({"plan": {"schemes": []}}, "plan.schemes: no rule; write auto"),
        ({"plan": {"embeddings": "8-bit"}}, "plan.embeddings: Input should be 'auto' (found '8-bit')"),
        ({"plan": {"kv_cache": "int8"}}, "plan.kv_cache: Input should be 'auto' (found 'int8')"),
        ({"plan": {"context": 0}}, "plan.context"),
        ({"plan": {"embeddings": {"bits": 8}}}, "plan.embeddings: symmetric must be true"),
        ({"plan": {"embeddings": {"format": "fp8-dynamic"}}}, "plan.embeddings: format must have groups"),
        ({"plan": {"embeddings": "auto", "kv_cache": "auto"}}, "plan: auto for embeddings and kv_cache, but schemes"),
        ({"plan": {"embeddings": "auto"}}, "plan: auto for embeddings, but schemes are written out"),
        ({"evaluate": {"tasks": []}}, "evaluate.tasks"),
        ({"benchmark": {"batches": [4, 4]}}, "benchmark.batches: contains duplicates: 4, 4"),
        ({"gate": {"max_kl": float("inf")}}, "gate.max_kl: Input should be a finite number"),
    ],
)
def test_mistakes_name_the_place_and_the_nearest_key(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, **sections)
    assert message in caught.value.found
    assert "docs/recipes.md" in caught.value.expected


def test_an_unknown_level_of_a_target_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"build\.target: no level 'sm99'; expected one of [a-z0-9, ]+\n"):
        recipe(tmp_path, build={"target": "cuda:sm99"})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"evaluate": {"documents": 8, "parity_documents": 9}}, "evaluate.parity_documents is 9 of 8 documents"),
        (
            {"plan": {"schemes": "auto", "samples": 17}},
            "plan.samples is 17 to measure on and as many others to check on",
        ),
        ({"build": {"slots": 15}}, "benchmark.batches reach 16, but build.slots is 15"),
        ({"export": {"max_positions": 255}}, "calibrate.tokens: 256 positions, but export.max_positions is 255"),
        ({"export": {"max_positions": 95}}, "evaluate.document_tokens: 96 positions"),
        ({"benchmark": {"new_tokens": 1918}}, "with 3 to warm up: 2049 positions, but export.max_positions is 2048"),
        (
            {"plan": {"schemes": "auto", "context": 2049}},
            "plan.context: 2049 positions, but export.max_positions is 2048",
        ),
        ({"shadow": {"max_new_tokens": 2048}}, "shadow.max_new_tokens, with a prompt of one: 2049 positions"),
    ],
)
def test_contradictions_are_found_before_anything_runs(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, **sections)
    assert message in caught.value.found


def test_what_just_fits_is_no_contradiction(tmp_path: Path) -> None:
    recipe(
        tmp_path,
        export={"max_positions": 256},
        benchmark={"prompt_tokens": 200, "new_tokens": 53},
        shadow={"max_new_tokens": 255},
        evaluate={"documents": 9, "parity_documents": 9},
        build={"slots": 16},
    )


def test_too_little_evidence_is_for_the_verdict_to_say(tmp_path: Path) -> None:
    starved = recipe(
        tmp_path,
        evaluate={"items": 10, "documents": 2, "parity_documents": 1},
        shadow={"prompts": 3},
        benchmark={"repeats": 1},
    )
    assert starved.section(TaskSettings).items < starved.section(TaskBounds).min_items
    assert starved.section(ShadowSettings).prompts < starved.section(ShadowBounds).min_shadow_prompts


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, quantise={}, calibrate={"samples": -1}, sed=3)
    assert all(word in caught.value.found for word in ("quantise", "calibrate.samples", "did you mean 'seed'"))


def test_a_recipe_does_not_change_after_validation(tmp_path: Path) -> None:
    found = recipe(tmp_path)
    with pytest.raises(ValidationError, match="frozen"):
        found.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        found.section(TextBounds).max_kl = 9.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n", "holds list"),
        (b"a: [", "is not YAML"),
        (b"a: \0", "is not YAML"),
        (b"", "is empty"),
        (b"# nothing but this\n", "is empty"),
        ("seed: 1 # größer\n".encode("latin-1"), "is not UTF-8: byte 0xf6 at offset 12"),
        (b"\xff\xfes\0e\0", "is not UTF-8: byte 0xff at offset 0"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path)
    assert caught.value.expected and caught.value.remedy


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is a folder") as caught:
        load_recipe(tmp_path)
    assert "--params" in caught.value.remedy


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no .*params") as caught:
        load_recipe(tmp_path / "params.yaml")
    assert "--params" in caught.value.remedy
