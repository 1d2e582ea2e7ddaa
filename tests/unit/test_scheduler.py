"""The scheduler over random arrivals, lengths, cancels, failures and pools that are too small: sums balance, every
request ends once, nobody starves, and greedy answers are those of each request alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines.protocol import Entry
from runtime.engine.cache.blocks import BlockPool
from runtime.engine.scheduling import step_costs
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import ScheduledSequence
from runtime.engine.scheduling.step_costs import FIRST_PLAIN_AFTER, MIN_CHUNK
from runtime.engine.scheduling.tenant_shares import TenantShares
from runtime.engine.scheduling.waiting import MAX_PASSED
from runtime.engine.scheduling.work import Finished, Work, WorkResult
from runtime.simulation.engine import SimulatedEngine
from runtime.simulation.step_lengths import StepLengths
from runtime.wire.block_keys import block_keys
from runtime.wire.limits import Limits, QueueFullError
from runtime.wire.messages import GenerateRequest
from tapeout.errors import RequestError
from tests.caches import paged_cache
from tests.fake_engine import HistoryEngine

BLOCK, MAX_TOKENS, VOCABULARY, STOP = 4, 64, 12, 0
REASONS = {"stop", "length", "cancelled", "timeout", "error"}


def alone(engine: HistoryEngine, request: GenerateRequest) -> list[int]:
    """The greedy answer, up to the stop token."""
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens.append(int(engine.logits_after(tokens).argmax()))
        if tokens[-1] == STOP:
            break
    return tokens[len(request.prompt) :]


def decided(work: Work) -> range:
    """The positions that decide tokens: the last certain one, and those of the guesses."""
    return range(len(work.tokens) - work.drafts - 1 if work.samples else len(work.tokens), len(work.tokens))


def accepted(tokens: list[int], work: Work) -> list[int]:
    """The tokens that were decided, up to the first that its guess did not foresee, and to the stop token."""
    kept: list[int] = []
    for guess, token in zip([*work.tokens[len(work.tokens) - work.drafts :], -1], tokens, strict=False):
        kept.append(token)
        if token in (STOP, -1) or token != guess:
            break
    return kept


class Served(RuleBasedStateMachine):
    splits = 0  # steps after which prompt tokens were owed, in all examples

    @initialize(
        blocks=st.integers(4, 24),
        step_tokens=st.integers(1, 40),
        running=st.integers(1, 6),
        aging=st.sampled_from([2, 50]),
    )
    def start(self, blocks: int, step_tokens: int, running: int, aging: int) -> None:
        self.engine = HistoryEngine(VOCABULARY, slots=MAX_TOKENS, max_tokens=MAX_TOKENS, block_tokens=BLOCK)
        limits = Limits(step_tokens, running, max_waiting=8, aging_seconds=aging, scored_tokens=3)
        self.blocks, self.limits = blocks, limits
        self.alone = patch.object(step_costs, "ALONE", 2)  # else no prompt is long enough to be put off
        self.alone.start()
        self.scheduler = Scheduler(paged_cache(blocks, BLOCK, MAX_TOKENS), limits)
        self.now, self.number = 0.0, 0
        self.answers: dict[str, list[int]] = {}
        self.requests: dict[str, GenerateRequest] = {}
        self.ended: dict[str, str] = {}

    def end(self, finished: list[Finished]) -> None:
        for id, reason in finished:
            assert id in self.requests and id not in self.ended and reason in REASONS
            self.ended[id] = reason

    @rule(
        prefix=st.integers(0, 3),
        rest=st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=20),
        new=st.integers(0, 12),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("ab"),
        wait=st.none() | st.integers(0, 12),
        scored=st.booleans(),
    )
    def arrive(
        self, prefix: int, rest: list[int], new: int, priority: int, tenant: str, wait: int | None, scored: bool
    ) -> None:
        """Prompts begin alike, so that prefixes are shared; what one tenant computed is not found by another."""
        self.number += 1
        prompt = [1, 2, 3, 4, 5] * prefix + rest
        salt = tenant.encode()
        id = f"r{self.number}"
        request = GenerateRequest(
            id,
            prompt,
            new,
            prompt_logprobs=0 if scored else None,
            priority=priority,
            tenant=tenant,
            cache_salt=salt,
            queue_timeout=wait,
        )
        try:
            displaced = self.scheduler.add(request, self.now)
        except QueueFullError:
            assert self.scheduler.waiting == self.limits.max_waiting
        except RequestError:
            assert len(prompt) + max(new - 1, 0) > min(self.blocks * BLOCK, MAX_TOKENS)
        else:
            assert not displaced or self.scheduler.waiting == self.limits.max_waiting
            assert not any(self.answers[id] for id in displaced)
            self.end([Finished(id, "error") for id in displaced])
            self.requests[request.id], self.answers[request.id] = request, []

    @precondition(lambda self: self.requests.keys() - self.ended.keys())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.requests.keys() - self.ended.keys())))
        finished = self.scheduler.cancel(id)
        assert finished is not None and self.scheduler.cancel(id) is None
        self.end([finished])

    def drafts(self, right: int) -> dict[str, list[int]]:
        """Guesses for every request, of which the first ``right`` hold."""
        drafts: dict[str, list[int]] = {}
        for id in self.requests.keys() - self.ended.keys():
            answer, expected = self.answers[id], alone(self.engine, self.requests[id])
            rest = expected[len(answer) :]
            drafts[id] = rest[:right] + [(token + 1) % VOCABULARY for token in rest[right : right + 1]]
        return drafts

    @rule(fails=st.integers(0, 9), cancels=st.integers(0, 9), right=st.integers(0, 4))
    def step(self, fails: int, cancels: int, right: int) -> None:
        """One step of the engine. Now and then an entry fails, or a request is cancelled while the step runs."""
        self.now += 1
        self.end(self.scheduler.expire(self.now))
        waited = self.scheduler.waiting
        works = self.scheduler.plan(self.now, self.drafts(right))
        planner: Any = self.scheduler._planner
        Served.splits += planner._owed > 0
        assert sum(len(work.tokens) for work in works) <= self.limits.step_tokens
        assert len({work.id for work in works}) == len(works) <= self.limits.max_running
        assert works or not (waited or self.scheduler.running), "nothing runs although requests wait"
        entries = [Entry(w.tokens, w.start, w.lease.blocks, positions=decided(w)) for w in works]
        outcomes: dict[str, WorkResult] = {}
        for number, (work, result) in enumerate(zip(works, self.engine.step(entries) if works else [], strict=True)):
            assert result.error is None
            if number == fails:
                outcomes[work.id] = WorkResult(failed=True)
                continue
            tokens = accepted([] if result.tokens is None else result.tokens.tolist(), work)
            outcomes[work.id] = WorkResult(tokens, STOP in tokens)
        if cancels < len(works):
            gone = self.scheduler.cancel(works[cancels].id)
            assert gone is not None
            self.end([gone])
            del outcomes[works[cancels].id]
        for id, outcome in outcomes.items():
            self.answers[id] += outcome.tokens
        fed = sum(len(work.tokens) for work in works)
        if works:
            self.end(self.scheduler.commit(outcomes, self.now + 0.01 + 0.001 * fed))  # so costs are learned

    @invariant()
    def adds_up(self) -> None:
        self.scheduler.check()
        live = self.requests.keys() - self.ended.keys()
        assert self.scheduler.waiting + self.scheduler.running == len(live)

    def teardown(self) -> None:
        """All that is left is served to its end, within as many steps as there are tokens, recomputed ones included."""
        if not hasattr(self, "scheduler"):
            return
        self.finish()
        self.alone.stop()

    def finish(self) -> None:
        steps = 0
        while self.requests.keys() - self.ended.keys():
            self.step(99, 99, steps % 3)
            steps += 1
            assert steps < 5000, "a request starves"
        assert not self.scheduler.cache.held and not self.scheduler.running and not self.scheduler.waiting
        for id, answer in self.answers.items():
            expected = alone(self.engine, self.requests[id])
            if self.ended[id] in ("stop", "length"):
                assert answer == expected
            else:
                assert answer == expected[: len(answer)]


class TestServed(Served.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

    def runTest(self) -> None:  # noqa: N802
        super().runTest()
        assert Served.splits > 60, "steps of tenants that share the engine were hardly ever split"


def waiting_by_tenant(made: Scheduler) -> dict[str, int]:
    found = Counter(sequence.tenant for sequence in made._requests.waiting.values())
    return dict(found)


def test_a_tenant_that_fills_the_queue_gives_places_up_to_others() -> None:
    """Down to what another one has, and never those of higher priority. Planted: whoever comes last is refused."""
    made = scheduler(max_waiting=6, max_running=1)
    made.add(GenerateRequest("runs", [1], 9, tenant="loud"), 0)
    advance(made)
    for number in range(6):
        made.add(GenerateRequest(f"loud{number}", [1], 1, tenant="loud", priority=0 if number else -1), number)
    assert made.add(GenerateRequest("quiet0", [1], 1, tenant="quiet"), 6) == ["loud5"]
    with pytest.raises(QueueFullError):
        made.add(GenerateRequest("loud6", [1], 1, tenant="loud"), 6)
    with pytest.raises(QueueFullError):
        made.add(GenerateRequest("low", [1], 1, tenant="third", priority=1), 6)
    assert made.add(GenerateRequest("quiet1", [1], 1, tenant="quiet"), 7) == ["loud4"]
    assert made.add(GenerateRequest("quiet2", [1], 1, tenant="quiet"), 8) == ["loud3"]
    with pytest.raises(QueueFullError):
        made.add(GenerateRequest("quiet3", [1], 1, tenant="quiet"), 9)
    assert waiting_by_tenant(made) == {"loud": 3, "quiet": 3}
    assert made.add(GenerateRequest("third", [1], 1, tenant="third"), 9) == ["quiet2"] or made.waiting == 6
    made.check()


class Looked(dict[str, Any]):
    """Counts what is looked at."""

    looks = 0

    def __getitem__(self, id: str) -> Any:
        self.looks += 1
        return super().__getitem__(id)

    def values(self) -> Any:
        self.looks += len(self)
        return super().values()


def test_a_refusal_does_not_look_at_all_that_wait() -> None:
    """A full queue is where a server has least time. Planted: the whole queue is sorted for each request."""
    made = scheduler(max_waiting=1000, max_running=1)
    for number in range(1000):
        made.add(GenerateRequest(f"r{number}", [1], 1, tenant="loud" if number % 4 else f"quiet{number % 3}"), number)
    queue = made._requests.queue
    queue._sequences = looked = Looked(queue._sequences)
    with pytest.raises(QueueFullError):
        made.add(GenerateRequest("more", [1], 1, tenant="loud"), 1000)
    assert made.add(GenerateRequest("other", [1], 1, tenant="new"), 1000) == ["r999"]
    assert looked.looks < 40


WAITING = st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 6), st.integers(0, 9), st.booleans())


@given(st.lists(WAITING, min_size=6, max_size=20), st.sampled_from("abcd"), st.integers(0, 2), st.integers(1, 9))
def test_who_gives_places_up_is_who_would_if_all_were_looked_at(
    waiting: list[tuple[str, int, int, int, bool]], tenant: str, priority: int, size: int
) -> None:
    made, own = scheduler(max_waiting=len(waiting), max_waiting_tokens=60), tenant
    queue = made._requests.queue
    for number, (other, rank, tokens, arrival, begun) in enumerate(waiting):
        request = GenerateRequest(f"r{number}", [1] * tokens, 1, tenant=other, priority=rank)
        queue.add(sequence := ScheduledSequence(request, arrival))
        sequence.started = begun
    queue.check()
    limits, asked = made.limits, GenerateRequest("new", [1] * size, 1, tenant=own, priority=priority)
    found = queue._of_other_tenants(asked, limits, size)

    left, expected = sorted(queue.sequences.values(), key=lambda one: (one.arrival, one.id)), list[str]()
    while len(left) >= limits.max_waiting or sum(len(one.tokens) for one in left) + size > limits.max_waiting_tokens:
        counts = Counter(one.tenant for one in left)
        sums = Counter[str]()
        for one in left:
            sums[one.tenant] += len(one.tokens)
        short, more = (counts, 1) if len(left) >= limits.max_waiting else (sums, size)
        may = [one for one in left if one.priority >= priority and not one.started]
        most = max(((short[one.tenant], one.tenant) for one in may), default=(0, own))[1]
        last = next((one for one in reversed(may) if one.tenant == most), None)
        if most == own or last is None or len({one.tenant for one in left} | {own}) < 2:
            assert found is None
            return
        left.remove(last)
        if short[most] - (1 if short is counts else len(last.tokens)) < short[own] + more:
            assert found is None
            return
        expected.append(last.id)
    assert found is not None and [one.id for one in found] == expected


def test_a_tenant_whose_prompts_fill_the_queue_gives_tokens_up_to_others() -> None:
    """Planted: only places are looked at."""
    made = scheduler(max_waiting_tokens=40, max_running=1)
    made.add(GenerateRequest("runs", [1], 9, tenant="loud"), 0)
    advance(made)
    for number in range(4):
        made.add(GenerateRequest(f"loud{number}", [1] * 10, 1, tenant="loud"), number)
    assert made.add(GenerateRequest("quiet", [1] * 15, 1, tenant="quiet"), 5) == ["loud3", "loud2"]
    with pytest.raises(QueueFullError):
        made.add(GenerateRequest("more", [1] * 8, 1, tenant="quiet"), 5)
    assert made.waiting_tokens == 35
    made = scheduler(max_waiting_tokens=45, max_running=1)
    for number in range(2):
        made.add(GenerateRequest(f"loud{number}", [1] * 20, 1, tenant="loud"), number)
    for number in range(3):
        made.add(GenerateRequest(f"quiet{number}", [1], 1, tenant="quiet"), number)
    assert made.add(GenerateRequest("more", [1] * 10, 1, tenant="quiet"), 5) == ["loud1"], "though it has more places"
    made.check()


def scheduler(blocks: int = 16, **limits: int) -> Scheduler:
    return Scheduler(paged_cache(blocks, BLOCK, MAX_TOKENS), replace(Limits(), **limits))


def advance(made: Scheduler, now: float = 0.0, *, stop: bool = False) -> list[str]:
    """One step; the ids that were fed."""
    works = made.plan(now)
    if works:
        made.commit({work.id: WorkResult([1] if work.samples else [], stop and work.samples) for work in works}, now)
    return [work.id for work in works]


def test_where_blocks_run_out_the_lowest_rank_gives_up_its_own() -> None:
    """Planted: requests that decode are never ranked."""
    made = scheduler(blocks=3)
    made.add(GenerateRequest("low", [1, 2, 3], 6, priority=1), 0)
    assert advance(made) == ["low"]
    made.add(GenerateRequest("high", [4, 5, 6, 7], 6, priority=0), 0)
    assert sorted(advance(made)) == ["high", "low"]
    assert advance(made) == ["high"] and made.preemptions == 1


def test_a_block_is_found_by_others_as_soon_as_it_is_full() -> None:
    made = scheduler()
    made.add(GenerateRequest("a", list(range(1, BLOCK + 1)), 2), 0)
    advance(made)
    made.add(GenerateRequest("b", list(range(1, BLOCK + 2)), 2), 0)
    assert {work.id: work.start for work in made.plan(0)} == {"a": BLOCK, "b": BLOCK}


def test_a_prefix_is_computed_once() -> None:
    made = scheduler()
    prompt = list(range(1, 11))
    made.add(GenerateRequest("a", prompt, 2), 0)
    advance(made)
    made.add(GenerateRequest("b", [*prompt, 11], 2), 0)
    (first, second) = made.plan(0)
    assert (first.id, second.id) == ("a", "b")
    assert second.start == 8 and list(second.tokens) == [9, 10, 11] and made.cached_tokens("b") == 8
    assert second.lease.blocks[:2] == first.lease.blocks[:2] and second.lease.blocks[2] != first.lease.blocks[2]


def test_a_whole_prompt_that_is_known_still_computes_its_last_token() -> None:
    made = scheduler()
    made.add(GenerateRequest("a", [1] * 8, 1), 0)
    advance(made)
    made.add(GenerateRequest("b", [1] * 8, 1), 0)
    (work,) = made.plan(0)
    assert work.start == 4 and work.samples


def test_tenants_with_other_salts_share_nothing() -> None:
    made = scheduler()
    made.add(GenerateRequest("a", [1] * 9, 1, tenant="a", cache_salt=b"a"), 0)
    advance(made)
    made.add(GenerateRequest("b", [1] * 9, 1, tenant="b", cache_salt=b"b"), 0)
    assert made.plan(0)[0].start == 0


def test_decodes_come_before_prompts_and_prompts_are_cut() -> None:
    made = scheduler(blocks=32, step_tokens=8)
    made.add(GenerateRequest("short", [1, 2], 9), 0)
    advance(made)
    made.add(GenerateRequest("long", [3] * 20, 1), 0)
    sizes = []
    for _ in range(3):
        works = made.plan(0)
        sizes.append({work.id: len(work.tokens) for work in works})
        made.commit({work.id: WorkResult([1] if work.samples else []) for work in works}, 0)
    assert sizes == [{"short": 1, "long": 7}, {"short": 1, "long": 7}, {"short": 1, "long": 6}]


def test_a_lower_priority_gives_up_its_blocks_and_is_computed_again() -> None:
    made = scheduler(blocks=4)
    made.add(GenerateRequest("low", [1] * 7, 5, priority=1), 0)
    advance(made)
    made.add(GenerateRequest("high", [2] * 7, 9), 0)
    order = [advance(made) for _ in range(30)]
    assert made.preemptions >= 1
    assert order[-1] == [] and any("high" in ids and "low" not in ids for ids in order)
    assert not made.cache.held


def test_who_waits_long_enough_overtakes_higher_priorities() -> None:
    made = scheduler(max_running=1, aging_seconds=3)
    made.add(GenerateRequest("low", [1], 1, priority=2), 0)
    order: list[str] = []
    for now in range(12):
        made.add(GenerateRequest(f"high{now}", [2], 1), now)
        order += advance(made, now)
    assert "low" in order and order.index("low") >= 6


def test_tenants_get_equal_shares() -> None:
    """One sends ten times as many requests as the other."""
    made = scheduler(max_running=1)
    for number in range(20):
        made.add(GenerateRequest(f"a{number}", [1] * 4, 1, tenant="a"), 0)
    for number in range(2):
        made.add(GenerateRequest(f"b{number}", [1] * 4, 1, tenant="b"), 1)
    order = [id for now in range(6) for id in advance(made, 2 + now / 100)]
    assert sum(id.startswith("b") for id in order) == 2


def test_a_tenant_that_was_served_less_does_not_wait_for_a_prompt_that_runs() -> None:
    """Planted: whatever runs is fed first, so the other tenant waits until that prompt is computed."""
    made = scheduler(64, step_tokens=8)
    made.add(GenerateRequest("before", [3] * 4, 1, tenant="little"), 0)
    advance(made)  # else the other one takes much more, and rests
    made.add(GenerateRequest("long", [1] * 60, 1, tenant="much"), 0)
    advance(made)
    made.add(GenerateRequest("short", [2] * 6, 1, tenant="little"), 0)
    advance(made)  # one that comes counts as served like the others
    fed = {work.id: len(work.tokens) for work in made.plan(0)}
    assert fed == {"short": 6, "long": 2}


def test_answers_of_a_tenant_that_takes_much_more_rest_while_a_prompt_of_another_is_computed() -> None:
    """Planted: they are fed in each step, or they rest as long as there are such prompts."""
    made, decoding = scheduler(256, step_tokens=16), {f"loud{number}": 1 for number in range(8)}
    for number, id in enumerate(decoding):
        made.add(GenerateRequest(id, [1 + number] * 32, 30, tenant="loud"), 0)
    while made.waiting or made.feeds_prompts:
        advance(made, 1.0)
    advance(made, 1.0)
    made.add(GenerateRequest("quiet", [9] * 40, 2, tenant="quiet"), 1.0)

    def fed(now: float) -> dict[str, int]:
        works = made.plan(now)
        made.commit({work.id: WorkResult([1] if work.samples else []) for work in works}, now)
        return {work.id: len(work.tokens) for work in works}

    assert fed(1.0) == fed(1.0 + 0.5 * made.limits.rest_seconds) == {"quiet": 16}
    assert fed(1.0 + made.limits.rest_seconds) == {"quiet": 8, **decoding}


def test_answers_rest_also_while_one_of_them_has_its_first_token_computed() -> None:
    """Its step is planned ahead of that token's end. Planted: it counts as one that has rested since time began."""
    made, now = scheduler(256, step_tokens=16), 1000.0
    for number in range(4):
        made.add(GenerateRequest(f"loud{number}", [1 + number] * 12, 30, tenant="loud"), now)
    while made.waiting or made.feeds_prompts:
        advance(made, now)
    made.add(GenerateRequest("quiet", [9] * 40, 2, tenant="quiet"), now)
    made._order.weigh(now)
    decoding = [one for one in made._requests.running.values() if one.tenant == "loud"]
    quiet = list(made._requests.waiting.values())

    def rest() -> float | None:
        return made._order.rest(decoding, quiet, frozenset(), 0.001, 0.001, now)

    before = rest()
    decoding[0].last = 0.0
    assert before == rest() == pytest.approx(made.limits.rest_seconds)


def test_answers_rest_longer_where_steps_are_long() -> None:
    """As in the test before this one, with steps of a second. Planted: a rest as long as for steps of milliseconds,
    which ends while the first part of the prompt is computed.
    """
    made, decoding = scheduler(256, step_tokens=16), {f"loud{number}": 1 for number in range(8)}
    for number, id in enumerate(decoding):
        made.add(GenerateRequest(id, [1 + number] * 32, 30, tenant="loud"), 0)
    while made.waiting or made.feeds_prompts:
        advance(made, 1.0)
    made.costs.observe(8, 0, 0, 1.0)
    made.add(GenerateRequest("quiet", [9] * 60, 2, tenant="quiet"), 1.0)

    def fed(now: float) -> dict[str, int]:
        works = made.plan(now)
        made.commit({work.id: WorkResult([1] if work.samples else []) for work in works}, now)
        return {work.id: len(work.tokens) for work in works}

    assert fed(1.0) == fed(4.0) == fed(7.9) == {"quiet": 16}
    assert fed(8.1) == {"quiet": 8, **decoding}


def test_answers_of_a_tenant_that_takes_much_more_do_not_rest_for_a_prompt_of_a_lower_priority() -> None:
    """Planted: shares count across priorities, though only tenants of one priority have them."""
    made = scheduler(256, step_tokens=16)
    made.add(GenerateRequest("loud", [1] * 40, 20, tenant="loud"), 1.0)
    while made.waiting or made.feeds_prompts:
        advance(made, 1.0)
    made.add(GenerateRequest("quiet", [9] * 40, 1, tenant="quiet", priority=1), 1.0)
    assert {work.id: len(work.tokens) for work in made.plan(1.0)} == {"loud": 1, "quiet": 15}


def test_a_prompt_of_a_tenant_that_takes_much_more_does_not_rest_for_one_of_a_lower_priority() -> None:
    """Planted: as above."""
    made = scheduler(256, step_tokens=16)
    made.add(GenerateRequest("loud", [1] * 40, 1, tenant="loud"), 1.0)
    advance(made, 1.0)
    made.add(GenerateRequest("quiet", [9] * 8, 1, tenant="quiet", priority=1), 1.0)
    assert {work.id: len(work.tokens) for work in made.plan(1.0)} == {"loud": 16}


def test_answers_of_tenants_with_a_request_each_go_on_beside_the_prompt_of_a_new_one() -> None:
    """Planted: each of them takes much more than one that has just come and had nothing, so all of them rest."""
    made, decoding = scheduler(256, step_tokens=32), {f"one{number}": 1 for number in range(12)}
    for number, id in enumerate(decoding):
        made.add(GenerateRequest(id, [1 + number] * 32, 30, tenant=id), 0)
    while made.waiting or made.feeds_prompts:
        advance(made, 1.0)
    advance(made, 1.0)
    made.add(GenerateRequest("new", [20] * 40, 2, tenant="new"), 1.0)
    assert {work.id: len(work.tokens) for work in made.plan(1.0)} == {**decoding, "new": 20}


def test_what_a_tenant_took_long_ago_does_not_count() -> None:
    """Planted: the least rest of it is more than nothing."""
    shares = TenantShares()
    shares.add("before", 10_000, 0.0)
    assert shares.heavy({"before", "new"}, 10.0) == {"before"} and not shares.heavy({"before", "new"}, 200.0)


def test_a_tenant_that_takes_much_more_does_not_pass_others_by_waiting() -> None:
    """Planted: whoever has waited for long comes first, so a queue that is always long is ahead of everybody."""
    made = scheduler(256, step_tokens=8, max_running=1)
    for number in range(4):
        made.add(GenerateRequest(f"loud{number}", [1 + number] * 40, 1, tenant="loud"), 0)
    while "loud2" not in advance(made, 100.0):
        pass
    made.add(GenerateRequest("quiet", [9] * 4, 1, tenant="quiet"), 100.0)
    order = [id for _ in range(9) for id in advance(made, 100.0)]
    assert order.index("quiet") < order.index("loud3")


def test_what_can_never_run_is_refused_at_once() -> None:
    made = scheduler(blocks=2)
    with pytest.raises(RequestError, match="7 prompt tokens and 3 new ones") as caught:
        made.add(GenerateRequest("a", [1] * 7, 3), 0)
    assert "at most 9 together" in (caught.value.expected or "")
    made.add(GenerateRequest("a", [1] * 7, 2), 0)
    for empty in (GenerateRequest("b", [], 1), GenerateRequest("b", [1], -1)):
        with pytest.raises(RequestError):
            made.add(empty, 0)
    with pytest.raises(RequestError, match="is there already"):
        made.add(GenerateRequest("a", [1], 1), 0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
@pytest.mark.parametrize("timeout", ["queue_timeout", "first_token_timeout", "timeout"])
def test_a_timeout_that_is_no_duration_is_refused_and_ends_nobody(timeout: str, seconds: float) -> None:
    made = scheduler(max_waiting=1)
    made.add(GenerateRequest("waits", [1], 1, priority=1), 0)
    with pytest.raises(RequestError, match="a timeout of"):
        made.add(replace(GenerateRequest("a", [1], 1), **{timeout: seconds}), 0)
    assert made.waiting == 1 and made.expire(1e9) == []


def test_a_full_queue_says_when_to_come_back() -> None:
    made = scheduler(max_running=1, max_waiting=2, step_tokens=4)
    made.add(GenerateRequest("first", [1] * 4, 9), 0)
    for now in range(3):
        advance(made, now)
    for number in range(2):
        made.add(GenerateRequest(f"{number}", [1] * 8, 1), 3)
    with pytest.raises(QueueFullError) as caught:
        made.add(GenerateRequest("late", [1], 1), 3)
    assert caught.value.retry_after == pytest.approx(16.0)  # 16 tokens wait, and one was fed each second


@pytest.mark.parametrize(("timeout", "steps"), [("queue_timeout", 0), ("first_token_timeout", 1), ("timeout", 2)])
def test_deadlines_end_what_they_are_for(timeout: str, steps: int) -> None:
    """Of leaving the queue, of the first token (the prompt takes two steps), and of the answer."""
    made = scheduler(step_tokens=4, max_running=1)
    made.add(replace(GenerateRequest("a", [1] * 6, 9), **{timeout: 5.0}), 0)
    for _ in range(steps):
        advance(made)
    assert made.expire(4.9) == []
    assert made.expire(5) == [Finished("a", "timeout")] and not made.cache.held


def test_a_deadline_that_was_kept_does_not_end_a_request() -> None:
    made = scheduler()
    made.add(GenerateRequest("a", [1], 9, queue_timeout=1, first_token_timeout=1), 0)
    advance(made)
    assert made.expire(99) == []


def test_keys_depend_on_every_token_before() -> None:
    keys = block_keys(list(range(12)), BLOCK)
    assert len(keys) == 3 and block_keys(list(range(12)), BLOCK, known=keys[:2]) == keys
    changed = block_keys([9, *range(1, 12)], BLOCK)
    assert not set(keys) & set(changed)
    assert block_keys(list(range(12)), BLOCK, b"other") != keys


@pytest.mark.parametrize("defect", ["released twice", "held without a table", "taken twice"])
def test_a_planted_leak_is_found(defect: str) -> None:
    pool = BlockPool(4)
    taken = pool.take(2)
    assert taken is not None
    pool.check([taken])
    if defect == "released twice":
        pool.release(taken)
        with pytest.raises(AssertionError):
            pool.release(taken)
    elif defect == "held without a table":
        with pytest.raises(AssertionError, match="not held as often"):
            pool.check([])
    else:
        with pytest.raises(AssertionError, match="not held as often"):
            pool.check([taken, taken])


def test_a_higher_priority_displaces_the_lowest_and_latest() -> None:
    made = scheduler(max_running=1, max_waiting=2)
    for id, priority in (("a", 2), ("b", 1), ("c", 2)):
        made.add(GenerateRequest(id, [1], 1, priority=priority), len(id))
        if id == "a":
            made.plan(0)  # it runs
    assert made.add(GenerateRequest("d", [1], 1, priority=1), 2) == ["c"]
    with pytest.raises(QueueFullError):
        made.add(GenerateRequest("e", [1], 1, priority=1), 2)
    assert made.waiting == 2 and made.cancel("c") is None


def test_displacing_makes_room_for_tokens_or_ends_nobody() -> None:
    made = scheduler(max_waiting_tokens=10)
    for number in range(3):
        made.add(GenerateRequest(f"low{number}", [1] * 3, 1, priority=5), number)
    made.add(GenerateRequest("mid", [1], 1, priority=1), 3)
    with pytest.raises(QueueFullError):
        made.add(GenerateRequest("large", [1] * 10, 1, priority=1), 4)  # "mid" would have to go, too
    assert made.waiting == 4
    assert made.add(GenerateRequest("high", [1] * 6, 1, priority=1), 4) == ["low2", "low1"]


def test_who_has_waited_long_is_not_displaced() -> None:
    made = scheduler(max_waiting=1, aging_seconds=5)
    made.add(GenerateRequest("old", [1], 1, priority=1), 0)
    with pytest.raises(QueueFullError):
        made.add(GenerateRequest("new", [1], 1, priority=0), 6)


def test_a_preempted_request_keeps_its_place() -> None:
    """It has begun its answer, so it is not displaced."""
    made = scheduler(blocks=4, max_waiting=1)
    made.add(GenerateRequest("low", [1] * 7, 5, priority=1), 0)
    made.plan(0)
    made.commit({"low": WorkResult([1])}, 0)
    made.add(GenerateRequest("high", [2] * 7, 9), 0)
    while not made.waiting:
        advance(made)
    with pytest.raises(QueueFullError):
        made.add(GenerateRequest("higher", [1], 1, priority=0), 0)


def test_a_prefix_that_another_computes_is_waited_for() -> None:
    made = scheduler(step_tokens=6)
    prompt = list(range(1, 10))
    for id in ("a", "b"):
        made.add(GenerateRequest(id, prompt, 1), 0)
    made.add(GenerateRequest("other", [7], 1), 0)
    assert advance(made) == ["a"]
    assert sorted(advance(made)) == ["a", "other"], "b waits for a, and keeps nobody from running"
    (work,) = made.plan(0)
    assert work.id == "b" and work.start == 8


def test_a_prefix_is_not_waited_for_once_nobody_computes_it() -> None:
    made = scheduler(step_tokens=3)
    for id in ("a", "b"):
        made.add(GenerateRequest(id, list(range(1, 10)), 1), 0)
    assert advance(made) == ["a"]
    made.cancel("a")
    assert advance(made) == ["b"]


def test_prompts_leave_decodes_their_latency() -> None:
    """Costs: 10 ms for decodes, and 1 ms for a prompt token. Steps with decodes may last 17 ms."""
    made = scheduler(blocks=64)
    now = 0.0
    made.add(GenerateRequest("decodes", [1], 30), now)
    made.add(GenerateRequest("first", [1] * 40, 1), now)
    sizes: list[dict[str, int]] = []
    for _ in range(12):
        if len(sizes) == 4:
            made.add(GenerateRequest("long", [2] * 60, 1), now)
        works = made.plan(now)
        sizes.append({work.id: len(work.tokens) for work in works})
        now += 0.01 + 0.001 * sum(len(work.tokens) for work in works if len(work.tokens) > 1)
        made.commit({work.id: WorkResult([1] if work.samples else []) for work in works}, now)
    chunks = [size["long"] for size in sizes if "long" in size]
    assert sizes[0] == {"decodes": 1, "first": 40} and sum(chunks) == 60
    assert max(chunks) <= 16, "MIN_CHUNK is the most here: 7 ms are left for 16 tokens at 1 ms"


def test_deadlines_of_requests_that_have_ended_are_forgotten() -> None:
    made = scheduler()
    for number in range(2000):
        made.add(GenerateRequest(f"{number}", [1], 1, timeout=1e9), number)
        advance(made, number)
        made.expire(number)
    assert len(made._deadlines._heap) < 300


def test_guesses_need_free_blocks_and_never_preempt() -> None:
    made = scheduler(blocks=3)
    made.add(GenerateRequest("short", [9], 1), 0)
    advance(made)  # so that short answers are expected
    for id in ("a", "b"):
        made.add(GenerateRequest(id, [1] * 3, 6), 0)
        advance(made)
    works = {work.id: work for work in made.plan(0, {"a": [5] * 4, "b": [6] * 4})}
    assert works["a"].drafts == 3 and works["b"].drafts == 0 and made.preemptions == 0
    assert list(works["a"].tokens) == [1, 5, 5, 5] and len(works["a"].lease.blocks) == 2


def test_accepted_guesses_count_as_tokens() -> None:
    made = scheduler()
    made.add(GenerateRequest("a", [1] * 3, 6), 0)
    advance(made)
    (work,) = made.plan(0, {"a": [5, 6, 7, 8, 9]})
    assert work.drafts == 4, "the last new token is never fed"
    made.commit({"a": WorkResult([5, 6, 9])}, 0)
    (work,) = made.plan(0)
    assert work.start == 6 and list(work.tokens) == [9]
    assert made.commit({"a": WorkResult([3])}, 0) == []
    (work,) = made.plan(0)
    assert made.commit({"a": WorkResult([3])}, 0) == [Finished("a", "length")]


def test_admission_leaves_room_for_answers() -> None:
    """Two answers of the longest length do not fit; two as long as those before do."""
    made = scheduler(blocks=6)
    for id in ("a", "b"):
        made.add(GenerateRequest(id, [1] * 4, 13), 0)
    assert advance(made) == ["a"]
    assert advance(made, stop=True) == ["a"]
    made.add(GenerateRequest("c", [2] * 4, 13), 1)
    assert sorted(advance(made)) == ["b", "c"]
    for _ in range(60):
        advance(made)
    assert made.preemptions and not made.running and not made.waiting, "the guess was wrong, and nobody is lost"


def test_guesses_leave_decodes_their_latency_and_prompts_come_before_them() -> None:
    """Costs: 10 ms for decodes, and 1 ms for each other token. Steps with decodes may last 15 ms."""
    made = scheduler(blocks=64)
    for id in "abcd":
        made.add(GenerateRequest(id, [1], 50), 0)
    advance(made)
    for _ in range(3):
        made.costs.observe(4, 0, 0, 0.01)
    made.costs.observe(0, 1000, 0, 1.0)
    made.costs.observe(4, 0, 10, 0.02)
    guesses = {id: [7] * 8 for id in "abcd"}

    def step() -> tuple[int, int]:
        """Guesses and prompt tokens of a step; no guess holds."""
        works = made.plan(0, guesses)
        made.commit({work.id: WorkResult([1] if work.samples else []) for work in works}, 0)
        return sum(work.drafts for work in works), sum(len(work.tokens) for work in works if work.id == "prompt")

    assert step() == (MIN_CHUNK, 0)  # 5 ms would do for 5
    made.add(GenerateRequest("prompt", [2] * (3 * MIN_CHUNK + 3), 1), 0)
    assert [step() for _ in range(5)] == [*[(0, MIN_CHUNK)] * 3, (0, 3), (MIN_CHUNK, 0)]


def test_every_decode_has_a_first_guess_before_any_has_a_second() -> None:
    """Later guesses hold less often."""
    made = Scheduler(paged_cache(4000, BLOCK, 8000), Limits(step_tokens=10))
    for id in "abcd":
        made.add(GenerateRequest(id, [1], 50), 0)
    advance(made)
    guesses = {"a": [7] * 8, "b": [7], "c": [7] * 8, "d": [7] * 8}
    works = made.plan(0, guesses)  # 10 tokens, of which 4 decode
    assert {work.id: work.drafts for work in works} == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_a_step_that_failed_teaches_no_cost() -> None:
    made = scheduler(blocks=64)
    for id in "ab":
        made.add(GenerateRequest(id, [1], 50), 0)
    advance(made)
    made.costs.observe(2, 0, 0, 0.01)
    made.plan(0)
    made.commit({"a": WorkResult([1]), "b": WorkResult(failed=True)}, 9.0)
    assert made.costs.decode_seconds(1) == made.costs.decode_seconds(2) == 0.01  # one decode was left


def test_a_step_is_plain_where_one_is_due() -> None:
    made = Scheduler(paged_cache(4000, BLOCK, 8000), Limits())
    made.add(GenerateRequest("a", [1], 50), 0)
    advance(made)
    made.costs.observe(1, 0, 0, 0.01)
    made.add(GenerateRequest("prompt", [2] * 4000, 1), 0)
    plain: list[bool] = []
    for _ in range(FIRST_PLAIN_AFTER + 2):
        works = made.plan(0, {"a": [7] * 8})
        plain.append([(work.id, len(work.tokens)) for work in works] == [("a", 1)])
        made.commit({work.id: WorkResult([1] if work.samples else []) for work in works}, 0.01)
    assert plain == [*[False] * FIRST_PLAIN_AFTER, True, False]


def test_one_long_prompt_is_no_backlog_but_several_are() -> None:
    """A step of the decode takes 10 ms, a prompt token 1 ms; 15 ms are allowed, and more where prompts queue up."""
    scheduler = Scheduler(paged_cache(4000, BLOCK, 8000), Limits())
    scheduler.add(GenerateRequest("decode", [1], 100), 0.0)
    works, now = {}, 0.0
    for step in range(6):
        if step == 1:
            scheduler.add(GenerateRequest("long", [2] * 3000, 1), now)
        if step == 4:
            scheduler.add(GenerateRequest("other", [3] * 3000, 1), now)
        scheduler.costs.observe(1, 0, 0, 0.01)
        scheduler.costs.observe(0, 100, 0, 0.1)
        works[step] = {work.id: len(work.tokens) for work in scheduler.plan(now)}
        now += (10 + sum(works[step].values()) - 1) / 1000
        scheduler.commit({id: WorkResult([5] if id == "decode" else ()) for id in works[step]}, now)
    # Planted: one that waits counted as a backlog, and its first step was many times as long as all others.
    assert works[1]["long"] == works[3]["long"] == MIN_CHUNK
    assert works[5]["long"] > 5 * MIN_CHUNK


def test_the_load_counts_what_is_left_to_compute() -> None:
    """Prompt tokens that the cache has are none, whether their request runs or waits. Planted: they are counted."""
    scheduler = Scheduler(paged_cache(20, BLOCK, MAX_TOKENS), Limits(step_tokens=8, max_running=2))
    prompt = list(range(1, 13))
    scheduler.add(GenerateRequest("a", prompt, 2), 0.0)
    assert scheduler.load().backlog_tokens == 12
    run(scheduler, 1.0)
    load = scheduler.load()
    assert (load.backlog_tokens, load.running, load.decodes) == (4, 1, 0)
    run(scheduler, 2.0)
    scheduler.add(GenerateRequest("b", [*prompt, 1, 2, 3], 2), 2.0)
    scheduler.add(GenerateRequest("c", [*prompt, 4, 5], 2), 2.0)
    load = scheduler.load()
    assert (load.backlog_tokens, load.decodes, load.waiting, load.most_running) == (3 + 2, 1, 2, 2)
    run(scheduler, 3.0)
    assert scheduler.load().answer_tokens == 2
    assert scheduler.load().backlog_tokens <= 2


def run(scheduler: Scheduler, now: float) -> None:
    works = scheduler.plan(now)
    scheduler.commit({work.id: WorkResult([5] if work.samples else []) for work in works}, now + 0.5)


def shared_engine(loud: int) -> tuple[SimulatedEngine, float]:
    """And the time. It answers one tenant, and knows how long steps take. Another tenant was there before."""
    engine = SimulatedEngine(StepLengths(((1, 0.002), (64, 0.03)), ((1, 0.0002),)), 2000)
    engine.add(GenerateRequest("before", range(64), 1, tenant="quiet"), range(1), 0.0)
    for number in range(loud):
        prompt = range(1000 * number + 100, 1000 * number + 200)
        engine.add(GenerateRequest(f"loud{number}", prompt, 500, tenant="loud"), range(500), 0.0)
    now = 0.0
    while engine.scheduler.running < min(loud, 56) or engine.scheduler.feeds_prompts:
        now = step(engine, now)[1]
        assert now < 5.0, "it feeds no prompts any more"
    return engine, now


def step(engine: SimulatedEngine, now: float) -> tuple[dict[str, int], float]:
    """What is fed, and when it ends."""
    end = engine.begin(now)
    assert end is not None
    fed = {work.id: len(work.tokens) for work in engine.planned}
    engine.end(end)
    return fed, end


def test_long_steps_of_an_engine_that_tenants_share_are_split() -> None:
    """Planted: prompts stay beside decodes, or answers wait until all prompts are computed."""
    (engine, now), prompts = shared_engine(40), {f"long{number}" for number in range(8)}
    for number, id in enumerate(sorted(prompts)):
        start = 10_000_000 + 1000 * number
        engine.add(GenerateRequest(id, range(start, start + 500), 1, tenant="loud"), range(1), now)
    kinds, lengths = list[str](), list[float]()
    for _ in range(20):
        fed, end = step(engine, now)
        kinds.append("p" if fed.keys() <= prompts else "d" if not fed.keys() & prompts else "both")
        lengths.append(end - now)
        now = end
    assert "both" not in kinds and "d" in kinds[2:] and "p" in kinds
    assert max(lengths) < 0.03


def test_some_places_are_kept_from_a_tenant_that_takes_a_large_part() -> None:
    """Planted: it gets all of them."""
    engine, now = shared_engine(70)
    assert engine.scheduler.running == 56 and engine.scheduler.waiting == 14
    engine.add(GenerateRequest("quiet", range(64, 128), 2, tenant="quiet"), range(2), now)
    assert "quiet" in step(engine, now)[0]


def test_a_kept_place_is_not_lost_behind_many_requests_that_may_not_have_it() -> None:
    """Planted: each of them is passed over, and those behind have no turn in the step."""
    engine, now = shared_engine(60)
    for number in range(2 * MAX_PASSED):
        prompt = range(1_000_000 + 1000 * number, 1_000_100 + 1000 * number)
        engine.add(GenerateRequest(f"more{number}", prompt, 500, tenant="loud", priority=-1), range(500), now)
    engine.add(GenerateRequest("quiet", range(64, 128), 2, tenant="quiet"), range(2), now)
    fed = set[str]()
    for _ in range(10):
        found, now = step(engine, now)
        fed |= found.keys()
    assert "quiet" in fed and not any(id.startswith("more") for id in fed)


@pytest.mark.parametrize("waiting", [0, 1])
def test_guesses_go_on_where_tenants_share_an_engine_and_no_prompt_can_be_fed(waiting: int) -> None:
    """Planted: prompts are put off in every step, whether there are any or not, and guesses with them."""
    made = scheduler(40, step_tokens=256, max_running=2)
    for tenant in "ab":
        made.add(GenerateRequest(tenant, [1, 2, 3], 60, tenant=tenant), 0)
    while made.waiting or made.feeds_prompts:
        advance(made)
    for _ in range(5):
        made.costs.observe(2, 0, 0, 0.002)
        made.costs.observe(0, 200, 0, 0.004)
    for number in range(waiting):  # for a place
        made.add(GenerateRequest(f"later{number}", [5, 6, 7], 9, tenant="a"), 0)
    guessed = 0
    for _ in range(6):
        works = made.plan(0, {"a": [7] * 8, "b": [7] * 8})
        guessed += any(work.drafts for work in works)
        made.commit({work.id: WorkResult([1]) for work in works}, 0.0)
    assert guessed >= (3 if waiting else 6)


def test_a_step_for_which_others_rest_ends_with_the_first_prompt_that_does() -> None:
    """Planted: what is left of the step is filled with the next prompt, and the first one waits for that."""
    engine, now = shared_engine(20)
    for id, start in (("one", 10_000), ("two", 20_000)):
        engine.add(GenerateRequest(id, range(start, start + 50), 1, tenant="quiet"), range(1), now)
    fed, now = step(engine, now)
    assert (fed, step(engine, now)[0]) == ({"one": 50}, {"two": 50})


@given(
    st.lists(
        st.tuples(st.sampled_from("aaaab"), st.integers(1, 500), st.integers(1, 60), st.floats(0, 0.05)),
        min_size=1,
        max_size=60,
    )
)
@settings(max_examples=30, deadline=None)
def test_nobody_starves_where_tenants_share_an_engine(arrivals: list[tuple[str, int, int, float]]) -> None:
    """All requests end, and no answer stands still for much longer than it may rest. Planted: prompts that are put off
    come before the answers again and again.
    """
    engine, at, now = SimulatedEngine(StepLengths(((1, 0.002), (64, 0.03)), ((1, 0.0002),)), 2000), 0.0, 0.0
    due = list[tuple[float, GenerateRequest]]()
    for number, (tenant, prompt, answer, gap) in enumerate(arrivals):
        start = 1000 * number
        due.append((at := at + gap, GenerateRequest(f"r{number}", range(start, start + prompt), answer, tenant=tenant)))
    left, last = {request.id for _, request in due}, dict[str, float]()
    while left:
        while due and due[0][0] <= now:
            arrival, request = due.pop(0)
            engine.add(request, range(request.max_new_tokens), arrival)
        if (end := engine.begin(now)) is None:
            now = due[0][0]
            continue
        now, ended = end, engine.end(end)
        for id in ended.sampled:
            assert now - last.get(id, now) < Limits().rest_seconds + 0.15
            last[id] = now
        left -= set(ended.finished)
        engine.scheduler.check()
        assert now < 60, "a request starves"
