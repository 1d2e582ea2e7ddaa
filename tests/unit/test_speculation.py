"""Drafts are found as a search by hand finds them; responses with and without speculation are the same, to the bit."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import Entry
from runtime.engine import speculation
from runtime.engine.core import EngineCore
from runtime.engine.in_process import CoreAnswer, ModelledTime, answer_all
from runtime.engine.sampling import BatchSampler
from runtime.engine.scheduling.step_costs import StepCosts
from runtime.engine.speculation import (
    FIRST_PAUSE,
    MOST_DRAFTED,
    SIZES,
    Counts,
    Gate,
    PromptLookup,
    Speculation,
    accept,
)
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest, SamplingSettings, TokenLogprobs
from tests.fake_engine import HistoryEngine


def search(tokens: list[int], most: int) -> list[int]:
    """The same by hand, in quadratic time."""
    for size in SIZES:
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                out = list(tokens)
                for at in range(most):
                    out.append(out[start + at])
                return out[len(tokens) :]
    return []


@given(tokens=st.lists(st.integers(0, 3), max_size=40), cuts=st.lists(st.integers(0, 40)), most=st.integers(1, 9))
def test_drafts_are_those_of_a_search_by_hand(tokens: list[int], cuts: list[int], most: int) -> None:
    lookup = PromptLookup()
    for end in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        assert lookup.propose(tokens[:end], most) == search(tokens[:end], most)


def test_a_repeating_end_is_continued() -> None:
    assert PromptLookup().propose([9, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert PromptLookup().propose([7, 7, 7], 4) == [7, 7, 7, 7]
    assert PromptLookup().propose([1, 2, 3, 4], 4) == []
    assert PromptLookup().propose([], 4) == []


def test_a_long_prompt_is_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "INDEXED_AT_ONCE", 4)
    lookup, tokens = PromptLookup(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert [lookup.propose(tokens, 2) for _ in range(4)] == [[], [], [3, 4], [3, 4]]


def test_the_index_is_bounded_and_still_finds_recent_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "WINDOW", 50)
    lookup, tokens = PromptLookup(), list[int]()
    generator = random.Random(1)
    for step in range(600):
        tokens.append(generator.randrange(1000))
        lookup.propose(tokens, 3)
        follows = lookup._follows  # pyright: ignore[reportPrivateUsage]
        assert len(follows) <= 50 * len(SIZES), step
    assert lookup.propose(tokens + tokens[-20:-10], 3) == tokens[-10:-7]
    assert PromptLookup().propose(tokens[:100] + tokens[:10], 3) == []  # too long ago
    assert PromptLookup().propose(tokens * 2, 3) == []


@pytest.mark.parametrize(
    ("chosen", "drafts", "tokens"),
    [([4], [], [4]), ([4, 5], [4], [4, 5]), ([3, 5], [4], [3]), ([4, 6, 7], [4, 5], [4, 6])],
)
def test_tokens_are_accepted_up_to_the_first_other_one(chosen: list[int], drafts: list[int], tokens: list[int]) -> None:
    assert accept(chosen, drafts) == tokens


def costs_of(base: float, slope: float) -> StepCosts:
    costs = StepCosts()
    for decodes in range(1, 17):
        costs.observe(decodes, 0, 0, base + slope * decodes)
    costs.observe(1, 0, 1000, base + slope * 1001)
    return costs


def test_what_pays_follows_from_measured_steps() -> None:
    assert costs_of(0.02, 0.0).worth(8) == pytest.approx(0, abs=1e-3)  # bandwidth-bound: drafts are free
    assert costs_of(0.0, 0.01).worth(8) == pytest.approx(1)  # compute-bound: they cost as much as tokens
    assert costs_of(0.02, 0.002).worth(10) == pytest.approx(0.5)
    assert StepCosts().worth(3) == 0.5
    same = StepCosts()
    for _ in range(100):
        same.observe(4, 0, 0, 0.01)
    assert same.worth(3) == 0.5  # steps of one size say nothing of a token's cost


def test_a_gate_opens_with_acceptance_and_closes_without() -> None:
    gate = Gate(costs_of(0.02, 0.002))
    assert gate.length(10) == 1  # at first p is 2/3, and a token must be worth 1/2
    for _ in range(20):
        gate.observe(4, 4)
    assert gate.length(10) == MOST_DRAFTED
    for _ in range(60):
        gate.observe(4, 0)
    lengths = [gate.length(10) for _ in range(400)]
    tries = [at for at, length in enumerate(lengths) if length]
    assert set(lengths) == {0, 1} and tries[0] == FIRST_PAUSE
    assert [b - a for a, b in itertools.pairwise(tries)] == [33, 65, 129]  # ever longer pauses
    for _ in range(30):
        gate.observe(1, 1)
    assert gate.length(10) > 1


def test_a_gate_stays_closed_where_drafts_cost_as_much_as_tokens() -> None:
    gate = Gate(costs_of(0.0, 0.01))
    for _ in range(50):
        gate.observe(8, 8)
    assert gate.length(8) == 0


@dataclass
class Said:
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    steps: int
    counts: Counts


def decode(request: GenerateRequest, engine: HistoryEngine, *, most: int, wrong: bool = False) -> Said:
    """A response, drafting at most ``most`` tokens a step; ``wrong``: half of the drafts are noise."""
    vocab_size = engine.capabilities.vocab_size
    sampler, counts, noise = BatchSampler(vocab_size), Counts(), random.Random(5)
    sampler.add(request)
    speculation = Speculation(costs_of(1.0, 0.0), counts)
    tokens, logprobs, held, steps = list(request.prompt), list[TokenLogprobs](), 0, 0
    table = range(engine.capabilities.blocks)
    while len(tokens) - len(request.prompt) < request.max_new_tokens:
        left = request.max_new_tokens - (len(tokens) - len(request.prompt))
        drafts = speculation.draft(tokens, min(most, left - 1), 1)
        if wrong and most:
            drafts = [noise.randrange(vocab_size) if noise.random() < 0.5 else draft for draft in drafts]
        fed = tokens[held:] + drafts
        wanted = range(len(tokens) - held - 1, len(fed))
        (result,) = engine.step([Entry(fed, held, table, sampler.needs(request.id), wanted)])
        held, steps = len(tokens), steps + 1
        if result.logits is None:
            assert result.tokens is not None
            new = accept(result.tokens.tolist(), drafts)
        else:
            choices = sampler.choose_drafted({request.id: drafts}, {request.id: result.logits})[request.id]
            assert all(choice.error is None for choice in choices)
            new = [choice.token for choice in choices]
            logprobs += [choice.logprobs for choice in choices if choice.logprobs]
        speculation.observe(len(drafts), sum(a == b for a, b in zip(new, drafts, strict=False)))
        stop = next((at for at, token in enumerate(new) if token in request.stop_tokens), None)
        if stop is not None and len(tokens) + stop + 1 - len(request.prompt) >= request.min_new_tokens:
            tokens += new[: stop + 1]
            break
        tokens += new
    return Said(tokens[len(request.prompt) :], logprobs, steps, counts)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"min_new_tokens": 9},
    {"sampling": SamplingSettings(temperature=0.7, seed=3)},
    {"sampling": SamplingSettings(temperature=0.4, top_k=5, top_p=0.9, min_p=0.02, seed=9), "logprobs": 1},
    {
        "sampling": SamplingSettings(
            temperature=0.5, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2, seed=1
        )
    },
    {"sampling": SamplingSettings(frequency_penalty=0.5, logit_bias={3: 1.0})},
]


class LoopingEngine(HistoryEngine):
    """Logits depend on the last two tokens only, so responses repeat themselves and drafts are accepted."""

    def logits_after(self, tokens: Any) -> Any:
        return super().logits_after(tokens[-2:])


@given(
    seed=st.integers(0, 1000),
    fields=st.sampled_from(SETTINGS),
    most=st.integers(1, 8),
    wrong=st.booleans(),
    looping=st.booleans(),
)
def test_a_response_is_the_same_with_and_without_speculation(
    seed: int, fields: dict[str, Any], most: int, wrong: bool, looping: bool
) -> None:
    def engine() -> HistoryEngine:
        kind = LoopingEngine if looping else HistoryEngine
        return kind(12, slots=1, max_tokens=200, seed=seed, block_tokens=16)

    prompt = np.random.default_rng(seed).integers(0, 12, 20).tolist()
    request = GenerateRequest("a", prompt, 60, stop_tokens=frozenset({7}), **fields)
    plain, fast = decode(request, engine(), most=0), decode(request, engine(), most=most, wrong=wrong)
    assert fast.tokens == plain.tokens and fast.logprobs == plain.logprobs
    assert plain.counts == Counts() and plain.steps == len(plain.tokens)
    assert fast.steps + fast.counts.accepted >= len(fast.tokens)
    assert fast.counts.accepted <= fast.counts.drafted <= most * fast.counts.drafts


def answered(request: GenerateRequest, most: int, seed: int) -> tuple[CoreAnswer, int]:
    """By the core that serves, and how many drafted tokens were accepted."""
    timed = ModelledTime(LoopingEngine(12, slots=2, max_tokens=200, seed=seed, block_tokens=16))
    core = EngineCore(timed, Limits(max_draft_tokens=most), clock=timed.clock)
    (answer,) = answer_all(core, [request])
    return answer, core.stats().accepted_tokens


@pytest.mark.parametrize("fields", [*SETTINGS, {"min_new_tokens": 3}], ids=str)
def test_the_core_answers_the_same_with_and_without_speculation(fields: dict[str, Any]) -> None:
    """The prompt ends with what repeats. Each token of the answer ends it in turn, wherever in a draft that is."""
    accepted = 0
    for seed in range(4):
        start = np.random.default_rng(seed).integers(0, 12, 20).tolist()
        loop, _ = answered(GenerateRequest("a", start, 60), 0, seed)
        prompt = [*start, *loop.tokens]
        whole, _ = answered(GenerateRequest("a", prompt, 40, **fields), 0, seed)
        for stop in (None, *dict.fromkeys(whole.tokens)):
            stops = frozenset() if stop is None else frozenset({stop})
            request = GenerateRequest("a", prompt, 40, stop_tokens=stops, **fields)
            (plain, _), (fast, drafted) = answered(request, 0, seed), answered(request, 8, seed)
            assert (fast.tokens, fast.logprobs, fast.reason) == (plain.tokens, plain.logprobs, plain.reason)
            assert (plain.reason == "stop") == (stop is not None) or request.min_new_tokens
            accepted += drafted
    repeats = fields.get("sampling", SamplingSettings()).repetition_penalty == 1
    assert accepted > 20 or not repeats


def test_speculation_saves_steps_where_text_repeats() -> None:
    request = GenerateRequest("a", [1, 2, 3], 100, sampling=SamplingSettings(temperature=0.05, seed=1))
    said = decode(request, LoopingEngine(12, slots=1, max_tokens=200, block_tokens=16), most=8)
    assert len(said.tokens) == 100 and said.steps < 60
    assert said.counts.accepted == 100 - said.steps


def test_several_requests_are_verified_together() -> None:
    logits = np.random.default_rng(0).normal(0, 1, (3, 4, 10)).astype(np.float32)

    def sampler() -> BatchSampler:
        made = BatchSampler(10)
        for id in "abc":
            made.add(GenerateRequest(id, [1], 9, SamplingSettings(temperature=1.0, seed=ord(id))))
        return made

    alone = sampler()
    expected = {id: [alone.choose([id], logits[i][at : at + 1])[0] for at in range(4)] for i, id in enumerate("abc")}
    said = {id: [choice.token for choice in choices] for id, choices in expected.items()}
    drafts = {"a": said["a"][:3], "b": [(said["b"][0] + 1) % 10, 0, 0], "c": [said["c"][0], (said["c"][1] + 1) % 10]}
    together = sampler().choose_drafted(drafts, {id: logits[i][: 1 + len(drafts[id])] for i, id in enumerate("abc")})
    assert together == {"a": expected["a"], "b": expected["b"][:1], "c": expected["c"][:2]}


def test_choices_end_with_a_stop_token_or_an_error() -> None:
    logits = np.zeros((3, 10), np.float32)
    logits[:, 4] = 1
    stopping = BatchSampler(10)
    stopping.add(GenerateRequest("a", [1], 9, stop_tokens=frozenset({4}), logprobs=0))
    assert len(stopping.choose_drafted({"a": [4, 4]}, {"a": logits})["a"]) == 1
    logits[1, 0] = np.nan
    failing = BatchSampler(10)
    failing.add(GenerateRequest("a", [1], 9))
    good, bad = failing.choose_drafted({"a": [4, 4]}, {"a": logits})["a"]
    assert good.token == 4 and bad.error
