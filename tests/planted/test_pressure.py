"""Defects of the core that serves, found by the answers that it gives while it has too few blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer

from engines.protocol import Engine, Entry, Finish, FloatArray, Result
from engines.sequences import Sequences
from evals.check import Outcome
from evals.kinds.serving import (
    AHEAD,
    PRESSED,
    TURNS,
    Pressed,
    Pressure,
    ServingBounds,
    ServingSettings,
    pressure_check,
    pressure_problems,
)
from evals.kinds.serving.pressure import under_pressure
from evals.kinds.serving.served_log import Streams
from pipeline.stages.answering import CoreAnswerer
from runtime.constraints.compiler import ConstraintCompiler, Matcher
from runtime.engine import core, sampling
from runtime.engine.cache import sequences
from runtime.engine.cache.blocks import BlockPool
from runtime.engine.cache.paged import PagedState
from runtime.engine.cache.sequences import SequenceCache
from runtime.engine.core import EngineCore
from runtime.engine.sampling import BatchSampler
from runtime.engine.scheduling.step_planner import StepPlanner
from runtime.wire.block_keys import block_keys
from runtime.wire.limits import Limits
from runtime.wire.messages import SamplingSettings
from tests.corpora import bytes_tokenizer
from tests.fake_engine import HistoryEngine

END = 256  # behind the tokens of all bytes
V = END + 1
TEXT = [number * number * 7 % 251 for number in range(4001)]


@cache
def tokenizer() -> Tokenizer:
    made: Any = Tokenizer.from_str(bytes_tokenizer().to_str())
    made.add_special_tokens(["<end>"])
    return made


def decode(tokens: Sequence[int]) -> str:
    return tokenizer().decode(list(tokens))


class StateEngine(HistoryEngine):
    """Holds in a block what depends on all tokens before, as keys and values do, and gives logits by all of it."""

    def logits_after(self, tokens: Sequence[int]) -> FloatArray:
        return self.table[sum(place * held for place, held in enumerate(tokens, 1)) % self.STATES]

    def _feed(self, entry: Entry) -> Result:
        size, at = self.capabilities.block_tokens, entry.start
        before = self.held[entry.blocks[(at - 1) // size]][(at - 1) % size] if at else 1
        states = list[int]()
        for token in entry.tokens:
            before = ((before or 0) * 31 + token + 1) % self.STATES
            states.append(before)
        return super()._feed(entry._replace(tokens=states))


class AheadEngine(StateEngine):
    """Takes two steps at once, and computes each when its end is waited for, as late as a device may."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.capabilities = replace(self.capabilities, steps_at_once=2)
        self.before: list[Result] = []

    def begin(self, batch: Sequence[Entry]) -> Finish:
        fed = [entry._replace(tokens=tuple(entry.tokens), blocks=tuple(entry.blocks)) for entry in batch]

        def finish() -> list[Result]:
            chosen = [None if one.tokens is None else one.tokens[-1:].tolist() for one in self.before]
            told = [one if one.follows is None else one._replace(tokens=chosen[one.follows] or []) for one in fed]
            self.before = self.step([one._replace(follows=None) for one in told])
            return self.before

        return finish


def answerer(engine: Engine, *, blocks: int | None = None) -> CoreAnswerer:
    compiler = ConstraintCompiler(tokenizer().to_str(), V, [END])
    return CoreAnswerer(engine, Limits(), blocks=blocks, sampler=BatchSampler(V, compiler), constrains=True)


def answers(shares_blocks: bool = True, kind: type[StateEngine] = StateEngine) -> Pressure:
    engine = kind(V, slots=16, max_tokens=128, block_tokens=16 if shares_blocks else 0)
    for block in engine.held:  # so that a wrong read gives wrong tokens, not a failure of the engine
        block[:] = [0] * len(block)

    return under_pressure(Sequences(engine), answerer, decode, Streams(TEXT), ServingSettings(), [END])


def failed(found: Pressure) -> set[str]:
    """Settings with wrong tokens; what the check says must agree."""
    bounds = ServingBounds()
    wrong = {one.settings for one in found.answers if one.wrong > bounds.max_wrong_answers * one.tokens}
    outcome = pressure_check(found, bounds).outcome
    assert outcome is (Outcome.FAIL if wrong else Outcome.PASS)
    return wrong


@pytest.mark.parametrize("shares_blocks", [True, False])
def test_a_sound_core_answers_rightly_under_pressure(shares_blocks: bool) -> None:
    pressure = answers(shares_blocks)
    found: dict[str, Pressed] = {one.settings: one for one in pressure.answers}
    assert not failed(pressure) and pressure_problems("report", pressure) == []
    assert found.keys() == {*PRESSED, *([TURNS] if shares_blocks else [])} and not any(
        one.wrong or one.gap for one in found.values()
    )
    assert pressure.scarce == pressure.shares == shares_blocks
    if shares_blocks:
        assert all(one.cached for one in found.values())
        assert found["penalties"].preempted and found["draws"].preempted, "else a bad resumption would not show"
        assert found["drafts"].accepted


def test_a_sound_core_begins_steps_ahead_of_greedy_requests_alone() -> None:
    pressure = answers(kind=AheadEngine)
    assert not failed(pressure) and pressure_problems("report", pressure) == []
    found = {one.settings: one for one in pressure.answers}
    assert found.keys() == {*PRESSED, TURNS, AHEAD} and not any(one.wrong or one.gap for one in found.values())
    assert pressure.steps_at_once == 2 and pressure.steps_ahead > 20


def test_a_step_ahead_that_follows_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EngineCore._entry

    def of_the_first(self: EngineCore, work: Any, follows: int | None) -> Entry:
        return entry(self, work, None if follows is None else 0)

    monkeypatch.setattr(EngineCore, "_entry", of_the_first)
    assert AHEAD in failed(answers(kind=AheadEngine))
    assert not failed(answers())


def test_greedy_requests_that_wait_for_each_token_are_no_evidence_of_steps_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EngineCore, "_runs_ahead", lambda *_: False)
    assert (
        "has no step that began before the one before had ended"
        in pressure_problems("report", answers(kind=AheadEngine))[0]
    )


def test_a_prefix_hit_that_skips_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = StepPlanner._feed_prompt

    def skip(self: StepPlanner, sequence: Any, *rest: Any) -> Any:
        if sequence.cached and sequence.fed == sequence.cached < len(sequence.tokens) - 1:
            sequence.fed += 1
        return feed(self, sequence, *rest)

    monkeypatch.setattr(StepPlanner, "_feed_prompt", skip)
    assert {"greedy", "penalties", "logprobs"} <= failed(answers())


def test_a_block_that_is_freed_while_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def hold(self: BlockPool, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._cached.pop(block, None)
            self._holders[block] = 1  # however many hold it already

    def release_once(self: BlockPool, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if self._holders[block]:
                release(self, [block])

    monkeypatch.setattr(BlockPool, "hold", hold)
    monkeypatch.setattr(BlockPool, "release", release_once)
    assert failed(answers())


def test_a_block_that_is_found_by_its_own_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(
        tokens: Sequence[int], block_tokens: int, cache_salt: bytes = b"", known: Sequence[bytes] = ()
    ) -> list[bytes]:
        whole = len(tokens) // block_tokens * block_tokens
        starts = range(0, whole, block_tokens)
        return [block_keys(tokens[start : start + block_tokens], block_tokens, cache_salt)[0] for start in starts]

    monkeypatch.setattr(sequences, "block_keys", keys)
    assert failed(answers())


def _forget(forget: Callable[[Any], None]) -> Callable[[EngineCore, float], Any]:
    """A step of the core in which ``forget`` gets the sampler's state of each request that is preempted."""
    step = EngineCore.step

    def with_loss(self: EngineCore, now: float) -> Any:
        report = step(self, now)
        for id in self.scheduler.preempted:
            forget(self._sampler._states[id])
        return report

    return with_loss


def test_a_resumed_request_with_wrong_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(state: Any) -> None:
        if state.request.sampling.frequency_penalty:
            state.changes._counts.clear()
            state.changes._adjustments.shift[:] = 0

    monkeypatch.setattr(EngineCore, "step", _forget(forget))
    assert "penalties" in failed(answers())


def test_a_resumed_request_that_draws_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(state: Any) -> None:
        if state.filters.scale:
            state.position = 0

    monkeypatch.setattr(EngineCore, "step", _forget(forget))
    assert "draws" in failed(answers())


def test_a_draft_that_is_accepted_though_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose_all(self: BatchSampler, drafts: Any, logits: Any) -> Any:
        choices: dict[str, list[Any]] = {id: [] for id in drafts}
        for at in range(1 + max(map(len, drafts.values()))):
            going = [id for id, guesses in drafts.items() if at <= len(guesses)]
            for id, choice in zip(going, self.choose(going, [logits[id][at] for id in going]), strict=True):
                choices[id].append(choice)
        return choices

    monkeypatch.setattr(BatchSampler, "choose_drafted", choose_all)
    assert "drafts" in failed(answers())


def test_a_mask_that_allows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = Matcher.mask

    def all_bits(self: Matcher, stop_tokens: Any) -> Any:
        found = mask(self, stop_tokens).copy()
        found[:] = -1 if found.dtype.kind == "i" else ~found.dtype.type(0)
        return found

    monkeypatch.setattr(Matcher, "mask", all_bits)
    assert failed(answers()) == {"choices"}


def test_log_probabilities_of_the_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = BatchSampler.choose

    def shifted(self: BatchSampler, ids: Sequence[str], logits: Any) -> Any:
        return [
            choice
            if choice.logprobs is None
            else choice._replace(logprobs=choice.logprobs._replace(logprob=choice.logprobs.logprob - 1))
            for choice in choose(self, ids, logits)
        ]

    monkeypatch.setattr(BatchSampler, "choose", shifted)
    assert "logprobs" in failed(answers())


@pytest.mark.parametrize("lost", ["top_k", "top_p", "min_p", "temperature"])
def test_a_setting_that_is_not_drawn_with(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """Where the library and numpy agree, since both are told so."""
    filters_of, plain = sampling.filters_of, SamplingSettings()

    def without(settings: SamplingSettings) -> Any:
        value = 1.0 if lost == "temperature" and settings.temperature else getattr(plain, lost)
        return filters_of(replace(settings, **{lost: value}))

    monkeypatch.setattr(sampling, "filters_of", without)
    assert "draws" in failed(answers())


def test_a_least_length_that_is_lost_with_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(state: Any) -> None:
        if state.changes is not None:
            state.changes._min_new_tokens = 0

    monkeypatch.setattr(EngineCore, "step", _forget(forget))
    assert failed(answers()) == {"least_length"}


def test_a_least_length_that_is_one_token_short(monkeypatch: pytest.MonkeyPatch) -> None:
    at = sampling._Changes.at
    monkeypatch.setattr(sampling._Changes, "at", lambda self, position, *rest: at(self, position + 1, *rest))
    assert failed(answers()) == {"least_length"}


def _choose_behind_drafts(change: Callable[[BatchSampler, Sequence[str], int], Any]) -> Callable[..., Any]:
    """:meth:`BatchSampler.choose_drafted`, with a change of the sampler before each choice; what it gives is called
    behind it.
    """

    def choose_drafted(self: BatchSampler, drafts: Any, logits: Any) -> Any:
        choices: dict[str, list[Any]] = {id: [] for id in drafts}
        going, at = list(drafts), 0
        while going:
            undo = change(self, going, at)
            found = self.choose(going, [logits[id][at] for id in going])
            undo()
            for id, choice in zip(going, found, strict=True):
                choices[id].append(choice)
            going = [id for id in going if at < len(drafts[id]) and choices[id][at].token == drafts[id][at]]
            at += 1
        return choices

    return choose_drafted


def test_accepted_drafts_that_count_for_no_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    count, ignored = sampling._Changes.count, [False]

    def unless_drafted(self: Any, token: int) -> None:
        if not ignored[0]:
            count(self, token)

    def change(sampler: BatchSampler, ids: Sequence[str], at: int) -> Any:
        ignored[0] = at > 0
        return lambda: ignored.__setitem__(0, False)

    monkeypatch.setattr(sampling._Changes, "count", unless_drafted)
    monkeypatch.setattr(BatchSampler, "choose_drafted", _choose_behind_drafts(change))
    assert {"penalties", TURNS} & failed(answers())


def test_tokens_behind_drafts_that_are_drawn_with_the_first_ones_random_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(sampler: BatchSampler, ids: Sequence[str], at: int) -> Any:
        states = [sampler._states[id] for id in ids]

        def move(by: int) -> None:
            for state in states:
                state.position += by

        move(-at)
        return lambda: move(at)

    monkeypatch.setattr(BatchSampler, "choose_drafted", _choose_behind_drafts(change))
    assert {"drafts", TURNS} & failed(answers())


def test_log_probabilities_of_drafts_that_are_those_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = core.choose

    def repeat(sampler: Any, step: Any) -> None:
        choose(sampler, step)
        for _, active, _ in step:
            active.logprobs = active.logprobs[-1:] * len(active.logprobs)

    monkeypatch.setattr(core, "choose", repeat)
    assert "drafts" in failed(answers())


def test_log_probabilities_without_those_of_likelier_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs = sampling._logprobs
    monkeypatch.setattr(sampling, "_logprobs", lambda *drawn: logprobs(*drawn)._replace(top=()))
    assert "logprobs" in failed(answers())


def test_a_block_that_is_found_before_its_last_position_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of an answer is never fed: only whoever goes on behind it finds that."""
    commit = SequenceCache.commit

    def early(self: SequenceCache, lease: Any, tokens: Sequence[int], computed: int) -> None:
        commit(self, lease, tokens, min(len(tokens), computed + 1))

    monkeypatch.setattr(SequenceCache, "commit", early)
    monkeypatch.setattr(PagedState, "due", lambda self, lease: (lease.published + 1) * self._size - 1)
    assert failed(answers()) == {TURNS}


def test_a_key_that_stays_when_its_block_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: BlockPool) -> int:
        block = self._free.pop() if self._free else self._cached.popitem(last=False)[0]
        self._holders[block] = 1
        return block

    def hold(self: BlockPool, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._cached.pop(block, None)
            self._holders[block] += 1

    monkeypatch.setattr(BlockPool, "_take", take)
    monkeypatch.setattr(BlockPool, "hold", hold)
    assert failed(answers())


def test_logits_of_two_requests_exchanged_in_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = BatchSampler.choose

    def exchanged(self: BatchSampler, ids: Sequence[str], logits: Any) -> Any:
        rows = list(logits)
        return choose(self, ids, [rows[1], rows[0], rows[2]] if len(ids) == 3 else rows)

    monkeypatch.setattr(BatchSampler, "choose", exchanged)
    assert failed(answers())
