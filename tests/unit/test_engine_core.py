"""The engine's core under random requests: each response is the one the request gets alone, and each ends once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines.kernels.serving import Clipping, ValueCounts
from engines.protocol import Entry, Result
from runtime.engine.active import ActiveRequest
from runtime.engine.cache.kinds import Lease
from runtime.engine.choosing import choose
from runtime.engine.core import EngineCore
from runtime.engine.counters import CLIPPING_STEPS
from runtime.engine.running_steps import BROKEN_STEPS, EngineBrokenError
from runtime.engine.sampling import BatchSampler
from runtime.engine.scheduling.step_costs import StepCosts
from runtime.engine.scheduling.work import Work
from runtime.engine.speculation import Speculation
from runtime.wire.codec import decode, encode
from runtime.wire.limits import Limits, QueueFullError
from runtime.wire.messages import Constraint, Delta, EngineStats, GenerateRequest, SamplingSettings, StepReport
from tapeout.errors import RequestError
from tests.fake_engine import HistoryEngine

MAX_TOKENS, VOCABULARY, STOP, POISON = 64, 12, 0, 11


class CoreEngine(HistoryEngine):
    """Fails an entry that feeds ``POISON``, which no request chooses, and whole steps while ``fails`` says so.

    ``fails``: 1 fails a step of several entries, 2 any step.
    """

    def __init__(self, *, slots: int = 8, block_tokens: int = 4) -> None:
        super().__init__(VOCABULARY, slots=slots, max_tokens=MAX_TOKENS, block_tokens=block_tokens)
        self.table[:, POISON] = -100
        self.fails = 0
        self.most_logits = 0

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        if self.fails > 1 or (self.fails and len(batch) > 1):
            raise MemoryError("no room for this step")
        results = super().step(batch)
        self.most_logits = max(self.most_logits, sum(len(r.logits) for r in results if r.logits is not None))
        return [
            Result(error=RequestError("broken logits")) if POISON in entry.tokens else result
            for entry, result in zip(batch, results, strict=True)
        ]


def served(core: EngineCore, *requests: GenerateRequest) -> dict[str, list[Delta]]:
    """The deltas of requests that are added at once and served to their ends."""
    for request in requests:
        core.add(request, 0)
    deltas: dict[str, list[Delta]] = {request.id: [] for request in requests}
    for now in range(1, 3000):
        if not core.busy:
            break
        for delta in core.step(now).deltas:
            deltas[delta.id].append(delta)
    assert not core.busy
    core.scheduler.check()
    assert not core.scheduler.cache.held
    return deltas


def whole(deltas: Sequence[Delta]) -> dict[str, Any]:
    """What the deltas of a request say together; how many there are depends on chance."""
    return {
        "tokens": [token for delta in deltas for token in delta.tokens],
        "logprobs": [entry for delta in deltas for entry in delta.logprobs or ()],
        "prompt_logprobs": deltas[0].prompt_logprobs if deltas else None,
        "reason": deltas[-1].finish_reason if deltas else None,
    }


def alone(request: GenerateRequest) -> dict[str, Any]:
    request = replace(request, queue_timeout=None, timeout=None)
    return whole(served(EngineCore(CoreEngine(), Limits(max_draft_tokens=0)), request)[request.id])


class Served(RuleBasedStateMachine):
    @initialize(
        block_tokens=st.sampled_from([0, 1, 4, 7, 16]),
        slots=st.integers(1, 4),
        step_tokens=st.integers(1, 40),
        running=st.integers(1, 6),
        scored=st.integers(1, 8),
        drafted=st.sampled_from([0, 2, 8]),
    )
    def start(self, block_tokens: int, slots: int, step_tokens: int, running: int, scored: int, drafted: int) -> None:
        self.engine = CoreEngine(slots=slots, block_tokens=block_tokens)
        self.limits = Limits(
            step_tokens, running, max_waiting=6, aging_seconds=20, scored_tokens=scored, max_draft_tokens=drafted
        )
        self.core = EngineCore(self.engine, self.limits)
        self.now = 0.0
        self.requests: dict[str, GenerateRequest] = {}
        self.deltas: dict[str, list[Delta]] = {}
        self.live: set[str] = set()

    @rule(
        prefix=st.integers(0, 4),
        rest=st.lists(st.integers(1, VOCABULARY - 2), min_size=1, max_size=20),
        new=st.integers(0, 12),
        least=st.integers(0, 3),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("ab"),
        seed=st.none() | st.integers(0, 9),
        logprobs=st.none() | st.integers(0, 3),
        prompt_logprobs=st.none() | st.integers(0, 3),
        timeout=st.none() | st.integers(0, 12),
        poisoned=st.integers(0, 9),
    )
    def arrive(
        self,
        prefix: int,
        rest: list[int],
        new: int,
        least: int,
        priority: int,
        tenant: str,
        seed: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        timeout: int | None,
        poisoned: int,
    ) -> None:
        id = f"r{len(self.requests)}"
        sampling = SamplingSettings() if seed is None else SamplingSettings(temperature=1.0, top_k=5, seed=seed)
        request = GenerateRequest(
            id,
            [1, 2, 3, 4, 5] * prefix + rest + [POISON] * (not poisoned),
            new,
            sampling,
            frozenset({STOP}),
            min(least, new),
            logprobs,
            prompt_logprobs,
            None,
            priority,
            tenant,
            tenant.encode(),
            queue_timeout=timeout,
        )
        self.requests[id], self.deltas[id] = request, []
        self.live.add(id)
        self.core.add(request, self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.core.cancel(data.draw(st.sampled_from(sorted(self.live))))

    @rule(fails=st.booleans())
    def step(self, fails: bool) -> None:
        self.now += 1
        self.engine.fails = fails
        self.take(self.core.step(self.now))

    def take(self, report: StepReport) -> None:
        received = decode(encode(report))
        assert received[:2] == report[:2] and list(map(repr, received.refusals)) == list(map(repr, report.refusals))
        for delta in report.deltas:
            assert delta.id in self.live, "more of a request that has ended"
            self.deltas[delta.id].append(delta)
            if delta.finish_reason is not None:
                self.live.remove(delta.id)
        for id, error in report.refusals:
            assert not self.deltas.pop(id), "a request is refused that has begun its response"
            self.live.remove(id)
            request = self.requests[id]
            fits = len(request.prompt) + max(request.max_new_tokens - 1, 0) <= MAX_TOKENS
            assert isinstance(error, QueueFullError) or not fits

    @invariant()
    def adds_up(self) -> None:
        self.core.scheduler.check()
        assert self.core.stats().blocks_held == self.core.scheduler.cache.held

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.engine.fails = 0
        for _ in range(3000):
            if not self.core.busy:
                break
            self.now += 1
            self.take(self.core.step(self.now))
        assert not self.core.busy and not self.live, "a request starves"
        stats = self.core.stats()
        assert stats.blocks_held == stats.running == stats.waiting == 0
        limits = self.limits
        most = limits.scored_tokens + limits.max_running * (1 + limits.max_draft_tokens)
        assert self.engine.most_logits <= min(most, limits.scored_tokens + limits.step_tokens)
        assert stats.generated_tokens == sum(len(delta.tokens) for all in self.deltas.values() for delta in all)
        for id, deltas in self.deltas.items():
            found, expected = whole(deltas), alone(self.requests[id])
            if found["reason"] in ("stop", "length"):
                assert found == expected
            else:
                assert found["reason"] in ("cancelled", "timeout", "error")
                assert found["tokens"] == expected["tokens"][: len(found["tokens"])]
                poisoned = POISON in self.requests[id].prompt
                assert found["reason"] != "error" or poisoned


TestServed = Served.TestCase
TestServed.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def core(**limits: Any) -> EngineCore:
    return EngineCore(CoreEngine(), Limits(**limits))


def test_stop_tokens_count_from_the_least_number_of_tokens_on() -> None:
    prompt = next([1, 2, n] for n in range(1, 10) if alone(GenerateRequest("a", [1, 2, n], 20))["tokens"][0] == STOP)
    stops = frozenset({STOP})
    assert alone(GenerateRequest("a", prompt, 20, stop_tokens=stops)) == {
        "tokens": [STOP], "logprobs": [], "prompt_logprobs": None, "reason": "stop",
    }  # fmt: skip
    least = alone(GenerateRequest("a", prompt, 20, stop_tokens=stops, min_new_tokens=5))["tokens"]
    assert len(least) >= 5 and STOP not in least[:5]
    ignored = alone(GenerateRequest("a", prompt, 20))
    assert len(ignored["tokens"]) == 20 and ignored["reason"] == "length"


@pytest.mark.parametrize("scored_tokens", [1, 3, 64])
def test_prompt_logprobs_are_those_of_one_prefill(scored_tokens: int) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    made = core(scored_tokens=scored_tokens)
    served(made, GenerateRequest("before", prompt, 1))  # its blocks must not be taken
    (delta,) = served(made, GenerateRequest("a", prompt, 0, prompt_logprobs=2))["a"]
    assert delta.finish_reason == "length" and not delta.tokens and delta.cached_tokens == 0
    scores = delta.prompt_logprobs
    assert scores is not None and scores[0] is None and len(scores) == len(prompt)
    for position, score in enumerate(scores[1:], start=1):
        logits = made.engine.logits_after(prompt[:position]).astype(np.float64)  # type: ignore[attr-defined]
        expected = logits - np.log(np.exp(logits).sum())
        assert score is not None and score.token == prompt[position]
        assert score.logprob == pytest.approx(expected[prompt[position]], abs=1e-5)
        assert [token for token, _ in score.top] == np.argsort(-expected, kind="stable")[:2].tolist()


def test_a_prompt_of_one_token_has_no_score() -> None:
    (delta,) = served(core(), GenerateRequest("a", [1], 0, prompt_logprobs=1))["a"]
    assert delta.prompt_logprobs == (None,) and delta.finish_reason == "length"


def test_responses_to_one_prompt_compute_it_once() -> None:
    made = core()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    deltas = served(made, *[GenerateRequest(f"{n}", prompt, 3) for n in range(4)])
    assert [all[0].cached_tokens for all in deltas.values()] == [0, 8, 8, 8]
    engine: Any = made.engine
    assert sum(map(sum, engine.steps)) == 9 + 3 * 1 + 4 * 2
    assert made.stats().prefix_hits == 24 and made.stats().prefix_queries == 36


def test_neighbours_do_not_change_what_a_seed_draws() -> None:
    drawn = GenerateRequest("drawn", [1, 2, 3], 10, SamplingSettings(temperature=1.0, seed=3), logprobs=1)
    others = [GenerateRequest(f"{n}", [4, n], 5 + n, SamplingSettings(temperature=0.5 * n, seed=n)) for n in range(5)]
    assert whole(served(core(), *others, drawn)["drawn"]) == alone(drawn)


def test_a_step_that_fails_as_a_whole_ends_nobody_who_can_run_alone() -> None:
    made = core()
    engine: Any = made.engine
    for id in ("a", "b"):
        made.add(GenerateRequest(id, [1, 2], 3), 0)
    engine.fails = 1
    assert [len(made.step(1).deltas) for _ in range(3)] == [2, 2, 2]
    assert made.stats().finished == {"length": 2}


def test_an_engine_that_runs_nothing_is_broken() -> None:
    made = core()
    engine: Any = made.engine
    engine.fails = 2
    for number in range(BROKEN_STEPS - 1):
        made.add(GenerateRequest(f"{number}", [1], 2), 0)
        (delta,) = made.step(1).deltas
        assert delta.finish_reason == "error" and "no room for this step" in (delta.error or "")
    made.add(GenerateRequest("last", [1], 2), 0)
    with pytest.raises(EngineBrokenError, match="no room for this step"):
        made.step(2)


def test_sampling_that_raises_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = core()
    draw = made._sampler.choose

    def fails(ids: Sequence[str], rows: Any) -> Any:
        if "bad" in ids:
            raise ZeroDivisionError("planted")
        return draw(ids, rows)

    monkeypatch.setattr(made._sampler, "choose", fails)
    settings = SamplingSettings(temperature=1.0, seed=1)
    deltas = served(made, GenerateRequest("good", [1, 2], 3, settings), GenerateRequest("bad", [1, 2], 3, settings))
    assert whole(deltas["good"])["reason"] == "length"
    assert deltas["bad"][0].finish_reason == "error" and "planted" in (deltas["bad"][0].error or "")


def test_sampling_that_raises_behind_a_draft_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others have chosen in the same step counts as said already: it must not be chosen again."""
    logits = np.random.default_rng(0).normal(size=(2, VOCABULARY)).astype(np.float32)
    plain, drafted = (
        GenerateRequest(id, [1], 9, SamplingSettings(temperature=2.0, seed=seed)) for id, seed in (("a", 3), ("b", 4))
    )
    reference, sampler = BatchSampler(VOCABULARY), BatchSampler(VOCABULARY)
    for request in (plain, drafted):
        reference.add(request)
        sampler.add(request)
    said = [reference.choose(["a"], logits[:1])[0].token for _ in range(2)]
    guess = reference.choose(["b"], logits[:1])[0].token
    draw = sampler.choose

    def fails(ids: Sequence[str], rows: Any) -> Any:
        if list(ids) == ["b"]:  # the guess holds, and what follows it is drawn alone
            raise ZeroDivisionError("planted")
        return draw(ids, rows)

    monkeypatch.setattr(sampler, "choose", fails)
    first, second = ActiveRequest(plain, 0), ActiveRequest(drafted, 0)
    works = Work("a", [1], 0, Lease(), True), Work("b", [1, guess], 0, Lease(), True, drafts=1)
    results = Result(logits=logits[:1]), Result(logits=logits)
    choose(sampler, [*zip(works, (first, second), results, strict=True)])
    assert first.tokens == (said[0],) and first.error is None
    assert "planted" in (second.error or "")
    assert draw(["a"], logits[:1])[0].token == said[1] != said[0]


def test_a_completed_constraint_ends_the_response_whatever_the_minimum() -> None:
    class Compiler:
        def start(self, constraint: Constraint) -> Future[Any]:
            found: Future[Any] = Future()
            found.set_result(Yes())
            return found

    class Yes:
        """The one response is token 5."""

        error, complete = None, False

        def mask(self, stops: Iterable[int]) -> Any:
            return np.array([sum(1 << token for token in (stops if self.complete else [5]))], np.uint32)

        def advance(self, token: int) -> None:
            self.complete = True

    compiler: Any = Compiler()
    made = EngineCore(CoreEngine(), Limits(), BatchSampler(VOCABULARY, compiler))
    request = GenerateRequest("a", [1, 2], 9, stop_tokens=frozenset({STOP}), min_new_tokens=5)
    found = whole(served(made, replace(request, constraint=Constraint("regex", "5")))["a"])
    assert (found["tokens"], found["reason"]) == ([5, STOP], "stop")


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_change_how_many_steps_it_takes_and_nothing_else(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps cost does not decide here: drafts always pay."""
    monkeypatch.setattr(StepCosts, "worth", lambda *_: 0.05)
    sampling = SamplingSettings(temperature=0.3, seed=1) if sampled else SamplingSettings()
    logprobs = 1 if sampled else None
    requests = [GenerateRequest(f"{n}", [n, 1, n, 1, n], 58, sampling, logprobs=logprobs) for n in (1, 2, 3)]
    plain, drafting = core(max_draft_tokens=0), core(max_draft_tokens=8)
    expected, found = served(plain, *requests), served(drafting, *requests)
    assert {id: whole(deltas) for id, deltas in found.items()} == {id: whole(deltas) for id, deltas in expected.items()}
    stats = drafting.stats()
    assert stats.drafted_tokens >= stats.accepted_tokens > 0 and stats.drafts > 0
    assert stats.steps <= plain.stats().steps and not plain.stats().drafts


def test_nobody_looks_for_drafts_while_a_prompt_takes_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a draft that is tried once in a while would be used up without having been fed."""
    looked: list[str] = []
    monkeypatch.setattr(Speculation, "draft", lambda *_: looked.append("draft") or [])
    made = EngineCore(CoreEngine(), Limits(step_tokens=4))
    made.add(GenerateRequest("decodes", [1], 30), 0)
    for now in range(1, 4):
        made.step(now)
    assert looked
    made.add(GenerateRequest("prompt", [2] * 30, 1), 4)
    made.step(4)  # the prompt is admitted, and takes three tokens of each step from now on
    looked.clear()
    for now in range(5, 12):
        made.step(now)
    assert not looked
    for now in range(12, 20):  # the prompt ends
        made.step(now)
    assert looked


def test_the_report_has_what_the_engine_wrote_and_clipped() -> None:
    counted = Clipping(ValueCounts(900, 2), ValueCounts(70, 1))
    stats = EngineCore(CoreEngine(), Limits(), clippings=lambda: counted).report().stats
    assert (stats.kv_values, stats.kv_values_clipped) == (900, 2)
    assert (stats.activation_values, stats.activation_values_clipped) == (70, 1)
    assert not core().stats().kv_values and not core().stats().activation_values


def test_clipped_values_are_counted_at_the_end_and_now_and_then_before() -> None:
    """Planted: counted once, or never again after the requests have ended."""
    engine, limits = CoreEngine(), Limits(max_draft_tokens=0)
    core = EngineCore(engine, limits, clippings=lambda: Clipping(ValueCounts(len(engine.steps), 0), ValueCounts(0, 0)))
    core.add(GenerateRequest("a", [1, 2], 40), 0)
    seen = [core.step(now).stats.kv_values for now in range(1, 41)]
    assert not core.busy and len(engine.steps) == 40
    assert all(steps - CLIPPING_STEPS < found <= steps for steps, found in enumerate(seen, start=1))
    assert seen[-1] == 40


def test_weights_in_memory_are_looked_at_now_and_then() -> None:
    class Mapping(CoreEngine):
        looks = 0

        def resident_bytes(self, *, exact: bool = False) -> int | None:
            assert not exact  # which takes a second of a large model
            self.looks += 1
            return 300 if self.looks == 1 else None if self.looks == 2 else 200

    engine = Mapping()
    engine.capabilities = replace(engine.capabilities, mapped_bytes=1000)
    time = 0.0
    core = EngineCore(engine, Limits(max_draft_tokens=0), clock=lambda: time)
    stats = core.stats()
    assert (stats.mapped_bytes, stats.resident_bytes) == (1000, 300)
    core.add(GenerateRequest("a", [1, 2], 40), 0)
    looks, told = list[int](), list[tuple[int, int]]()
    for now in range(1, 26):
        time = float(now)
        stats = core.step(now).stats
        looks.append(engine.looks)
        told.append((stats.mapped_bytes, stats.resident_bytes))
    assert looks == [1] * 9 + [2] * 10 + [3] * 6
    assert told == [(1000, 300)] * 9 + [(0, 0)] * 10 + [(1000, 200)] * 6  # the system may not tell
    assert core_of_others().mapped_bytes == core_of_others().page_faults == 0


def test_the_report_has_what_the_last_step_read() -> None:
    engine = CoreEngine()
    engine.capabilities = replace(engine.capabilities, reads=lambda tokens: 1 + (tokens - 1) / 10)
    core = EngineCore(engine, Limits(max_draft_tokens=0))
    assert core.stats().step_reads == 1
    core.add(GenerateRequest("a", [1, 2, 3, 4, 5, 6], 2), 0)
    assert core.step(1).stats.step_reads == 1.5
    assert core.step(2).stats.step_reads == 1


def core_of_others() -> EngineStats:
    return EngineCore(CoreEngine(), Limits()).stats()


def test_work_ahead_is_for_all_that_run_or_may_run() -> None:
    engine = CoreEngine()
    core = EngineCore(engine, Limits(max_running=7))
    core.prepare()
    for name in "ab":
        core.add(GenerateRequest(name, [1, 2], 4), 0)
    core.step(1)
    core.prepare()
    assert engine.prepared == [7, 2]


def test_an_engine_of_slots_gets_no_drafts() -> None:
    made = EngineCore(CoreEngine(block_tokens=0), Limits())
    served(made, GenerateRequest("a", [1, 2] * 5, 40))
    assert not made.stats().drafts
