"""How many engines a fleet should have: a pure function, over any course of loads."""

from __future__ import annotations

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.core import EngineCore
from runtime.gateway.fleet.scaling import (
    BUSY,
    DecodeScalingSettings,
    EngineReport,
    FleetScaler,
    ReplicaLoad,
    ScalingSettings,
    ScalingState,
    bounds,
    scaled,
    used_share,
)
from runtime.wire.limits import Limits
from runtime.wire.messages import EngineLoad, EngineStats, GenerateRequest
from tests.fake_engine import HistoryEngine

SECONDS = st.floats(0, 100)
LOADS = st.lists(st.builds(ReplicaLoad, SECONDS, st.floats(0, 2)), min_size=1, max_size=8)
COURSES = st.lists(st.tuples(LOADS, st.floats(0.1, 30)), min_size=1, max_size=20)


@st.composite
def settings(draw: st.DrawFn) -> ScalingSettings:
    least = draw(st.integers(1, 6))
    most = draw(st.integers(least, 12))
    return ScalingSettings(
        least=least,
        most=most,
        standby=draw(st.integers(0, min(2, most - 1))),
        first_token_seconds=draw(st.floats(0.05, 10)),
        hold_seconds=draw(st.floats(0, 100)),
    )


@given(settings(), COURSES, st.floats(0, 30))
def test_there_are_never_too_few_nor_too_many_and_one_goes_at_a_time(
    known: ScalingSettings, course: list[tuple[list[ReplicaLoad], float]], cold: float
) -> None:
    (least, most), state, now = bounds(known), ScalingState(bounds(known)[0]), 0.0
    went = 0.0  # when the last one went
    for loads, seconds in course:
        before, now = state, now + seconds
        state = scaled(known, loads, cold, state, now)
        assert least <= state.needed <= most
        if state.needed < before.needed:
            assert state.needed == before.needed - 1 and before.calm_since is not None
            assert now - max(before.calm_since, went) >= known.hold_seconds
            went = now


@given(settings(), LOADS, st.integers(1, 12))
def test_the_target_is_met_and_nobody_is_too_busy_while_there_may_be_more(
    known: ScalingSettings, loads: list[ReplicaLoad], needed: int
) -> None:
    (_, most), after = bounds(known), scaled(known, loads, 0.0, ScalingState(needed), 0.0).needed
    if after < most:
        assert sum(load.seconds for load in loads) <= after * known.first_token_seconds * 1.001
        assert sum(load.used for load in loads) <= after * BUSY * 1.001


@given(settings(), LOADS, st.integers(1, 12), SECONDS)
def test_more_load_never_means_fewer_engines(
    known: ScalingSettings, loads: list[ReplicaLoad], needed: int, more: float
) -> None:
    state = ScalingState(needed, at=0.0)
    loaded = [loads[0]._replace(seconds=loads[0].seconds + more), *loads[1:]]
    one, other = (scaled(known, found, 5.0, state, 1.0).needed for found in (loads, loaded))
    assert other >= one


@given(settings(), st.integers(1, 12))
def test_an_idle_fleet_ends_at_the_least(known: ScalingSettings, needed: int) -> None:
    state = ScalingState(min(needed, bounds(known)[1]))
    for number in range(30):
        state = scaled(known, [ReplicaLoad(0.0, 0.0)] * state.needed, 5.0, state, number * (known.hold_seconds + 1))
    assert state.needed == bounds(known)[0]


@given(settings(), st.floats(0.01, 8), st.integers(1, 12))
def test_a_steady_load_is_not_answered_with_more_and_fewer_in_turn(
    known: ScalingSettings, work: float, needed: int
) -> None:
    """The same work, shared by however many there are; once it was scaled up, it goes down at most, and then stays."""
    state, course = ScalingState(needed), list[int]()
    for number in range(60):
        here = state.needed
        state = scaled(known, [ReplicaLoad(0.0, work / here)] * here, 5.0, state, number * (known.hold_seconds + 1))
        course.append(state.needed)
    assert course == [course[0], *sorted(course[1:], reverse=True)] and len({*course[-20:]}) == 1


def test_a_queue_that_grows_counts_with_the_time_that_a_new_engine_takes() -> None:
    known, steady = ScalingSettings(most=9), ScalingState(1, queued=0.5, growth=0.0, at=0.0)
    growing = ScalingState(1, queued=0.5, growth=0.5, at=0.0)
    loads = [ReplicaLoad(0.75, 0.1)]
    assert scaled(known, loads, 10.0, growing, 0.5).needed == 1 + ceil(0.75 + 0.5 * 10 - 1)
    assert scaled(known, loads, 0.0, growing, 0.5).needed == scaled(known, loads, 0.0, steady, 0.5).needed == 1
    falling = ScalingState(1, queued=9.0, growth=-1.0, at=0.0)
    assert scaled(known, [ReplicaLoad(8.5, 0.1)], 10.0, falling, 0.5).needed == 1


def test_without_a_report_everything_stays() -> None:
    known = ScalingSettings(least=2, most=5, hold_seconds=0)
    assert scaled(known, [], 5.0, ScalingState(4), 9.0) == ScalingState(4)
    assert scaled(known, [], 5.0, ScalingState(1), 9.0).needed == 2


def test_standby_comes_on_top_and_within_the_most() -> None:
    scaler = FleetScaler(ScalingSettings(least=2, most=3, standby=1))
    assert (scaler.state.needed, scaler.wanted) == (1, 2)
    full = EngineReport(EngineLoad(running=4, most_running=4), EngineStats())
    assert scaler.look({"a": full, "b": full}, 1.0) == 3 and scaler.state.needed == 2


def test_an_engine_is_as_busy_as_its_places_or_its_prompts() -> None:
    load = EngineLoad(running=2, most_running=8, prompt_seconds=0.001)
    before = EngineStats(prefix_queries=1000, prefix_hits=500)
    after = EngineStats(prefix_queries=3000, prefix_hits=1500)
    assert used_share(None, after, load, 2.0) == 0.25
    assert used_share(before, after, load, 2.0) == 0.5
    assert used_share(before, after, load._replace(running=6), 2.0) == 0.75


def test_requests_that_come_from_another_engine_count_by_what_is_computed_of_them() -> None:
    """As an engine counts them: their prompts count elsewhere, their cached tokens here.

    Planted: the difference between prompts that were begun here and all hits.
    """
    core = EngineCore(HistoryEngine(16, slots=2, max_tokens=64, block_tokens=4), Limits(max_running=2))
    load = EngineLoad(running=0, most_running=8, prompt_seconds=0.001)
    counted, shares = [core.stats()], list[float]()
    for id in ("computed", "cached"):
        core.add(GenerateRequest(id, [5] * 24, 16, answered=(1,) * 9), 0.0)
        while core.busy:
            core.step(0.0)
        counted.append(core.stats())
        shares.append(used_share(counted[-2], counted[-1], load, 1.0))
    assert shares == [0.033, 0.001]


def test_one_look_a_second_and_the_slowest_cold_start_counts() -> None:
    scaler = FleetScaler(ScalingSettings(most=9, first_token_seconds=1.0))

    def report(tokens: int, cold: float = 0.0) -> EngineReport:
        return EngineReport(EngineLoad(backlog_tokens=tokens, prompt_seconds=0.001), EngineStats(), cold)

    assert scaler.look({"a": report(0)}, 0.0) == 1
    assert scaler.look({"a": report(5000)}, 0.5) == 1  # too soon after the last look
    assert scaler.look({"a": report(900, 1.0), "b": report(0, 20.0)}, 1.0) == 5  # 0.9 + 0.16 a second for 20 s


def decoding(decodes: int, base: float = 0.02, each: float = 0.001, **stats: int) -> EngineReport:
    """An engine of 64 places whose steps take ``base`` seconds and ``each`` for every answer."""
    seconds = base + each * decodes if decodes else 0.0
    load = EngineLoad(decodes=decodes, running=decodes, most_running=64, decode_seconds=seconds)
    return EngineReport(load, EngineStats(running=decodes, **stats))


def test_engines_for_what_follows_are_more_where_gaps_are_long_or_caches_full() -> None:
    """Not where a prompt waits somewhere. Planted: the queue of prompts counts, and the share of blocks does not."""
    known = DecodeScalingSettings(least=1, most=8, token_seconds=0.05)
    assert FleetScaler(known).look({"a": decoding(20)}, 0.0) == 1
    assert FleetScaler(known).look({"a": decoding(40)}, 0.0) == 2  # 60 ms
    assert FleetScaler(known).look({"a": decoding(52, each=0)}, 0.0) == 2  # places
    assert FleetScaler(known).look({"a": decoding(10, blocks=100, blocks_held=85)}, 0.0) == 2
    assert FleetScaler(known).look({"a": decoding(10, blocks=100, blocks_cached=100)}, 0.0) == 1
    assert FleetScaler(known).look({"a": decoding(10, slots=10, slots_held=9)}, 0.0) == 2
    backlog = decoding(10)._replace(load=EngineLoad(backlog_tokens=9000, chunk_tokens=8, prompt_seconds=0.001))
    assert FleetScaler(known).look({"a": backlog}, 0.0) == 1
    assert FleetScaler(ScalingSettings(most=8)).look({"a": backlog}, 0.0) == 8


@given(st.integers(1, 400), st.floats(0.001, 0.03), st.floats(0.0001, 0.002), st.integers(1, 12))
def test_a_steady_number_of_answers_ends_at_a_number_of_engines_that_holds_the_gap(
    answers: int, base: float, each: float, needed: int
) -> None:
    """Also from too many: one less is tried only where no step can become too long by it."""
    known = DecodeScalingSettings(least=1, most=12, token_seconds=0.05, hold_seconds=10)
    state, course = ScalingState(needed), list[int]()
    for number in range(40):
        here = state.needed
        reports = [decoding(ceil(answers / here), base, each)] * here
        state = scaled(known, [known.load(None, one, 1.0) for one in reports], 5.0, state, number * 11.0)
        course.append(state.needed)
    assert len({*course[-5:]}) == 1
    most = base + each * ceil(answers / state.needed)
    assert state.needed == 12 or most <= known.token_seconds * 1.001
    assert course[20:] == sorted(course[20:], reverse=True), "no engine comes again that has gone"
