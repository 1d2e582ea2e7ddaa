"""The simulator of a fleet: a seed repeats all figures, nothing is lost, and policies do what they are called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.fleet import decision, fairness, real, run
from benchmarks.fleet.bundles import BUNDLES
from benchmarks.fleet.page import Compared, bars, real_bars
from benchmarks.fleet.policies import POLICIES, MostCached, RoundRobin, SessionHash
from benchmarks.fleet.run import compare
from benchmarks.fleet.traffic import single_turn
from runtime.gateway.fleet.client import FleetClient
from runtime.simulation.engine import MAX_TOKENS, SimulatedEngine
from runtime.simulation.fleet import FleetFigures, FleetShape, FleetSimulation, simulate
from runtime.simulation.routing import Clock, ExactRouting
from runtime.simulation.traffic import Conversation, Traffic, Turn, multi_turn, read_trace
from runtime.wire.messages import Delta, GenerateRequest
from tapeout.errors import ExitCode, RequestError

LENGTHS, SHAPE = BUNDLES["default"], FleetShape(engines=3, cache_tokens=8192)
TALKS = multi_turn(3, seconds=6, rate=2, turns=3, think_seconds=1)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_and_a_seed_repeats_all_figures(policy: str) -> None:
    """The caches are too small for all conversations, so blocks are evicted and requests preempted."""
    found = simulate(TALKS, LENGTHS, SHAPE, POLICIES[policy])
    assert found == simulate(TALKS, LENGTHS, SHAPE, POLICIES[policy])
    assert 0.8 * TALKS.turns <= found.requests <= TALKS.turns
    assert 0 < found.ttft_p50 <= found.ttft_p99 and 0 <= found.hits <= 1 and found.tokens_per_second > 0


def test_the_index_of_ours_is_what_the_pools_hold() -> None:
    made: list[tuple[ExactRouting, Sequence[SimulatedEngine]]] = []

    def kept(engines: Sequence[SimulatedEngine], seed: int, clock: Clock) -> ExactRouting:
        made.append((policy := ExactRouting(engines, seed, clock), engines))
        return policy

    simulate(TALKS, LENGTHS, FleetShape(engines=3, cache_tokens=4096), kept)
    ((policy, engines),) = made
    policy.router.index.check()
    distinct = {key for engine in engines for key in engine.pools.paged.pool.keys}
    assert distinct and len(policy.router.index) == len(distinct)
    for engine in engines:
        engine.scheduler.check()
        assert not engine.scheduler.running + engine.scheduler.waiting


def test_answers_change_over_from_engines_for_prompts_to_those_for_decoding() -> None:
    """Planted: an answer that stays where its prompt was computed, and one whose prompt is computed again."""
    traffic = single_turn(0, seconds=4, rate=20, prompt_tokens=200, answer_tokens=60)
    shape = FleetShape(4, 60_000, prefill=2)
    simulation = FleetSimulation(traffic, BUNDLES["default"], shape)
    fed = [0, 0]  # tokens of prompts, by pool

    def seen(engine: SimulatedEngine) -> None:
        begin = engine.begin

        def begun(now: float) -> float | None:
            end = begin(now)
            fed[engine.engine_pool == "decode"] += sum(
                len(work.tokens) for work in engine.planned if len(work.tokens) > 1
            )
            return end

        engine.begin = begun  # type: ignore[method-assign]

    for engine in simulation._engines:
        seen(engine)
    figures = simulation.run()
    assert figures == FleetSimulation(traffic, BUNDLES["default"], shape).run() and figures.requests > 50
    assert min(engine.steps for engine in simulation._engines) > 100 and 0 < fed[1] < 0.4 * fed[0]


def test_conversations_find_their_blocks_where_they_were_answered() -> None:
    roomy = FleetShape(engines=3)
    hits = {
        policy: simulate(TALKS, LENGTHS, roomy, POLICIES[policy]).hits
        for policy in ("round robin", "exact", "most cached")
    }
    assert hits["exact"] > hits["round robin"] + 0.1
    assert hits["exact"] > 0.9 * hits["most cached"]


def test_policies_do_what_they_are_called() -> None:
    engines = [SimulatedEngine(LENGTHS, 32) for _ in range(3)]
    request = GenerateRequest("r", list(range(200)), 5)
    robin = RoundRobin(engines, 0, float)
    assert sorted(robin.choose(request, "s") for _ in range(3)) == [0, 1, 2]
    hashed = SessionHash(engines, 0, float)
    assert len({hashed.choose(request, "s") for _ in range(5)}) == 1
    assert len({hashed.choose(request, f"s{number}") for number in range(30)}) == 3
    engines[1].add(request, range(5), 0.0)
    while engines[1].begin(0.0) is not None:
        engines[1].end(1.0)
    assert {MostCached(engines, seed, float).choose(request, "s") for seed in range(3)} == {1}


def test_a_step_is_as_long_as_its_tokens_say() -> None:
    engine = SimulatedEngine(LENGTHS, 32)
    engine.add(GenerateRequest("r", list(range(100)), 2), range(2), 0.0)
    end = engine.begin(1.0)
    assert end == pytest.approx(1 + LENGTHS.seconds(0, 100))
    assert end is not None and engine.end(end).first == {"r": 0}
    later = engine.begin(end)
    assert later is not None and later - end == pytest.approx(LENGTHS.seconds(1, 0))
    assert engine.end(later).finished == ["r"] and engine.begin(later) is None


def test_a_conversation_repeats_its_history() -> None:
    for conversation in TALKS.conversations:
        for before, after in zip(conversation.turns, conversation.turns[1:], strict=False):
            history = [*before.tokens(), *before.answer]
            assert after.tokens()[: len(history)] == history
        assert max(turn.prompt_tokens + len(turn.answer) for turn in conversation.turns) <= MAX_TOKENS
    assert multi_turn(3, seconds=6, rate=2) == multi_turn(3, seconds=6, rate=2) != multi_turn(4, seconds=6, rate=2)


def test_bursts_share_nothing() -> None:
    burst = single_turn(1, seconds=5, rate=4, prompt_tokens=100, answer_tokens=20)
    assert burst.turns > 5
    assert simulate(burst, LENGTHS, SHAPE).hits == 0


# --- traces, of which none is part of the project --------------------------------------------------------------------


def test_a_trace_in_mooncakes_format(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    entries = [
        {"timestamp": 2000, "input_length": 1200, "output_length": 64, "hash_ids": [0, 5, 7]},
        {"timestamp": 1000, "input_length": 600, "output_length": 32, "hash_ids": [0, 5]},
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    workload = read_trace(path, shrink=4)
    first, second = workload.conversations
    assert (workload.name, first.start, second.start) == ("talks", 0.0, 1.0) and first.name == second.name
    short, long = first.turns[0], second.turns[0]
    assert (short.prompt_tokens, len(short.answer), long.prompt_tokens) == (150, 8, 300)
    assert long.tokens()[:150] == short.tokens(), "equal ids are equal tokens"
    assert len(set(long.tokens())) == 300 and not set(long.answer) & set(short.answer)


def test_a_trace_in_azures_format(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    path.write_text(
        f"{head}2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.9799600,31,8\n2023-11-16 18:17:05.0,9000,0\n"
    )
    workload = read_trace(path, shrink=2)
    assert [conversation.start for conversation in workload.conversations] == pytest.approx([0, 1, 1.02004])
    lengths = [(turn.prompt_tokens, len(turn.answer)) for c in workload.conversations for turn in c.turns]
    assert lengths == [(2043, 5), (15, 4), (2047, 1)], "no more than there are positions"
    assert len(workload.faster(2).first(0.5).conversations) == 1


@pytest.mark.parametrize(("name", "content"), [("x.txt", "1"), ("x.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n")])
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match="expected"):
        read_trace(tmp_path / name)


# --- bars ------------------------------------------------------------------------------------------------------------


def figures(p50: float, p99: float, hits: float = 0.5) -> FleetFigures:
    return FleetFigures(100, p50, p99, 1.0, 2.0, hits, 0.9, 100.0, 0.5, 1)


def test_bars_hold_and_are_missed() -> None:
    """Planted: the mean of the others instead of the best, and the bar of 70 % at every load."""
    rivals = {"round robin": figures(100, 400), "least load": figures(90, 500)}
    others = {**rivals, "most cached": figures(10, 90, 0.52)}
    good = Compared("w", 0.7, 9, {**others, "exact": figures(90, 101)})
    assert [(bar.what, bar.holds) for bar in bars([good])] == [
        ("w at 70%: P99 TTFT", False),
        ("w at 70%: TTFT, of the best of round robin, least load and session hash", True),
        ("w at 70%: hits, of most cached", False),
    ]
    assert "0.25 of round robin, 0.20 of least load" in bars([good])[0].found
    best = Compared("w", 0.7, 9, {**rivals, "exact": figures(96, 90)})
    assert [bar.holds for bar in bars([best])] == [True, False]
    other = Compared("w", None, 9, {**rivals, "exact": figures(94, 90)})
    assert [bar.holds for bar in bars([other])] == [True]
    assert bars([Compared("w", None, 9, others)]) == []


def test_the_command_writes_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LOADS", (0.7,))
    path, written_page = tmp_path / "fleet.json", tmp_path / "fleet.md"
    words = ["--engines", "2", "--seconds", "4", "--policies", "round robin", "exact"]
    words += ["--json", str(path), "--page", str(written_page)]
    monkeypatch.setattr(run, "decision", lambda: decision.decision(2, 200, 100))
    monkeypatch.setattr(fairness, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(run, "fairness", lambda gateways, seed: fairness.fairness(gateways, 2.0, seed))
    assert run.main(words) == ExitCode.PASS
    printed = capsys.readouterr().out
    assert "| multi-turn at 70% | exact |" in printed and "| single-turn | round robin |" in printed
    assert printed.partition("\n\n")[0] in written_page.read_text()
    written = json.loads(path.read_text())
    assert [one["workload"] for one in written["compared"]] == ["multi-turn", "single-turn"]
    assert set(written["compared"][0]["policies"]) == {"round robin", "exact"}
    assert [one["gateways"] for one in written["fairness"]] == [1, 2]


def test_a_folder_with_a_broken_trace_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LOADS", ())
    (tmp_path / "mooncake_conversation.jsonl").write_text("")
    words = ["--engines", "1", "--seconds", "1", "--policies", "exact", "--traces", str(tmp_path)]
    assert run.main(words) == ExitCode.BROKEN
    assert "holds no request" in capsys.readouterr().err


def test_round_robin_answers_no_more_than_it_can() -> None:
    most = run.saturation(TALKS, LENGTHS, SHAPE, 0)
    twice = run.saturation(TALKS, LENGTHS, FleetShape(engines=6, cache_tokens=8192), 0)
    assert 0 < most < twice


REAL: dict[str, Any] = {
    "engines": 2,
    "load": 0.4,
    "requests": 400,
    "weights_mb": 120,
    "real": {
        "ttft_p50": 50.0,
        "ttft_p99": 200.0,
        "hits": 0.8,
        "tokens_per_second": 90.0,
        "itl_p50": 5.0,
        "itl_p99": 9.0,
    },
    "simulated": {
        "ttft_p50": 57.0,
        "ttft_p99": 260.0,
        "hits": 0.8,
        "tokens_per_second": 91.0,
        "itl_p50": 9.0,
        "itl_p99": 9.0,
    },
}


def test_the_page_says_how_far_the_simulation_is_from_real_replicas() -> None:
    """Planted: a difference that counts in one direction only."""
    assert [bar.holds for bar in real_bars(REAL)] == [True, False, True, True]
    swapped = {**REAL, "real": REAL["simulated"], "simulated": REAL["real"]}
    assert [bar.holds for bar in real_bars(swapped)] == [True, False, True, True]
    assert "| TTFT P99 | 200.0 ms | 260.0 ms | +30% | **missed** |" in real.section(REAL)
    assert "| hits | 80.0 % | 80.0 % | +0% | holds |" in real.section(REAL)


def test_real_replicas_are_told_answers_that_they_gave() -> None:
    """A turn's prompt has the real tokens of the answers before it. Planted: those of the traffic."""
    asked = list[list[int]]()

    class Answers:
        info = SimpleNamespace(vocab_size=1000)

        async def generate(self, request: GenerateRequest, session: str = "") -> AsyncGenerator[Delta]:
            asked.append([*request.prompt])
            for number in range(request.max_new_tokens):
                yield Delta(request.id, (60_000 + number,), cached_tokens=7)

    talk = Conversation(
        "c",
        0.0,
        (Turn((range(5),), range(100, 103)), Turn((range(5), range(100, 103), range(200, 202)), range(300, 301))),
    )
    found = asyncio.run(real.replayed(cast(FleetClient, Answers()), Traffic("t", (talk,))))
    assert asked[1][:5] == asked[0] and asked[1][5:8] == [60_000, 60_001, 60_002] and len(asked[1]) == 10
    assert (len(found.ttft), len(found.gaps), found.hits, found.prompt_tokens) == (2, 2, 14, 15)


def test_compare_runs_each_policy_once() -> None:
    found = compare(Traffic("w", TALKS.conversations[:3]), ["exact", "round robin"], LENGTHS, SHAPE, load=0.5)
    assert [*found.figures] == ["exact", "round robin"]


def test_the_cost_of_a_decision_is_measured_by_part() -> None:
    """The index stays within its bytes a block, which no other work on the machine changes."""
    found = decision.decision_us(engines=3, tokens=200)
    assert set(found) == {"decision", "of which keys", "of which index"} and min(found.values()) > 0
    assert 0 < decision.block_bytes(4, 500, 0.5) < decision.block_bytes(4, 500, 0.0) <= decision.BAR_BYTES
