"""The core in the caller's process: all answers, what it says of them, and a schedule that no clock changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engines.protocol import Entry, Result
from runtime.engine.core import EngineCore
from runtime.engine.in_process import CoreAnswer, ModelledTime, answer_all, deltas
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest, SamplingSettings
from tapeout.errors import RequestError
from tests.fake_engine import HistoryEngine

BLOCK = 4


class Recorded(HistoryEngine):
    """``batches``: all that it was fed."""

    def __init__(self) -> None:
        super().__init__(12, slots=16, max_tokens=64, block_tokens=BLOCK)
        self.batches: list[list[Entry]] = []

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        self.batches.append([entry._replace(tokens=list(entry.tokens), blocks=list(entry.blocks)) for entry in batch])
        return super().step(batch)


def core_of(engine: HistoryEngine, blocks: int | None = None) -> EngineCore:
    timed = ModelledTime(engine, blocks)
    return EngineCore(timed, Limits(), clock=timed.clock)


def requests(new: int = 40) -> list[GenerateRequest]:
    short = [GenerateRequest(f"short {i}", [1, i + 1], 1) for i in range(6)]
    sampling = SamplingSettings(temperature=1, seed=3)
    return short + [GenerateRequest(f"{i}", [1 + i, 2, 3] * 3, new, sampling) for i in range(5)]


def pressed(blocks: int | None) -> tuple[Recorded, list[CoreAnswer], EngineCore]:
    engine = Recorded()
    core = core_of(engine, blocks)
    answer_all(core, requests()[:6])  # short answers, so more is admitted than fits in the end
    return engine, answer_all(core, requests()[6:]), core


def test_preempted_requests_are_counted_and_answer_as_they_would_alone() -> None:
    _, answers, core = pressed(16)
    assert core.scheduler.preemptions == sum(answer.preempted for answer in answers) > 0
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in pressed(None)[1]]
    assert {answer.reason for answer in answers} == {"length"}


def test_the_same_requests_give_the_same_steps() -> None:
    (one, first, _), (other, second, _) = pressed(16), pressed(16)
    assert one.batches == other.batches and first == second


def test_accepted_drafts_are_counted() -> None:
    core = core_of(HistoryEngine(12, slots=2, max_tokens=64, block_tokens=BLOCK))
    always = SamplingSettings(logit_bias={5: 100})
    answers = answer_all(core, [GenerateRequest("a", [1, 2, 3], 30, always)])
    assert core.stats().accepted_tokens == sum(answer.accepted for answer in answers) > 0


def test_a_reader_that_stops_leaves_nothing_behind() -> None:
    core = core_of(HistoryEngine(12, slots=2, max_tokens=64, block_tokens=BLOCK))
    steps = deltas(core, GenerateRequest("a", [1, 2, 3], 30))
    assert next(steps).tokens
    steps.close()
    core.scheduler.check()
    assert not core.busy and not core.scheduler.cache.held
    assert sum(len(delta.tokens) for delta in deltas(core, GenerateRequest("a", [1, 2, 3], 30))) == 30


def test_what_is_refused_says_so() -> None:
    core = core_of(HistoryEngine(12))
    with pytest.raises(RequestError, match="65 prompt tokens"):
        list(deltas(core, GenerateRequest("a", [1] * 65, 1)))
    assert not core.busy
    refused, answered = answer_all(core, [GenerateRequest("a", [1] * 65, 1), GenerateRequest("b", [1], 1)])
    assert refused.reason == "error" and "65 prompt tokens" in refused.error
    assert answered.reason == "length"
