"""Steps that begin before the one before has ended: the same answers to the bit, and what is dropped is given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines.protocol import Entry, Finish, Result
from engines.step_inputs import check
from runtime.engine.cache.paged import PagedState
from runtime.engine.core import MOST_AHEAD, EngineCore
from runtime.engine.in_process import STEP_SECONDS, TOKEN_SECONDS, ModelledTime, answer_all
from runtime.engine.running_steps import EngineBrokenError
from runtime.engine.sampling import BatchSampler
from runtime.engine.scheduling.requests import Requests
from runtime.wire.limits import Limits
from runtime.wire.messages import Delta, GenerateRequest, SamplingSettings
from tapeout.errors import RequestError
from tests.fake_engine import HistoryEngine

MAX_TOKENS, VOCABULARY, STOP, POISON = 64, 12, 0, 11


class DeviceEngine(HistoryEngine):
    """Computes a step when its end is waited for, as late as a device may: with the state and tokens of that time.

    ``fails``: the step of several entries that begins, or that ends, as a whole; or, once the device is ``lost``, any
    that begins. An entry that feeds ``POISON`` fails
    alone. ``clashes``: blocks that another sequence wrote in a step that had not ended.
    """

    def __init__(self, blocks: int, block_tokens: int = 4, steps_at_once: int = 2, *, draws: bool = False) -> None:
        super().__init__(VOCABULARY, slots=8, max_tokens=MAX_TOKENS, block_tokens=block_tokens)
        self.capabilities = replace(self.capabilities, blocks=blocks, steps_at_once=steps_at_once, draws=draws)
        self.table[:, POISON] = -100
        self.fails = ""
        self.begun: list[dict[int, int]] = []  # by block that a step writes, the position behind what it writes
        self.clashes: list[int] = []
        self.most_begun = self.followed = 0
        self.sizes: list[int] = []  # entries of each step
        self.before: list[Result] = []

    def begin(self, batch: Sequence[Entry]) -> Finish:
        self.sizes.append(len(batch))
        if self.fails == "lost" or (self.fails == "begin" and len(batch) > 1):
            self.fails = self.fails.removeprefix("begin")
            raise MemoryError("no room for this step")
        errors = check(batch, self.capabilities)
        # What is packed for the device does not change after this call.
        fed = [entry._replace(tokens=tuple(entry.tokens), blocks=tuple(entry.blocks)) for entry in batch]
        size, ticket = self.capabilities.block_tokens, dict[int, int]()
        for entry in fed:
            end = entry.start + len(entry.tokens)
            for block in entry.blocks[entry.start // size : -(-end // size)]:
                self.clashes += [block for step in self.begun if step.get(block, entry.start) != entry.start]
                ticket[block] = end
        self.begun.append(ticket)
        self.most_begun = max(self.most_begun, len(self.begun))
        assert len(self.begun) <= self.capabilities.steps_at_once
        self.followed += sum(entry.follows is not None for entry in batch)

        def finish() -> list[Result]:
            assert self.begun.pop(0) is ticket, "steps end as they have begun"
            before = self.before
            if self.fails == "finish" and len(fed) > 1:
                self.fails, self.before = "", [Result()] * len(fed)
                raise MemoryError("the device is lost")
            self.before = [
                Result(error=error) if error else self._run(entry, before)
                for entry, error in zip(fed, errors, strict=True)
            ]
            return self.before

        return finish

    def _run(self, entry: Entry, before: Sequence[Result]) -> Result:
        if entry.follows is not None:
            chosen = before[entry.follows].tokens
            if chosen is None:
                return Result(error=RequestError("follows an entry that has failed"))
            entry = entry._replace(tokens=chosen[-1:].tolist())
        result = self._feed(entry)
        return Result(error=RequestError("broken logits")) if POISON in entry.tokens else result


def alone(request: GenerateRequest) -> tuple[list[int], list[Any], str | None]:
    core = EngineCore(DeviceEngine(64, steps_at_once=1), Limits(max_draft_tokens=0))
    core.add(replace(request, queue_timeout=None), 0)
    deltas = list[Delta]()
    for now in range(1, 500):
        if not core.busy:
            break
        deltas += core.step(now).deltas
    return whole(deltas)


def whole(deltas: Sequence[Delta]) -> tuple[list[int], list[Any], str | None]:
    tokens = [token for delta in deltas for token in delta.tokens]
    return tokens, [one for delta in deltas for one in delta.logprobs or ()], deltas[-1].finish_reason


class Served(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(16, 40),
        block_tokens=st.sampled_from([1, 4, 7]),
        step_tokens=st.integers(1, 30),
        running=st.integers(1, 6),
        drafted=st.sampled_from([0, 0, 4]),
        draws=st.booleans(),
    )
    def start(self, blocks: int, block_tokens: int, step_tokens: int, running: int, drafted: int, draws: bool) -> None:
        self.engine = DeviceEngine(max(blocks, -(-MAX_TOKENS // block_tokens)), block_tokens, draws=draws)
        limits = Limits(step_tokens, running, max_waiting=40, scored_tokens=5, max_draft_tokens=drafted)
        self.core = EngineCore(self.engine, limits)
        self.now, self.number = 0.0, 0
        self.requests: dict[str, GenerateRequest] = {}
        self.deltas: dict[str, list[Delta]] = {}
        self.ended: dict[str, tuple[GenerateRequest, list[Delta]]] = {}

    @rule(
        prefix=st.integers(0, 4),
        rest=st.lists(st.integers(1, VOCABULARY - 2), min_size=1, max_size=12),
        new=st.integers(0, 14),
        least=st.sampled_from([0, 0, 0, 3]),
        seed=st.sampled_from([None, None, None, None, 1]),
        logprobs=st.sampled_from([None, None, None, 2]),
        scored=st.sampled_from([None, None, None, 0]),
        poisoned=st.integers(0, 9),
        again=st.booleans(),
    )
    def arrive(
        self,
        prefix: int,
        rest: list[int],
        new: int,
        least: int,
        seed: int | None,
        logprobs: int | None,
        scored: int | None,
        poisoned: int,
        again: bool,
    ) -> None:
        """``again``: with an id that another request had, perhaps in a step that has not ended."""
        unused = sorted(self.ended.keys() - self.requests.keys())
        id = unused[-1].split("/")[0] if again and unused else f"r{self.number}"
        if id in self.requests:
            id = f"r{self.number}"
        self.number += 1
        self.requests[id] = GenerateRequest(
            id,
            [1, 2, 3, 4, 5] * prefix + rest + [POISON] * (not poisoned),
            new,
            SamplingSettings() if seed is None else SamplingSettings(temperature=1.0, seed=seed),
            frozenset({STOP}),
            min(least, new),
            logprobs,
            scored,
        )
        self.deltas[id] = []
        self.core.add(self.requests[id], self.now)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.core.cancel(data.draw(st.sampled_from(sorted(self.requests))))
        self.read(self.core.report().deltas)

    @rule(fails=st.sampled_from(["", "", "", "", "begin", "finish"]))
    def step(self, fails: str) -> None:
        self.now += 1
        self.engine.fails = fails
        self.read(self.core.step(self.now).deltas)

    def read(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.deltas[delta.id].append(delta)
            if delta.finish_reason:
                key = f"{delta.id}/{len(self.ended)}"
                self.ended[key] = self.requests.pop(delta.id), self.deltas.pop(delta.id)

    @invariant()
    def adds_up(self) -> None:
        self.core.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(3000):
            if not self.core.busy:
                break
            self.step("")
        assert not self.core.busy and not self.requests, "a request starves"
        assert not self.core.scheduler.cache.held and not self.engine.begun and not self.engine.clashes
        stats = self.core.stats()
        said = [delta for _, deltas in self.ended.values() for delta in deltas]
        assert stats.generated_tokens == sum(len(delta.tokens) for delta in said)
        for request, deltas in self.ended.values():
            tokens, logprobs, reason = whole(deltas)
            expected = alone(request)
            if reason in ("stop", "length"):
                assert (tokens, logprobs, reason) == expected
            else:
                assert reason == "cancelled" or POISON in request.prompt
                assert tokens == expected[0][: len(tokens)]


TestServed = Served.TestCase
TestServed.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def answer(core: EngineCore, *requests: GenerateRequest) -> dict[str, list[int]]:
    for request in requests:
        core.add(request, 0)
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    for now in range(1, 300):
        if not core.busy:
            break
        for delta in core.step(now).deltas:
            assert delta.error is None
            found.setdefault(delta.id, []).extend(delta.tokens)
        core.scheduler.check()
    assert not core.busy and not core.scheduler.cache.held
    return found


def asked(count: int, new: int = 20, stops: frozenset[int] = frozenset()) -> list[GenerateRequest]:
    return [GenerateRequest(f"{n}", [1 + n, 2, 3], new, stop_tokens=stops) for n in range(count)]


def test_greedy_steps_follow_each_other_without_their_tokens() -> None:
    engine = DeviceEngine(64)
    found = answer(EngineCore(engine, Limits(max_draft_tokens=0)), *asked(4))
    assert found == {one.id: alone(one)[0] for one in asked(4)}
    # The first token of a prompt follows nothing; the last is never fed.
    assert engine.most_begun == 2 and engine.followed == 4 * 18 + 4


@pytest.mark.parametrize("settings", [SamplingSettings(temperature=1.0, seed=1), SamplingSettings(logit_bias={3: 1.0})])
def test_tokens_that_are_chosen_from_logits_are_waited_for(settings: SamplingSettings) -> None:
    engine = DeviceEngine(64)
    requests = [*asked(2), GenerateRequest("drawn", [5], 20, settings)]
    found = answer(EngineCore(engine, Limits(max_draft_tokens=0)), *requests)
    assert found == {one.id: alone(one)[0] for one in requests}
    assert engine.followed == 0


DRAWN = SamplingSettings(temperature=1.0, top_k=5, top_p=0.9, seed=1)


def test_tokens_that_the_engine_draws_are_not_waited_for() -> None:
    """With log-probabilities or without, after tokens that the host had to choose, and resumed in the middle."""
    engine = DeviceEngine(64, draws=True)
    requests = [
        *asked(2),
        GenerateRequest("drawn", [5], 20, DRAWN),
        GenerateRequest("ranked", [6], 20, DRAWN, logprobs=3),
        GenerateRequest("late", [7], 20, DRAWN, frozenset({STOP}), 4),
    ]
    found = answer(EngineCore(engine, Limits(max_draft_tokens=0)), *requests)
    assert found == {one.id: alone(one)[0] for one in requests}
    assert engine.followed > 5 * 12
    whole_answer = found["drawn"]
    again = answer(
        EngineCore(DeviceEngine(64, draws=True), Limits(max_draft_tokens=0)),
        GenerateRequest("resumed", [5], 20, DRAWN, answered=tuple(whole_answer[:7])),
    )
    assert again == {"resumed": whole_answer[7:]}


def test_a_planted_position_of_a_draw_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a step ahead draws with the random number of the step before it."""
    handed = BatchSampler.handed_over

    def stale(self: BatchSampler, entry: Entry, id: str, position: int) -> Entry:
        return handed(self, entry, id, position - (entry.follows is not None))

    request = GenerateRequest("drawn", [5], 20, DRAWN)
    monkeypatch.setattr(BatchSampler, "handed_over", stale)
    found = answer(EngineCore(DeviceEngine(64, draws=True), Limits(max_draft_tokens=0)), request)
    assert found["drawn"] != alone(request)[0]


def test_drafts_are_looked_for_now_and_then() -> None:
    """Planted: steps run ahead for ever, so nobody ever looks."""
    engine = DeviceEngine(64)
    core = EngineCore(engine, Limits(max_draft_tokens=4))
    looked = list[int]()
    core._drafting.drafts = lambda _: looked.append(core._counters.steps) or {}  # type: ignore[method-assign]
    answer(core, *asked(2, 58))
    assert engine.followed and len(looked) >= 58 // (MOST_AHEAD + 1)


def test_a_stop_token_drops_what_the_step_ahead_computes() -> None:
    stops = frozenset({STOP})
    request = next(
        one
        for n in range(1, 10)
        if 3 < len(alone(one := GenerateRequest("a", [1, 2, n], 30, stop_tokens=stops))[0]) < 30
    )
    engine = DeviceEngine(64)
    core = EngineCore(engine, Limits(max_draft_tokens=0))
    expected = alone(request)[0]
    assert answer(core, request) == {"a": expected} and expected[-1] == STOP
    stats = core.stats()
    assert stats.generated_tokens == len(expected) and stats.steps == len(expected) + 1
    # Its blocks are found again by the tokens that were said, and by no others.
    assert core.scheduler.cache.held == 0
    again = GenerateRequest("b", [*request.prompt, *expected, 5], 3, stop_tokens=stops)
    core.add(again, 400)
    assert core.step(400).deltas[0].cached_tokens == (len(request.prompt) + len(expected) - 1) // 4 * 4


def test_state_that_a_running_step_writes_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a request that ends gives up its blocks at once, although a step that writes them runs."""
    engine = DeviceEngine(64)
    core = EngineCore(engine, Limits(max_draft_tokens=0))
    for one in asked(2):
        core.add(one, 0)
    core.step(1)
    assert len(engine.begun) == 1
    lease = core.scheduler._requests.running["0"].lease
    core.cancel("0")
    core.scheduler.check()
    assert lease.blocks
    core.step(2)
    core.scheduler.check()
    assert not lease.blocks

    finish = Requests.finish

    def early(self: Requests, id: str, reason: Any) -> Any:
        sequence = self.find(id)
        assert sequence is not None
        found = finish(self, id, reason)
        self.release(sequence)
        return found

    monkeypatch.setattr(Requests, "finish", early)
    core.cancel("1")
    core.add(GenerateRequest("next", [7] * 20, 2), 3)
    assert not engine.clashes
    core.step(3)
    assert engine.clashes


def test_nobody_is_preempted_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: whether all can grow is not asked before a step is planned ahead."""
    requests = [GenerateRequest(f"{n}", [1 + n, 2, 3], 40, priority=2 - n) for n in range(3)]

    def answered() -> EngineCore:
        """The first is served before those of a higher priority come."""
        core = EngineCore(DeviceEngine(16), Limits(max_draft_tokens=0))
        core.add(requests[0], 0)
        before = [token for now in range(1, 4) for delta in core.step(now).deltas for token in delta.tokens]
        core.add(requests[1], 4)
        assert len(before) > 1
        found = answer(core, requests[2])
        assert found["2"] == alone(requests[2])[0]
        return core

    assert answered().scheduler.preemptions > 0
    monkeypatch.setattr(PagedState, "can_grow", lambda *_: True)
    with pytest.raises(AssertionError, match="cannot be given up"):
        answered()


@pytest.mark.parametrize("half", ["begin", "finish"])
def test_a_step_that_fails_takes_the_one_behind_it_along_and_ends_nobody(half: str) -> None:
    engine = DeviceEngine(64)
    core = EngineCore(engine, Limits(max_draft_tokens=0))
    for one in asked(3):
        core.add(one, 0)
    found: dict[str, list[int]] = {one.id: [] for one in asked(3)}
    for now in range(1, 100):
        engine.fails = half if now in (4, 9) else ""
        for delta in core.step(now).deltas:
            assert delta.error is None
            found[delta.id] += delta.tokens
    assert not core.busy and found == {one.id: alone(one)[0] for one in asked(3)}


@pytest.mark.parametrize("half", ["begin", "finish"])
def test_after_a_step_that_fails_the_others_are_fed_together_again(half: str) -> None:
    """Planted: the step behind a failed one is followed by another, which fails with it, and so on to the end."""
    engine = DeviceEngine(64)
    core = EngineCore(engine, Limits(max_draft_tokens=0))
    for one in asked(3, 40):
        core.add(one, 0)
    for now in range(1, 100):
        engine.fails = half if now == 4 else ""
        core.step(now)
    assert not core.busy and core.stats().finished == {"length": 3}
    # At most two steps are fed entry by entry: the one that fails, and the one behind it.
    assert 3 <= sum(size == 1 for size in engine.sizes) <= 6
    assert engine.followed > 3 * 30


@pytest.mark.parametrize("steps_at_once", [1, 2])
def test_a_device_that_is_lost_is_broken_although_the_step_ahead_has_nobody_left(steps_at_once: int) -> None:
    """Planted: a step whose requests have all ended counts as one that did not fail."""
    engine = DeviceEngine(64, steps_at_once=steps_at_once)
    core = EngineCore(engine, Limits(max_draft_tokens=0))
    for one in asked(2):
        core.add(one, 0)
    core.step(1)
    engine.fails = "lost"
    with pytest.raises(EngineBrokenError, match="no room for this step"):
        for now in range(2, 40):
            core.add(GenerateRequest(f"next {now}", [1, 2], 9), now)
            core.step(now)
    assert core.stats().finished.keys() == {"error"}


class LongPrompts(DeviceEngine):
    """Waits for most of a prompt where it begins: it is cut into runs."""

    def __init__(self) -> None:
        super().__init__(64)
        self.now = 0.0

    def begin(self, batch: Sequence[Entry]) -> Finish:
        early, late = sum(len(entry.tokens) - 1 for entry in batch), len(batch)
        self.now += early
        finish = super().begin(batch)

        def ended() -> list[Result]:
            self.now += late
            return finish()

        return ended


def observed(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, float]]:
    """What the core learns of steps from now on: decodes, tokens of prompts, and seconds."""
    found = list[tuple[int, int, float]]()

    def observe(decodes: int, prompt_tokens: int, drafts: int, seconds: float) -> None:
        assert not drafts
        found.append((decodes, prompt_tokens, seconds))

    monkeypatch.setattr(core.scheduler.costs, "observe", observe)
    return found


def test_a_step_is_not_shorter_because_the_one_before_it_took_long_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a step ahead counts as planned when the step before it was."""
    engine = LongPrompts()
    core = EngineCore(engine, Limits(max_draft_tokens=0), clock=lambda: engine.now)
    found = observed(core, monkeypatch)
    core.add(GenerateRequest("a", [1 + n % 9 for n in range(40)], 8), 0)
    while core.busy:
        core.step(engine.now)
    assert found == [(0, 40, 40), *[(1, 0, 1)] * 7]


def test_modelled_steps_take_their_own_time_however_many_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: time goes on when a step begins, so one that is begun ahead makes the step before it longer."""
    timed = ModelledTime(DeviceEngine(64))
    core = EngineCore(timed, Limits(max_draft_tokens=0), clock=timed.clock)
    found = observed(core, monkeypatch)
    answer_all(core, [GenerateRequest("a", [1 + n % 9 for n in range(40)], 8)])
    times = [STEP_SECONDS + TOKEN_SECONDS * (decodes + prompts) for decodes, prompts, _ in found]
    assert len(found) == 8 and [seconds for _, _, seconds in found] == pytest.approx(times)


def test_a_step_took_its_time_also_for_those_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a step of four counts as one of a single request, where the others have ended meanwhile."""
    core = EngineCore(DeviceEngine(64), Limits(max_draft_tokens=0))
    for one in asked(4):
        core.add(one, 0)
    core.step(1)
    found = observed(core, monkeypatch)
    for id in "012":
        core.cancel(id)
    core.step(2)
    core.step(3)
    assert [decodes for decodes, _, _ in found] == [4, 1]
