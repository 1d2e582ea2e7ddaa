"""A response that goes on after tokens of another engine is the one that was not interrupted, wherever it was cut."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.core import EngineCore
from runtime.engine.in_process import ModelledTime
from runtime.engine.sampling import BatchSampler
from runtime.engine.scheduling.step_costs import StepCosts
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest
from tapeout.errors import RequestError
from tests.answering import KINDS, Whole, served
from tests.chain_engine import ChainEngine
from tests.fake_engine import HistoryEngine
from tests.unit.test_constraints import END, V, compiler

NEW = 30


def core(drafts: int = 0, *, blocks: int | None = None, recurrent: bool = False) -> EngineCore:
    made = (
        ChainEngine(blocks=64, slots=24, snapshot_tokens=8, max_tokens=128, vocab_size=V)
        if recurrent
        else HistoryEngine(V, slots=8, max_tokens=128, block_tokens=4)
    )
    engine = ModelledTime(made, blocks)
    return EngineCore(engine, Limits(max_draft_tokens=drafts), BatchSampler(V, compiler()), clock=engine.clock)


def request(kind: str, id: str = "a", new: int = NEW) -> GenerateRequest:
    known = {"stop_tokens": frozenset({END}), **KINDS[kind]}
    return GenerateRequest(id, [2, 3, 4, 5, 6, 7, 8], new, **known)


def resumed(request: GenerateRequest, tokens: tuple[int, ...]) -> GenerateRequest:
    return replace(request, answered=tokens, prompt_logprobs=None)


@cache
def uninterrupted(kind: str, *, recurrent: bool = False) -> Whole:
    (found,) = served(core(recurrent=recurrent), request(kind))
    return found


@pytest.mark.parametrize("recurrent", [False, True], ids=["paged", "recurrent"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_request_goes_on_after_every_token(kind: str, recurrent: bool) -> None:
    expected = uninterrupted(kind, recurrent=recurrent)
    assert expected.reason in ("stop", "length") and len(expected.tokens) > 1
    for cut in range(1, len(expected.tokens)):
        (found,) = served(core(recurrent=recurrent), resumed(request(kind), expected.tokens[:cut]))
        assert found == expected.after(cut), f"after {cut} tokens"


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, NEW)), min_size=1, max_size=8),
    drafts=st.sampled_from([0, 8]),
    blocks=st.sampled_from([None, 40]),
)
def test_neighbours_drafts_preemption_and_the_cache_change_nothing(
    cuts: list[tuple[str, int]], drafts: int, blocks: int | None
) -> None:
    """``blocks``: few, so that responses that were resumed are preempted, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCosts, "worth", lambda *_: 0.05)
        made = core(drafts, blocks=blocks)
        for number in range(2):  # the second time finds prompts and responses in the cache
            wanted, asked = list[Whole](), list[GenerateRequest]()
            for place, (kind, cut) in enumerate(cuts):
                expected = uninterrupted(kind)
                cut = min(cut, len(expected.tokens) - 1)
                own = request(kind, f"{number}-{place}")
                asked.append(resumed(own, expected.tokens[:cut]) if cut else own)
                wanted.append(expected.after(cut))
            assert served(made, *asked) == wanted


def test_the_prefix_cache_holds_tokens_of_the_response() -> None:
    expected, made = uninterrupted("greedy"), core()
    served(made, request("greedy"))
    before = made.stats()
    served(made, resumed(request("greedy"), expected.tokens[:20]))
    after = made.stats()
    assert after.prefix_queries - before.prefix_queries == 27 and after.prefix_hits - before.prefix_hits == 24
    assert after.prompt_tokens == before.prompt_tokens, "the prompt was counted where the response began"
    assert after.generated_tokens - before.generated_tokens == NEW - 20


def test_a_timeout_of_the_first_token_has_passed_already() -> None:
    made, tokens = core(), uninterrupted("greedy").tokens[:3]
    made.add(replace(resumed(request("greedy"), tokens), first_token_timeout=0.0), made.clock())
    made.add(replace(resumed(request("greedy", "b"), tokens), timeout=0.0), made.clock())
    (ended,) = [delta for delta in made.step(made.clock() + 1).deltas if delta.finish_reason]
    assert (ended.id, ended.finish_reason) == ("b", "timeout")


def test_a_response_that_has_begun_keeps_its_place_in_a_full_queue() -> None:
    engine = HistoryEngine(V, slots=8, max_tokens=128, block_tokens=4)
    made = EngineCore(engine, Limits(max_running=1, max_waiting=1), BatchSampler(V))
    made.add(request("greedy"), 0)
    made.step(0)
    made.add(replace(resumed(request("greedy", "begun"), (9,)), priority=2), 0)
    made.add(request("greedy", "new"), 0)
    (refused,) = made.step(0).refusals
    assert refused.id == "new"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"answered": [1] * NEW}, "30 tokens are answered of 30"),
        ({"answered": [1], "prompt_logprobs": 1}, "prompt_logprobs is 1"),
        ({"answered": [V]}, f"token {V} in answered"),
    ],
    ids=["nothing is left", "scored", "no token"],
)
def test_what_cannot_be_resumed_is_refused(fields: dict[str, object], found: str) -> None:
    with pytest.raises(RequestError, match=found):
        served(core(), replace(request("greedy"), **fields))


def test_a_constraint_that_the_tokens_do_not_meet_fails_the_request_alone() -> None:
    """Tokens of another engine are not trusted to fit."""
    made = core()
    tokens = (4, 5, 6)
    bad, good = served(made, resumed(request("choice"), tokens), request("greedy", "b"))
    assert bad.reason == "error" and good == uninterrupted("greedy")
