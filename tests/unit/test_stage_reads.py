"""The recorder of parameters sees each way of reading them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.recipe import Recipe
from pipeline.stages import wiring
from tests.stage_reads import leaves, recording

PARAMS = Path(__file__).parents[2] / "params.yaml"


def reads_of(stage: Callable[[Recipe], None], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setitem(wiring.STAGES, "fetch", stage)
    with recording() as reads:
        wiring.run("fetch", PARAMS)
    return reads


def test_a_value_and_a_section_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(recipe: Recipe) -> None:
        from evals.kinds.shadow import ShadowSettings
        from evals.kinds.text import TextBounds

        assert recipe.section(TextBounds).max_kl and recipe.plan.kv_cache.dtype and recipe.register_.model_name
        recipe.section(ShadowSettings).model_dump()

    shadow = {"shadow.prompts", "shadow.max_new_tokens", "shadow.datasets"}
    assert reads_of(stage, monkeypatch) == {"gate.max_kl", "plan.kv_cache", "register.model_name", *shadow}


def test_the_whole_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_of(lambda recipe: recipe.model_dump() and None, monkeypatch) == leaves()


def test_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_of(lambda recipe: None, monkeypatch) == set()
