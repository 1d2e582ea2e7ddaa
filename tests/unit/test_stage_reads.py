"""The recorder behind the comparison of dvc.yaml with what stages read sees each way of reading."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from pipeline.recipe import Recipe
from pipeline.stages import wiring
from tests.stage_reads import ROOT, Reads, code, leaves, recording


def reads_of(stage: Callable[[Recipe], None], monkeypatch: pytest.MonkeyPatch) -> Reads:
    monkeypatch.setitem(wiring.STAGES, "fetch", stage)
    with recording() as reads:
        wiring.run("fetch", ROOT / "params.yaml")
    return reads


def test_a_value_a_section_written_down_and_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(recipe: Recipe) -> None:
        from evals.kinds.shadow import ShadowSettings
        from evals.kinds.text import TextBounds
        from evals.shadow import first_divergence
        from pipeline.report import svg as svg

        first_divergence([], [])
        assert recipe.section(TextBounds).max_kl and recipe.plan.kv_cache.dtype and recipe.register_.model_name
        recipe.section(ShadowSettings).model_dump()

    reads = reads_of(stage, monkeypatch)
    shadow = {"shadow.prompts", "shadow.max_new_tokens", "shadow.datasets"}
    assert reads.parameters == {"gate.max_kl", "plan.kv_cache", "register.model_name", *shadow}
    assert {"evals.shadow", "pipeline.report.svg"} <= reads.modules


def test_the_whole_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_of(lambda recipe: recipe.model_dump() and None, monkeypatch).parameters == leaves()


def test_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_of(lambda recipe: None, monkeypatch).parameters == set()


def test_code_is_what_a_module_imports_but_for_types_of_artifacts_that_others_write() -> None:
    importlib.import_module("evals.shadow")  # so that its nouns are known
    measures = {"evals.shadow", "evals.generation", "evals.text", "evals.items", "tapeout.fingerprint"}
    assert code({"evals.shadow"}, None) == measures
    kind = {"evals.kinds.shadow", "evals.kind", "evals.block", "evals.check", "evals.rules"}
    assert code({"evals.shadow"}, "ShadowReport") == measures | kind
