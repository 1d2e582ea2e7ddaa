"""Which engine a gateway prefers: by what each has measured, what waits there, and what it has of the prompt."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.gateway.routing.choice import NEAR, NEAR_SECONDS, SOLE_COPY, EngineOption, Speed, ranked
from runtime.gateway.routing.prefixes import PrefixUses
from runtime.gateway.routing.router import FleetRouter
from runtime.wire.block_keys import block_keys
from runtime.wire.messages import (
    KEY_BYTES,
    EngineLoad,
    EngineStats,
    GenerateRequest,
    KeyChanges,
    RoutingReport,
    StepReport,
)

BLOCK = 4
PROMPT = list(range(1, 42))  # ten full blocks and a token
IDLE = EngineLoad(chunk_tokens=256, prompt_seconds=0.001, decode_seconds=0.0, most_running=4, answer_tokens=100)
names = st.text("abcdef", min_size=1, max_size=4)


class Told:
    """A router, and engines that say what a test wants."""

    def __init__(self, *engines: str, kind: str = "") -> None:
        self.router, self.turns, self.numbers = FleetRouter(), dict[str, int](), Counter[str]()
        for engine in engines:
            self.turns[engine] = self.router.join(engine, BLOCK, kind)

    def say(self, engine: str, load: EngineLoad = IDLE, keys: list[bytes] | None = None, received: int = 0) -> None:
        published = b"".join(key[:KEY_BYTES] for key in keys or ())
        number = self.numbers[engine]
        self.numbers[engine] += 1
        report = RoutingReport(
            self.turns[engine], number, not number, 0, KeyChanges(published), KeyChanges(), received, load
        )
        assert self.router.heard(engine, StepReport((), EngineStats(blocks=20), (), report)) is None

    def order(self, request: GenerateRequest, session: str = "") -> list[str]:
        return [option.engine for option in self.router.choose(request, list(self.turns), session)]


def request(prompt: list[int] = PROMPT, salt: bytes = b"", scored: bool = False) -> GenerateRequest:
    return GenerateRequest("r", prompt, 5, cache_salt=salt, prompt_logprobs=0 if scored else None)


def test_the_engine_that_has_the_prompt_is_first_until_its_backlog_outweighs_that() -> None:
    told = Told("a", "b", "c")
    told.say("b", keys=block_keys(PROMPT, BLOCK))
    for engine in "ac":
        told.say(engine)
    best = told.router.choose(request(), ["a", "b", "c"])[0]
    assert (best.engine, best.tokens) == ("b", 1), "ten blocks are cached, and the last token is computed in any case"
    least = (1 + SOLE_COPY) * 40  # what the others compute, and what a second copy counts
    told.say("b", IDLE._replace(backlog_tokens=int(least / NEAR) - 10))
    assert told.order(request())[0] == "b"
    told.say("b", IDLE._replace(backlog_tokens=int(NEAR * least) + 10))
    assert told.order(request())[-1] == "b"


def test_what_two_engines_have_is_no_sole_copy() -> None:
    """Planted: a prompt that stays where it is however many others have it."""
    told = Told("a", "b", "c")
    for engine in "ab":
        told.say(engine, IDLE._replace(backlog_tokens=100), block_keys(PROMPT, BLOCK))
    told.say("c")
    assert told.order(request())[0] == "c"
    told = Told("a", "b", "c")
    told.say("a", IDLE._replace(backlog_tokens=100), block_keys(PROMPT, BLOCK))
    told.say("b", IDLE._replace(backlog_tokens=100), block_keys(PROMPT, BLOCK)[:1])
    told.say("c")
    assert told.order(request())[0] == "a"


def test_what_many_conversations_begin_with_is_soon_everywhere() -> None:
    """Planted: uses that nobody counts, so that a system prompt draws all conversations to one engine, and a prefix
    that counts as there where a conversation goes on.
    """
    told = Told("a", "b")
    told.say("a", IDLE._replace(backlog_tokens=3), block_keys(PROMPT, BLOCK))
    told.say("b")
    talks = [request([*PROMPT[:40], 100 + number, *PROMPT]) for number in range(3)]
    for talk in talks[:2]:
        best = told.router.choose(talk, ["a", "b"])[0]
        assert best.engine == "a"
        told.router.sent(best)
    told.say("a", IDLE._replace(backlog_tokens=90), received=2)
    best = told.router.choose(talks[2], ["a", "b"])[0]
    assert (best.engine, best.tokens) == ("b", len(talks[2].prompt)), "as often as there are engines"
    shorter = told.router.choose(request(PROMPT[:37]), ["a", "b"])[0]
    assert shorter.engine == "a", "this one goes on from another block"


def test_uses_of_prefixes_are_bounded_and_the_latest() -> None:
    uses, model = PrefixUses(most=3), OrderedDict[bytes, int]()
    draw = Random(0)
    for _ in range(300):
        key = bytes([draw.randrange(6)]) * KEY_BYTES
        uses.add(key + b"more")
        model[key] = model.pop(key, 0) + 1
        while len(model) > 3:
            model.popitem(last=False)
        assert [uses.of(bytes([number]) * KEY_BYTES) for number in range(6)] == [
            model.get(bytes([number]) * KEY_BYTES, 0) for number in range(6)
        ]
        assert len(uses) <= 3


def test_a_prefix_of_another_salt_and_a_scored_prompt_are_computed_everywhere() -> None:
    """Planted: keys without the salt, and hits for a prompt whose logits are all wanted."""
    told = Told("a", "b")
    told.say("a", IDLE._replace(backlog_tokens=3), block_keys(PROMPT, BLOCK))
    told.say("b")
    assert told.order(request()) == ["a", "b"]
    for other in (request(salt=b"other"), request(scored=True)):
        assert {option.tokens for option in told.router.choose(other, ["a", "b"])} == {len(PROMPT)}


FETCHES = IDLE._replace(fetch_seconds=0.0005)


def test_a_free_engine_fetches_what_a_busy_one_has() -> None:
    """Planted: a fetch that costs nothing, so that blocks leave an idle engine, or one from the engine itself."""
    told = Told("a", "b", "c", kind="digest v4")
    told.say("a", FETCHES, block_keys(PROMPT, BLOCK))
    told.say("b", FETCHES, block_keys(PROMPT, BLOCK)[:4])
    told.say("c", FETCHES._replace(fetch_seconds=0.01))
    best = told.router.choose(request(), ["a", "b", "c"])
    assert (best[0].engine, best[0].source, best[0].tokens) == ("a", "", 1), "it is not busy"
    assert (best[1].engine, best[1].source, best[1].tokens) == ("b", "a", 1)
    assert (best[2].engine, best[2].source, best[2].tokens) == ("c", "", len(PROMPT)), "its link is too slow"
    told.say("a", FETCHES._replace(backlog_tokens=60))
    assert not any(option.source for option in told.router.choose(request(), ["a", "b", "c"])), (
        "it answers after a step"
    )
    told.say("a", FETCHES._replace(backlog_tokens=60, chunk_tokens=4))
    assert told.router.choose(request(), ["a", "b", "c"])[0].source == "a"
    scored = told.router.choose(request(scored=True), ["a", "b", "c"])
    assert not any(option.source for option in scored)


def test_an_answer_does_not_change_over_to_wait_for_the_end_of_others() -> None:
    """Planted: an engine for what follows that counts as free however many run there."""
    told, asked = Told("prompts", "answers", kind="digest v4"), replace(request(), answered=(1,), max_new_tokens=200)
    free = IDLE._replace(fetch_seconds=0.0005)
    for measured in (free, free._replace(decode_seconds=0.01)):
        told.say("prompts", measured)
        told.say("answers", measured._replace(running=3))
        assert told.router.hand_over_pays(asked, "prompts", "answers")
        told.say("answers", measured._replace(running=4, waiting=20))
        assert not told.router.hand_over_pays(asked, "prompts", "answers")
    told.say("answers", measured._replace(running=3))
    told.router.sent(EngineOption("answers", 0.0, 1))
    told.say("prompts", free)
    assert not told.router.hand_over_pays(asked, "prompts", "answers"), "what is on its way counts"


def test_blocks_do_not_move_between_engines_of_other_kinds() -> None:
    for kinds in (("digest v4", "digest v3"), ("", "")):
        told = Told()
        for engine, kind in zip("ab", kinds, strict=True):
            told.turns[engine] = told.router.join(engine, BLOCK, kind)
        told.say("a", FETCHES._replace(backlog_tokens=500), block_keys(PROMPT, BLOCK))
        told.say("b", FETCHES)
        assert [option.source for option in told.router.choose(request(), ["a", "b"])] == ["", ""]


def test_a_faster_engine_takes_more_without_weights() -> None:
    told = Told("fast", "slow")
    told.say("fast", IDLE._replace(backlog_tokens=100))
    told.say("slow", IDLE._replace(prompt_seconds=0.01))
    assert told.order(request()) == ["fast", "slow"]


def test_decodes_and_full_engines_count() -> None:
    busy = IDLE._replace(decodes=3, running=3, chunk_tokens=8, decode_seconds=0.01)
    assert Speed.of(busy).seconds(40) > Speed.of(IDLE).seconds(40)
    full = busy._replace(running=4)
    assert Speed.of(full).seconds(40) > Speed.of(busy).seconds(40) + 0.2, "an answer of 100 steps must end first"
    assert Speed.of(busy, sent=1).wait == Speed.of(full).wait


def test_what_was_sent_counts_until_the_engine_has_seen_it() -> None:
    told = Told("a", "b")
    told.say("a")
    told.say("b")
    first = told.router.choose(request(), ["a", "b"])[0]
    told.router.sent(first)
    other = "b" if first.engine == "a" else "a"
    assert told.order(request()) == [other, first.engine]
    told.say(first.engine, received=0)
    assert told.order(request()) == [other, first.engine], "the report was made before the request came"
    told.say(first.engine, received=1)
    assert told.order(request())[0] == told.order(request())[0] and not told.router._engines[first.engine].unseen


def test_prompts_that_go_first_wait_for_the_step_that_runs_and_for_each_other() -> None:
    """Planted: the backlog of the tenant that rests counts, or steps end at once."""
    told, now = Told("a", "b"), 100.0
    told.router = FleetRouter(lambda: now)
    told.turns = {engine: told.router.join(engine, BLOCK) for engine in "ab"}
    full = IDLE._replace(running=4, waiting=9, backlog_tokens=900, large=("loud",))
    told.say("a", full._replace(step_seconds=0.05))
    told.say("b", full._replace(step_seconds=0.02, backlog_tokens=2000, waiting=20))
    quiet, loud = (replace(request(), tenant=tenant) for tenant in ("quiet", "loud"))
    assert (told.order(quiet), told.order(loud)) == (["b", "a"], ["a", "b"])
    best = told.router.choose(quiet, "ab")[0]
    assert best.seconds == pytest.approx(0.02 + 0.001 * len(PROMPT))
    told.router.sent(best)
    assert told.order(quiet) == ["a", "b"], "41 tokens of a tenant that goes first are on their way there"
    now = 100.05
    told.say("b", full._replace(step_seconds=0.01, others_tokens=30), received=1)
    assert told.order(quiet) == ["a", "b"], "they wait there"
    told.say("b", full._replace(step_seconds=0.0), received=1)
    told.say("a", full._replace(step_seconds=0.01))
    assert told.order(quiet) == ["b", "a"]


def test_an_engine_that_has_measured_nothing_is_as_fast_as_the_others() -> None:
    told = Told("new", "old")
    told.say("new", EngineLoad())
    told.say("old", IDLE._replace(backlog_tokens=40))
    assert told.order(request()) == ["new", "old"]


def test_a_new_connection_forgets_what_was_known() -> None:
    told = Told("a", "b")
    told.say("a", keys=block_keys(PROMPT, BLOCK))
    told.say("b")
    told.turns["a"] = told.router.join("a", BLOCK)
    assert {option.tokens for option in told.router.choose(request(), ["a", "b"])} == {len(PROMPT)}
    told.router.leave("a")
    assert [option.engine for option in told.router.choose(request(), ["b"])] == ["b"]


def test_sessions_and_first_blocks_break_ties_alone() -> None:
    told = Told(*"abcdefgh")
    for engine in told.turns:
        told.say(engine)
    first = Counter(told.order(request(), session=f"s{number}")[0] for number in range(400))
    assert len(first) == 8 and max(first.values()) < 100, "sessions spread"
    assert told.order(request(), "s1") == told.order(request([9, *PROMPT]), "s1"), "a session stays"
    assert told.order(request()) == told.order(request([*PROMPT, 7])), "prompts that begin alike meet"
    told.say("a", keys=block_keys(PROMPT, BLOCK))
    assert {told.order(request(), session=f"s{number}")[0] for number in range(40)} == {"a"}


def test_near_ties_go_where_the_fewest_requests_are() -> None:
    """Planted: the hash of the session decides among all that are near."""
    told = Told(*"abcd")
    for engine in told.turns:
        told.say(engine, IDLE._replace(running=2))
    told.say("c", IDLE._replace(running=1))
    sessions = [f"s{number}" for number in range(40)]
    assert {told.order(request(), session)[0] for session in sessions} == {"c"}
    told.say("b", IDLE._replace(running=0, backlog_tokens=30))
    assert {told.order(request(), session)[0] for session in sessions} == {"c"}, "its backlog is no near tie"
    sent = told.router.choose(request([1]), list("abcd"))[0]
    told.router.sent(sent)
    assert sent.engine == "c" and told.router._engines["c"].requests == 2, "what is on its way counts"


def test_what_is_answered_counts_as_prompt() -> None:
    """A request that goes on elsewhere. Planted: its prompt alone is looked up, and its tokens are not counted."""
    told = Told("a", "b")
    told.say("a", keys=block_keys(PROMPT[:21], BLOCK))
    told.say("b", keys=block_keys(PROMPT, BLOCK))
    resumed = GenerateRequest("r", PROMPT[:21], 30, answered=PROMPT[21:])
    options = told.router.choose(resumed, ["a", "b"])
    assert [(option.engine, option.tokens) for option in options] == [("b", 1), ("a", len(PROMPT) - 20)]


def test_a_session_may_be_any_text() -> None:
    told = Told("a", "b")
    assert sorted(told.order(request(), "\ud800")) == ["a", "b"]


def test_prompts_without_a_full_block_spread() -> None:
    told = Told(*"abcd")
    assert len({told.order(request([number]))[0] for number in range(60)}) == 4


@given(st.dictionaries(names, st.floats(0, 10), min_size=1, max_size=9), st.binary(max_size=8), st.data())
def test_ranked_is_a_permutation_that_keeps_ties_when_others_leave(
    seconds: dict[str, float], tie: bytes, data: st.DataObject
) -> None:
    options = [EngineOption(engine, time, 1) for engine, time in seconds.items()]
    order = ranked(options, tie)
    assert sorted(order) == sorted(options)
    limit = NEAR * min(seconds.values()) + NEAR_SECONDS
    assert order[0].seconds <= limit
    rest = [option.seconds for option in order if option.seconds > limit]
    assert rest == sorted(rest) and order[len(order) - len(rest) :] == [o for o in order if o.seconds > limit]
    best = min(options, key=lambda option: option.seconds)
    gone = data.draw(st.sampled_from(options))
    if gone != best:
        assert ranked([option for option in options if option != gone], tie) == [o for o in order if o != gone]


def test_nothing_to_choose_from_is_no_error() -> None:
    assert ranked([], b"") == []
