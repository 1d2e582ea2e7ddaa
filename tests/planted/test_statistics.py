"""Defects that the statistics of the gate must find: each is planted into the evidence of a real run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.gate.evidence import Run, speed_sample, task_items
from benchmarks.gate.whole import good_evidence
from evals.check import Outcome
from evals.gate import judge
from evals.kind import Bounds, Evidence
from evals.verdict import Verdict
from pipeline.recipe import load_recipe
from tapeout.errors import EvidenceError, RecipeError

ROOT = Path(__file__).parents[2]
RUN = Run.kept()
BOUNDS = load_recipe(ROOT / "params.yaml").section(Bounds)


def evidence() -> Evidence:
    return good_evidence(np.random.default_rng(3), RUN)


def planted(kind: str, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Evidence:
    """The evidence of a good engine with other items of one kind; the report claims as many as there are."""
    whole = evidence()
    report = whole.reports[kind]
    items = change(report.items)
    counts: dict[str, Any] = {"text": {"documents": len(items)}, "parity": {"documents": len(items)}}
    if kind == "tasks":
        names = [item.task for item in items]
        counts["tasks"] = {"tasks": {name: names.count(name) for name in names}}
    counts["shadow"] = {"prompts": len(items)}
    record = report.record.model_copy(update=counts.get(kind, {}))
    return replace(whole, reports={**whole.reports, kind: replace(report, record=record, items=items)})


def verdict(kind: str, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Verdict:
    return judge(planted(kind, change), BOUNDS)


def changed(items: tuple[Any, ...], numbers: range, **fields: Any) -> tuple[Any, ...]:
    return tuple(item.model_copy(update=fields) if i in numbers else item for i, item in enumerate(items))


def test_bad_documents_too_rare_to_be_in_the_sample() -> None:
    """One document in a hundred has 50 times the KL: the mean is on the bound, the sample holds none of them."""

    def without_the_bad_ones(items: tuple[Any, ...]) -> tuple[Any, ...]:
        mean = sum(item.kl_sum / item.tokens for item in items) / len(items)
        factor = BOUNDS.model_dump()["max_kl"] / 1.49 / mean
        return tuple(
            item.model_copy(update={"kl_sum": item.kl_sum * factor, "ranges": (item.ranges[0] * factor,)})
            for item in items
        )

    check = verdict("text", without_the_bad_ones).check("kl")
    assert check.outcome is Outcome.INCONCLUSIVE
    assert check.value is not None and check.value < 0.7 * 0.03


def test_a_hundredth_of_the_documents_is_garbage() -> None:
    def garbage(items: tuple[Any, ...]) -> tuple[Any, ...]:
        bad = [
            item.model_copy(
                update={
                    "kl_sum": 5.0 * item.tokens + i,
                    "kl_max": 12.0,
                    "agree": 0,
                    "ranges": (5.0 + i / item.tokens,),
                }
            )
            for i, item in enumerate(items[:3])
        ]
        return (*bad, *items[3:])

    found = verdict("text", garbage)
    assert found.outcome is not Outcome.PASS and found.check("kl").outcome is not Outcome.PASS


def test_one_document_is_so_bad_that_it_moves_the_mean() -> None:
    terrible: dict[str, Any] = {"kl_max": 40.0, "ranges": (30.0,)}
    found = verdict("text", lambda items: changed(items, range(1), kl_sum=30.0 * items[0].tokens, **terrible))
    assert found.check("kl").outcome is Outcome.INCONCLUSIVE and found.check("document_kl").outcome is Outcome.FAIL


@pytest.mark.parametrize("task", sorted(RUN.tasks))
def test_one_task_loses_13_points(task: str) -> None:
    def lost(_: tuple[Any, ...]) -> tuple[Any, ...]:
        tables = {name: [right - a, a, b, n - right - b] for name, (n, right, a, b) in RUN.tasks.items()}
        n, right, gained = (RUN.tasks[task][i] for i in (0, 1, 3))
        tables[task] = [right - gained - round(0.13 * n), gained + round(0.13 * n), gained, n - right - gained]
        return task_items(tables)

    found = verdict("tasks", lost)
    assert found.outcome is Outcome.FAIL
    check = found.check("accuracy_worst_task")
    assert check.outcome is Outcome.FAIL and check.reason.startswith(f"{task}: ")


def test_right_answers_copied_under_new_numbers() -> None:
    def copies(items: tuple[Any, ...]) -> tuple[Any, ...]:
        right = [item for item in items if item.baseline_score and item.candidate_score][:500]
        return (*items, *(item.model_copy(update={"doc_id": 10**6 + i}) for i, item in enumerate(right)))

    with pytest.raises(EvidenceError, match=r"500 of 3000 task items are copies, with the same document"):
        verdict("tasks", copies)


def test_right_answers_copied_under_new_numbers_and_hashes() -> None:
    def copies(items: tuple[Any, ...]) -> tuple[Any, ...]:
        right = [item for item in items if item.baseline_score and item.candidate_score][:500]
        new = [
            item.model_copy(update={"doc_id": 10**6 + i, "doc_hash": f"a{i}", "prompt_hash": f"b{i}"})
            for i, item in enumerate(right)
        ]
        return (*items, *new)

    with pytest.raises(EvidenceError, match=r"500 of 3000 task items are copies, with the same log-likelihoods"):
        verdict("tasks", copies)


@pytest.mark.parametrize(("kind", "name"), [("text", "doc_hash"), ("shadow", "prompt_hash"), ("parity", "doc_hash")])
def test_good_documents_copied_under_new_hashes(kind: str, name: str) -> None:
    def copies(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*items, *(item.model_copy(update={name: f"new {i}"}) for i, item in enumerate(items[:20])))

    with pytest.raises(EvidenceError, match=rf"20 of \d+ {kind} items are copies, with the same numbers"):
        verdict(kind, copies)


def test_three_fast_repeats() -> None:
    def three(samples: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(speed_sample(sample.phase, sample.batch, [3.0] * 3) for sample in samples)

    found = verdict("speed", three)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.check("decode_speed_b1").reason == "3 of at least 5 repeats: 2 more needed"


def test_few_documents_that_happen_to_be_equal() -> None:
    """No spread, just below the bound: an interval of no width would pass."""

    def equal(items: tuple[Any, ...]) -> tuple[Any, ...]:
        values = [0.0009 * item.tokens * (1 + 1e-9 * i) for i, item in enumerate(items[:30])]
        return tuple(item.model_copy(update={"kl_sum": v}) for item, v in zip(items, values, strict=False))

    assert verdict("parity", equal).check("parity_kl").outcome is Outcome.INCONCLUSIVE


def recipe(tmp_path: Path, **gate: float) -> Path:
    path = tmp_path / "params.yaml"
    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    path.write_text(yaml.safe_dump(content | {"gate": content["gate"] | gate}))
    return path


def test_a_level_at_which_a_coin_decides(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"gate.confidence: Input should be greater than or equal to 0.9"):
        load_recipe(recipe(tmp_path, confidence=0.51))


def test_repeats_that_cannot_reach_the_level(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"gate.min_repeats is 3, but a median is bounded .* by 5 repeats"):
        load_recipe(recipe(tmp_path, min_repeats=3))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy_margin", 1.0),
        ("task_margin", 1.0),
        ("max_flips", 1.0),
        ("max_kl", 1e9),
        ("min_top_token", 0.0),
        ("max_perplexity_ratio", 100.0),
        ("max_shadow_kl", 1e9),
        ("min_shadow_agreement", 0.0),
        ("max_parity_kl", 1e9),
        ("min_parity_top_token", 0.0),
        ("max_parity_error", 1e9),
    ],
)
def test_a_bound_that_no_engine_can_miss(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(RecipeError, match=f"gate.{name}: Input should be"):
        load_recipe(recipe(tmp_path, **{name: value}))
