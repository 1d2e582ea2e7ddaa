"""Caches of paged state, of recurrent state and of both: every token is computed on the state of all tokens before it,
prefixes resume where every kind of state can, and the sums add up after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.engine.cache import sequences
from runtime.engine.cache.kinds import Lease
from runtime.engine.cache.recurrent import RecurrentState
from runtime.engine.core import EngineCore
from runtime.engine.scheduling.step_planner import StepPlanner
from runtime.wire.block_keys import block_keys
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest
from tests.chain_engine import ChainEngine

BLOCK, MAX_TOKENS = 4, 64
KINDS = {"paged": (1, 0), "recurrent": (0, 1), "mixed": (1, 1)}  # whether there are blocks, and slots


class Answered(RuleBasedStateMachine):
    """Requests of shared beginnings, three priorities and two salts, by an engine with too little memory for all."""

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        blocks=st.integers(4, 24),
        slots=st.integers(1, 6),
        snapshot_tokens=st.sampled_from([0, 0, 4, 6, 16]),
        step_tokens=st.integers(2, 40),
    )
    def start(self, kind: str, blocks: int, slots: int, snapshot_tokens: int, step_tokens: int) -> None:
        paged, recurrent = KINDS[kind]
        self.most = min(MAX_TOKENS, blocks * BLOCK) if paged else MAX_TOKENS
        self.engine = ChainEngine(
            blocks=paged * blocks, slots=recurrent * slots, block_tokens=BLOCK, snapshot_tokens=snapshot_tokens
        )
        self.core = EngineCore(
            self.engine, Limits(step_tokens, max_running=5, aging_seconds=20), clock=lambda: self.now
        )
        self.now = 0.0
        self.requests: dict[str, GenerateRequest] = {}
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    @rule(
        begins=st.integers(0, 5),
        rest=st.lists(st.integers(1, 9), min_size=1, max_size=9),
        new=st.integers(1, 20),
        priority=st.integers(0, 2),
        salt=st.sampled_from([b"", b"other"]),
    )
    def arrive(self, begins: int, rest: list[int], new: int, priority: int, salt: bytes) -> None:
        prompt = ([1, 2, 3, 4, 5, 6, 7] * begins + rest)[: max(8, self.most - 20)]
        id = f"r{len(self.requests)}"
        request = GenerateRequest(id, prompt, min(new, self.most - len(prompt)), priority=priority, cache_salt=salt)
        self.requests[id], self.answers[id] = request, []
        self.core.add(request, self.now)

    @rule()
    def repeat(self) -> None:
        """The conversation of before goes on."""
        for id in list(self.ended)[-1:]:
            request = self.requests[id]
            prompt = [*request.prompt, *self.answers[id], 5]
            if len(prompt) < self.most:
                again = GenerateRequest(f"r{len(self.requests)}", prompt, 1, cache_salt=request.cache_salt)
                self.requests[again.id], self.answers[again.id] = again, []
                self.core.add(again, self.now)

    @precondition(lambda self: self.requests.keys() - self.ended.keys())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.core.cancel(data.draw(st.sampled_from(sorted(self.requests.keys() - self.ended.keys()))))
        self.read(self.core.report())

    @rule()
    def step(self) -> None:
        self.now += 1
        self.read(self.core.step(self.now))

    def read(self, report: Any) -> None:
        assert not report.refusals
        for delta in report.deltas:
            assert delta.error is None
            self.answers[delta.id] += delta.tokens
            if delta.finish_reason:
                self.ended[delta.id] = delta.finish_reason

    @invariant()
    def adds_up(self) -> None:
        self.core.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(5000):
            if not self.core.busy:
                break
            self.step()
        assert not self.core.busy, "a request starves"
        self.core.scheduler.check()
        assert not self.core.scheduler.cache.held
        for id, answer in self.answers.items():
            request = self.requests[id]
            expected = self.engine.alone(request.prompt, request.max_new_tokens)
            assert answer == (expected if self.ended[id] == "length" else expected[: len(answer)])


TestAnswered = Answered.TestCase
TestAnswered.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def core_of(
    kind: str, slots: int = 6, snapshot_tokens: int = 0, blocks: int = 40, max_tokens: int = MAX_TOKENS, **limits: int
) -> EngineCore:
    paged, recurrent = KINDS[kind]
    engine = ChainEngine(
        blocks=blocks * paged,
        slots=slots * recurrent,
        block_tokens=BLOCK,
        max_tokens=max_tokens,
        snapshot_tokens=snapshot_tokens,
    )
    return EngineCore(engine, Limits(**limits))


@pytest.mark.parametrize(("kind", "places"), [("paged", 5), ("recurrent", 2), ("mixed", 2)])
def test_the_load_says_how_many_requests_can_run(kind: str, places: int) -> None:
    """Each has a slot of recurrent state. Else an engine whose slots are all taken would seem to have places left, and
    a fleet would get no more engines."""
    core = core_of(kind, slots=2, max_running=5)
    for number in range(8):
        core.add(GenerateRequest(str(number), [1, 2, 3, number], 20), 0)
    for now in range(1, 4):
        core.step(now)
    load = core.load()
    assert load.running == load.most_running == places and load.waiting == 8 - places


def serve(core: EngineCore, *requests: GenerateRequest) -> dict[str, int]:
    """All at once, to their ends: prompt tokens that each found. Answers are those of each request alone, or errors."""
    for request in requests:
        core.add(request, 0)
    cached, answers, errors = dict[str, int](), {request.id: list[int]() for request in requests}, dict[str, str]()
    for now in range(1, 500):
        if not core.busy:
            break
        for delta in core.step(now).deltas:
            cached.setdefault(delta.id, delta.cached_tokens)
            answers[delta.id] += delta.tokens
            if delta.error:
                errors[delta.id] = delta.error
        core.scheduler.check()
    assert not core.busy and not core.scheduler.cache.held
    assert not errors, "; ".join(errors.values())
    engine: Any = core.engine
    for request in requests:
        assert answers[request.id] == engine.alone(request.prompt, request.max_new_tokens), request.id
    return cached


def ask(id: str, prompt: Sequence[int], new: int = 2, salt: bytes = b"") -> GenerateRequest:
    return GenerateRequest(id, prompt, new, cache_salt=salt)


PREFIX = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # two full blocks, and half of one


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_prompt_resumes_at_its_last_block_that_leaves_a_token(kind: str) -> None:
    core = core_of(kind)
    assert serve(core, ask("a", PREFIX)) == {"a": 0}
    assert serve(core, ask("b", PREFIX)) == {"b": 8}
    assert serve(core, ask("c", PREFIX[:8])) == {"c": 4 if kind == "paged" else 0}, "the state of 8 tokens is no help"
    assert serve(core, ask("d", PREFIX[:8])) == {"d": 4}


def test_recurrent_state_resumes_where_prompts_left_each_other_from_the_third_on() -> None:
    """Keys and values are known from the first on, so the second knows where a snapshot would have helped."""
    core = core_of("mixed")
    assert [serve(core, ask("x", [*PREFIX, *[last] * 9]))["x"] for last in (21, 22, 23)] == [0, 0, 8]


def test_a_grid_of_snapshots_is_kept_in_prompts_and_answers() -> None:
    core = core_of("recurrent", snapshot_tokens=7)  # in whole blocks: each 8 tokens
    engine: Any = core.engine
    serve(core, ask("a", PREFIX, 9))
    assert serve(core, ask("b", [*PREFIX, *engine.alone(PREFIX, 9), 3])) == {"b": 16}


def test_tokens_that_want_for_a_snapshot_are_counted() -> None:
    core, lost = core_of("mixed"), list[int]()
    for last in (21, 22, 23):
        serve(core, ask("x", [*PREFIX, *[last] * 9]))
        lost.append(core.report().stats.prefix_lost)
    assert lost == [0, 8, 8], "of the second, whose prompt parts where the first left no snapshot"


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_goes_on_behind_the_answer(kind: str) -> None:
    """20 turns of two conversations in turn, behind one system prompt: what is read again is less than a block."""
    core = core_of(kind, slots=6, max_tokens=512, blocks=260)
    engine: Any = core.engine
    talks = {id: [*PREFIX, number] for number, id in enumerate(("a", "b"), 20)}
    for turn in range(20):
        for number, (id, prompt) in enumerate(talks.items()):
            known = 0 if turn == 0 else (len(prompt) - 3) // BLOCK * BLOCK  # less a user's 2 tokens, and the last one's
            (cached,) = serve(core, ask(id, prompt, 7)).values()
            assert cached >= known, (turn, id)
            talks[id] = [*prompt, *engine.alone(prompt, 7), turn + 1, number + 1]


def test_an_answer_keeps_one_snapshot() -> None:
    core = core_of("recurrent", slots=4)
    serve(core, ask("a", PREFIX, 40))
    assert core.scheduler.cache._kinds[0].pool.cached == 2, "that of the prompt, and that of the answer"


def test_one_that_arrives_waits_for_a_snapshot_that_another_will_leave() -> None:
    core = core_of("recurrent", step_tokens=6)
    assert serve(core, ask("a", PREFIX), ask("b", [*PREFIX, 3, 4]), ask("c", [9, 9])) == {"a": 0, "b": 8, "c": 0}


def test_a_snapshot_is_not_waited_for_once_nobody_will_leave_it() -> None:
    core = core_of("recurrent", step_tokens=6)
    core.add(ask("a", PREFIX), 0)
    core.step(1)
    core.cancel("a")
    core.report()
    core.scheduler.check()
    assert serve(core, ask("b", PREFIX, 9)) == {"b": 0}
    core.add(ask("c", [*PREFIX, 9, 9, 9], 9), 0)
    core.step(600)
    core.step(601)
    assert core.scheduler.decoding() and not core._recurrent._promised, "it was left, and may be lost while c goes on"


def test_a_snapshot_that_had_no_slot_is_not_waited_for() -> None:
    core = core_of("recurrent", slots=2, step_tokens=6)
    for request in (ask("a", [9, 9], 4), ask("b", PREFIX, 20), ask("c", PREFIX, 20)):
        core.add(request, 0)
    for now in range(6):
        core.step(now)
    assert core.scheduler.running == 2 and core.scheduler.cached_tokens("c") == 0, "c runs as soon as a has ended"


def test_a_snapshot_is_taken_over_where_no_other_slot_is_left() -> None:
    core = core_of("recurrent", slots=2)
    serve(core, ask("a", PREFIX))
    assert serve(core, ask("b", [9, 9], 20), ask("c", PREFIX), ask("d", PREFIX))["c"] == 8


@pytest.mark.parametrize("kind", ["recurrent", "mixed"])
def test_a_sequence_that_ends_before_its_snapshot_was_copied_gives_both_up(kind: str) -> None:
    core = core_of(kind)
    serve(core, ask("a", PREFIX))
    core.add(ask("b", PREFIX), 0)
    (work,) = core.scheduler.plan(1)
    assert work.start == 8
    core.scheduler.check()
    core.cancel("b")
    core.scheduler.check()
    core.scheduler.commit({}, 1)  # until then the step may write it
    core.scheduler.check()
    assert not core.scheduler.cache.held and not core._recurrent.take_copies()


def test_a_single_slot_serves_one_request_after_the_other_without_snapshots() -> None:
    core = core_of("recurrent", slots=1, snapshot_tokens=4)
    assert serve(core, *(ask(id, PREFIX) for id in "abc")) == {"a": 0, "b": 0, "c": 0}


def test_snapshots_are_the_first_to_go_the_least_recently_used_before_others() -> None:
    core = core_of("recurrent", slots=3)
    for prompt in ([1] * 9, [2] * 9, [1] * 9, [3] * 9):  # two snapshots at most beside the sequence
        serve(core, ask("x", prompt))
    assert serve(core, ask("a", [1] * 9)) == {"a": 8}
    assert serve(core, ask("b", [2] * 9)) == {"b": 0}


def test_snapshots_preempt_no_sequence() -> None:
    core = core_of("mixed", slots=2, max_running=2)
    assert serve(core, ask("a", PREFIX, 6), ask("b", [7] * 9, 6)) == {"a": 0, "b": 0}
    assert core.scheduler.preemptions == 0


@pytest.mark.parametrize("kind", ["recurrent", "mixed"])
def test_state_that_cannot_be_cut_has_no_drafts(kind: str) -> None:
    core = core_of(kind)
    core.add(ask("a", [1, 2, 3], 9), 0)
    core.step(1)
    assert core.scheduler.decoding()[0][2] == 0
    (work,) = core.scheduler.plan(2, {"a": [5] * 4})
    assert work.drafts == 0


def test_an_engine_says_how_many_slots_there_are() -> None:
    core = core_of("mixed")
    core.add(ask("a", PREFIX, 2), 0)
    stats = core.step(1).stats
    assert (stats.slots, stats.slots_held, stats.slots_cached) == (6, 1, 1)
    assert core_of("paged").stats().slots == 0


@pytest.mark.parametrize("kind", KINDS)
def test_salts_share_nothing(kind: str) -> None:
    core = core_of(kind)
    assert serve(core, ask("a", PREFIX, salt=b"a")) == {"a": 0}
    assert serve(core, ask("b", PREFIX, salt=b"b"), ask("c", PREFIX, salt=b"a")) == {"b": 0, "c": 8}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_that_is_shared_across_salts_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: keys without the salt."""

    def keys(tokens: Sequence[int], size: int, cache_salt: bytes = b"", known: Sequence[bytes] = ()) -> list[bytes]:
        return block_keys(tokens, size, b"", known)

    monkeypatch.setattr(sequences, "block_keys", keys)
    with pytest.raises(AssertionError):
        test_salts_share_nothing(kind)


@pytest.mark.parametrize("kind", ["recurrent", "mixed"])
def test_a_snapshot_at_the_wrong_position_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a snapshot is published as that of the block before, so what it holds is another position's state."""
    monkeypatch.setattr(RecurrentState, "_key", lambda self, lease, position: lease.keys[position // BLOCK - 2])
    core = core_of(kind)
    serve(core, ask("a", PREFIX))
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="holds the state of 8 positions, and the tokens begin at position 4"):
        serve(core, ask("b", PREFIX[:7]))


@pytest.mark.parametrize("kind", ["recurrent", "mixed"])
def test_a_copy_of_the_wrong_state_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what is copied is not the state of the position that the engine says. Only its tokens show that."""

    def copy(self: ChainEngine, source: int, target: int) -> None:
        self.slots.copy(source, target)
        self.recurrent[target] = self.recurrent[source] + 1

    core = core_of(kind)
    with monkeypatch.context() as patch:
        patch.setattr(ChainEngine, "copy_state", copy)
        serve(core, ask("a", PREFIX))
    with pytest.raises(AssertionError, match=r"^b"):
        serve(core, ask("b", PREFIX))


@pytest.mark.parametrize("kind", ["recurrent", "mixed"])
def test_a_slot_that_is_freed_twice_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a snapshot's slot is given up when it is published, and again when its sequence ends."""
    commit = RecurrentState.commit

    def keep(self: RecurrentState, lease: Lease, computed: int) -> None:
        snapshots = lease.snapshots
        commit(self, lease, computed)
        lease.snapshots = snapshots

    monkeypatch.setattr(RecurrentState, "commit", keep)
    with pytest.raises(AssertionError, match="held"):
        serve(core_of(kind), ask("a", PREFIX))


@pytest.mark.parametrize("kind", ["recurrent", "mixed"])
def test_a_resumption_beyond_a_snapshot_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a sequence goes on one token after its snapshot."""
    feed = StepPlanner._feed_prompt

    def skip(self: StepPlanner, sequence: Any, *rest: Any) -> Any:
        if sequence.cached and sequence.fed == sequence.cached:
            sequence.fed += 1
        return feed(self, sequence, *rest)

    core = core_of(kind)
    serve(core, ask("a", PREFIX))
    monkeypatch.setattr(StepPlanner, "_feed_prompt", skip)
    with pytest.raises(AssertionError, match="holds the state of 8 positions, and the tokens begin at position 9"):
        serve(core, ask("b", PREFIX))
