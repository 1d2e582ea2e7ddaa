from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.protocol import Engine
from engines.sequences import Sequences
from evals.answers import greedy
from evals.items import read_items
from evals.kinds.shadow import ShadowItem, ShadowSettings
from evals.kinds.shadow.measure import Lockstep, first_divergence, shadow, shadow_items, shadow_metrics
from evals.text import compare
from pipeline.stages.answering import CoreAnswerer
from runtime.wire.limits import Limits
from tapeout.artifact import ArtifactRef
from tapeout.errors import EvidenceError
from tests.chain_engine import ChainEngine
from tests.fake_engine import MACHINE, HistoryEngine

PROMPTS = st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=12), min_size=1, max_size=12)


def core(engine: Engine) -> CoreAnswerer:
    return CoreAnswerer(engine, Limits())


def _alone(engine: HistoryEngine, prompt: list[int], limit: int, stops: set[int]) -> tuple[tuple[int, ...], bool]:
    """What greedy generation must give, token by token, without blocks or batches; and whether it stopped."""
    tokens: list[int] = []
    while len(tokens) < limit:
        tokens.append(int(engine.logits_after([*prompt, *tokens]).argmax()))
        if tokens[-1] in stops:
            return tuple(tokens), True
    return tuple(tokens), False


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(0, 31), max_size=6),
    PROMPTS,
    st.integers(1, 5),
    st.sampled_from([0, 1, 4, 7]),
    st.integers(1, 12),
    st.sets(st.integers(0, 31), max_size=12),
)
def test_greedy_gives_every_prompt_its_own_answer(
    beginning: list[int], rests: list[list[int]], slots: int, block_tokens: int, limit: int, stops: set[int]
) -> None:
    engine, prompts = HistoryEngine(slots=slots, block_tokens=block_tokens), [beginning + rest for rest in rests]
    answers = greedy(core(engine), prompts, max_new_tokens=limit, stop_tokens=stops)
    expected = [_alone(engine, prompt, limit, stops) for prompt in prompts]
    assert [(answer.tokens, answer.stopped) for answer in answers] == expected


def test_more_prompts_than_the_queue_has_room_for() -> None:
    engine = HistoryEngine(slots=2, block_tokens=4)
    prompts = [[1 + i % 7, i % 5] for i in range(9)]
    answers = greedy(
        CoreAnswerer(engine, Limits(max_waiting=2, max_waiting_tokens=4)), prompts, max_new_tokens=3, stop_tokens=[]
    )
    assert [answer.tokens for answer in answers] == [_alone(engine, prompt, 3, set())[0] for prompt in prompts]


def test_a_client_that_has_read_enough_leaves() -> None:
    prompts = [[3], [5]]
    one, other = greedy(
        core(HistoryEngine()), prompts, max_new_tokens=9, stop_tokens=[], leaves=lambda tokens: len(tokens) >= 4
    )
    assert one.ending == other.ending == "cancelled" and one.stopped
    assert 4 <= len(one.tokens) < 9


@pytest.mark.parametrize("prompt", [[], [1] * 60])
def test_prompts_that_do_not_fit_are_refused(prompt: list[int]) -> None:
    with pytest.raises(EvidenceError, match="prompt 1 has"):
        greedy(core(HistoryEngine(max_tokens=64)), [[1], prompt], max_new_tokens=5, stop_tokens=[])


def test_a_prompt_that_the_engine_cannot_answer_is_refused() -> None:
    with pytest.raises(EvidenceError, match="prompt 1 was not answered: token 32 in the prompt"):
        greedy(core(HistoryEngine()), [[1], [32]], max_new_tokens=5, stop_tokens=[])


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
    items = shadow_items(
        HistoryEngine(), HistoryEngine(slots=2), core, prompts, max_new_tokens=8, stop_tokens=[0, 1, 2]
    )
    assert [item.prompt_tokens for item in items] == [3, 1, 2, 4, 1]
    for item in items:
        assert item.exact_match and item.first_divergence is None
        assert item.agree == item.champion_tokens == item.candidate_tokens
        assert item.kl_sum == 0 and item.champion_stopped == item.candidate_stopped
    metrics = shadow_metrics(items)
    assert metrics["agreement"] == metrics["exact_match"] == metrics["length_ratio"] == 1
    assert "first_divergence_mean" not in metrics


@pytest.mark.parametrize(("size", "other"), [(0, 0), (4, 4), (4, 7), (4, 0), (0, 4)])
def test_a_different_candidate_is_measured_on_the_champions_own_tokens(size: int, other: int) -> None:
    """Whether blocks are whole sequences, parts of them, or of another size in each engine."""
    champion, candidate = HistoryEngine(block_tokens=size), HistoryEngine(block_tokens=other, noise=0.5)
    prompts = [[i, i + 1] for i in range(12)]
    items = shadow_items(champion, candidate, core, prompts, max_new_tokens=10, stop_tokens=[])
    assert any(not item.exact_match for item in items)
    for prompt, item in zip(prompts, items, strict=True):
        answer, _ = _alone(champion, prompt, 10, set())
        forced = compare(Sequences(champion), Sequences(candidate), [*prompt, *answer], first=2)
        assert item.champion_tokens == 10 == len(forced.agree)
        assert item.agree == int(forced.agree.sum()) and item.kl_sum == pytest.approx(forced.kl.sum())
        # Until the answers part, both engines read the same tokens: there they agree, and at the parting they do not.
        if item.first_divergence is None:
            assert item.agree == 10
        else:
            assert forced.agree[: item.first_divergence].all() and not forced.agree[item.first_divergence]


@pytest.mark.parametrize(("slots", "other"), [(6, 8), (6, 0), (0, 6)])
def test_engines_are_compared_with_recurrent_state_in_both_or_one(slots: int, other: int) -> None:
    champion, candidate = ChainEngine(blocks=40, slots=slots), ChainEngine(blocks=40, slots=other)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, number] for number in range(9)]
    items = shadow_items(champion, candidate, core, prompts, max_new_tokens=6, stop_tokens=[])
    assert all(item.exact_match and item.agree == 6 and not item.kl_sum for item in items)


def test_an_answer_to_other_tokens_than_the_prompts_is_refused() -> None:
    """As it would be where a block of one sequence is given to another."""

    lockstep = Lockstep(HistoryEngine(block_tokens=4), HistoryEngine(block_tokens=4))
    (answer,) = greedy(core(lockstep), [[1, 2, 3]], max_new_tokens=4, stop_tokens=[])
    assert len(lockstep.forced([1, 2, 3], answer.tokens).kl) == 4
    with pytest.raises(EvidenceError, match=r"token 0 of the answer to prompt .* was not chosen after"):
        lockstep.forced([1, 2, 4], answer.tokens)


def test_shadow_without_prompts_is_refused() -> None:
    with pytest.raises(EvidenceError, match="no prompts"):
        shadow_items(HistoryEngine(), HistoryEngine(), core, [], max_new_tokens=4, stop_tokens=[])


def test_shadow_writes_the_same_artifact_twice(tmp_path: Path) -> None:
    one, two = (
        shadow(
            ShadowSettings(max_new_tokens=6),
            HistoryEngine(),
            HistoryEngine(noise=0.3),
            core,
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
