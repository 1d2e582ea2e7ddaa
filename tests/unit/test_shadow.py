from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.generation import Response, greedy
from evals.items import read_items
from evals.kinds.shadow import ShadowItem, ShadowSettings
from evals.shadow import first_divergence, shadow, shadow_items, shadow_metrics
from evals.text import compare
from tapeout.artifact import ArtifactRef
from tapeout.errors import EvidenceError
from tests.fake_engine import MACHINE, History

PROMPTS = st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=12), min_size=1, max_size=12)


def _alone(engine: History, prompt: list[int], limit: int, stops: set[int]) -> Response:
    """What greedy generation must give, token by token, without slots or batches."""
    tokens: list[int] = []
    while len(tokens) < limit:
        tokens.append(int(engine.engine.logits_after([*prompt, *tokens]).argmax()))
        if tokens[-1] in stops:
            return Response(tuple(tokens), True)
    return Response(tuple(tokens), False)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(0, 31), max_size=6),
    PROMPTS,
    st.integers(1, 5),
    st.integers(1, 12),
    st.sets(st.integers(0, 31), max_size=12),
)
def test_greedy_gives_every_prompt_its_own_answer(
    beginning: list[int], rests: list[list[int]], slots: int, limit: int, stops: set[int]
) -> None:
    engine, prompts = History(slots=slots), [beginning + rest for rest in rests]
    answers = greedy(engine, prompts, max_new_tokens=limit, stop_tokens=stops)
    assert answers == [_alone(engine, prompt, limit, stops) for prompt in prompts]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 10), st.integers(2, 12))
def test_greedy_keeps_its_slots_busy(slots: int, count: int, limit: int) -> None:
    """Without stops all answers run to the limit, so the number of decode steps is that of full waves."""
    engine = History(slots=slots)
    greedy(engine, [[i] for i in range(count)], max_new_tokens=limit, stop_tokens=[])
    steps = engine.engine.steps  # a prompt has one token, too, and is fed alone
    assert sum(len(fed) for fed in steps) == count + count * (limit - 1)
    assert len(steps) == count + -(-count // slots) * (limit - 1)


def test_what_all_prompts_begin_with_is_fed_once() -> None:
    engine = History(slots=2)
    greedy(engine, [[1, 2, 3], [1, 2, 4, 5], [1, 2, 3]], max_new_tokens=2, stop_tokens=[])
    prompts_and_steps = [fed for step in engine.engine.steps for fed in step]
    assert prompts_and_steps == [3, 2, 1, 1, 1, 1]


def test_finished_ends_a_response_early() -> None:
    engine = History()
    (answer,) = greedy(engine, [[3]], max_new_tokens=9, stop_tokens=[], finished=lambda tokens: len(tokens) == 4)
    assert len(answer.tokens) == 4 and answer.stopped


@pytest.mark.parametrize("prompt", [[], [1] * 60])
def test_prompts_that_do_not_fit_are_refused(prompt: list[int]) -> None:
    with pytest.raises(EvidenceError, match="prompt 1 has"):
        greedy(History(max_tokens=64), [[1], prompt], max_new_tokens=5, stop_tokens=[])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_first_divergence_is_where_the_common_prefix_ends(one: list[int], other: list[int]) -> None:
    index = first_divergence(one, other)
    if index is None:
        assert one == other
    else:
        assert one[:index] == other[:index] and one[index : index + 1] != other[index : index + 1]


def test_an_engine_shadowing_itself_agrees_everywhere() -> None:
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11]]
    items = shadow_items(History(), History(slots=2), prompts, max_new_tokens=8, stop_tokens=[0, 1, 2])
    assert [item.prompt_tokens for item in items] == [3, 1, 2, 4, 1]
    for item in items:
        assert item.exact_match and item.first_divergence is None
        assert item.agree == item.champion_tokens == item.candidate_tokens
        assert item.kl_sum == 0 and item.champion_stopped == item.candidate_stopped
    metrics = shadow_metrics(items)
    assert metrics["agreement"] == metrics["exact_match"] == metrics["length_ratio"] == 1
    assert "first_divergence_mean" not in metrics


def test_a_different_candidate_is_measured_on_the_champions_own_tokens() -> None:
    champion, candidate = History(), History(noise=0.5)
    prompts = [[i, i + 1] for i in range(12)]
    items = shadow_items(champion, candidate, prompts, max_new_tokens=10, stop_tokens=[])
    assert any(not item.exact_match for item in items)
    for prompt, item in zip(prompts, items, strict=True):
        answer = _alone(champion, prompt, 10, set())
        forced = compare(champion, candidate, [*prompt, *answer.tokens], first=2)
        assert item.champion_tokens == 10 == len(forced.agree)
        assert item.agree == int(forced.agree.sum()) and item.kl_sum == pytest.approx(forced.kl.sum())
        # Until the answers part, both engines read the same tokens: there they agree, and at the parting they do not.
        if item.first_divergence is None:
            assert item.agree == 10
        else:
            assert forced.agree[: item.first_divergence].all() and not forced.agree[item.first_divergence]


def test_shadow_without_prompts_is_refused() -> None:
    with pytest.raises(EvidenceError, match="no prompts"):
        shadow_items(History(), History(), [], max_new_tokens=4, stop_tokens=[])


def test_shadow_writes_the_same_artifact_twice(tmp_path: Path) -> None:
    one, two = (
        shadow(
            ShadowSettings(max_new_tokens=6),
            History(),
            History(noise=0.3),
            prompts=[[1, 2], [3]],
            stop_tokens=[0],
            champion_is_baseline=True,
            executed_on=MACHINE,
            folder=tmp_path / name,
            parents={"candidate": ArtifactRef("EngineBundle", "a")},
        )
        for name in ("one", "two")
    )
    assert one.digest == two.digest
    assert one.record.prompts == 2 and one.record.champion != one.record.candidate
    items = read_items(one.folder / "shadow_items.jsonl", ShadowItem)
    assert json.loads((one.folder / "metrics.json").read_text()) == shadow_metrics(items)
