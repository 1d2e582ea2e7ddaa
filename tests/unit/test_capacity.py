"""The capacity planner: the smallest fleet that meets its objectives, and what it says where it cannot know."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.fleet.traffic import single_turn
from pipeline.cli import capacity as command
from pipeline.cli.capacity_options import ReplicaOptions
from pipeline.cli.main import main
from pipeline.sources.traffic import logged_calls
from runtime.engine.core import EngineCore
from runtime.engine.in_process import ModelledTime, answer_all
from runtime.simulation.capacity import (
    EVERYONE_WAITS,
    CapacityAnswer,
    CapacityOutcome,
    cost,
    events_needed,
    find_capacity,
    tried,
)
from runtime.simulation.engine import SimulatedEngine
from runtime.simulation.fleet import FleetShape, FleetSimulation, Late, cached_tokens
from runtime.simulation.step_lengths import read_step_lengths, step_lengths
from runtime.simulation.traffic import Traffic, logged_traffic, multi_turn, read_trace
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest
from tapeout.errors import ExitCode, RequestError
from tapeout.slo import LatencyObjective, ServiceLevelObjectives
from tests.chain_engine import ChainEngine

STEPS = {"decode_seconds": {"1": 0.003, "8": 0.006, "32": 0.015}, "prompt_seconds": {"1": 0.0002}}
LENGTHS = step_lengths({1: 0.003, 8: 0.006, 32: 0.015}, {1: 0.0002})
SHAPE = FleetShape(1, 60_000, EVERYONE_WAITS)
BURSTS = single_turn(0, seconds=10, rate=40, prompt_tokens=300, answer_tokens=40)
SLO = ServiceLevelObjectives(ttft=LatencyObjective(seconds=0.4), itl=LatencyObjective(seconds=0.05))


@cache  # a search simulates some fleets, and gives the same each time
def found_for(workload: Traffic, slo: ServiceLevelObjectives, most: int = 64) -> CapacityAnswer:
    return find_capacity(workload, LENGTHS, slo, shape=SHAPE, price_per_hour=1.0, most_replicas=most)


def test_the_answer_is_the_smallest_fleet_that_meets_the_objectives() -> None:
    found = found_for(BURSTS, SLO)
    assert found.answer is CapacityOutcome.FOUND and found.replicas is not None and found.replicas > 2
    one_less = tried(BURSTS, LENGTHS, FleetShape(found.replicas - 1, 60_000, EVERYONE_WAITS), SLO, 1.0)
    enough = tried(BURSTS, LENGTHS, FleetShape(found.replicas, 60_000, EVERYONE_WAITS), SLO, 1.0)
    assert not one_less.meets and enough.meets
    assert enough.figures.ttft_p99 <= 400 and enough.figures.itl_p99 <= 50
    assert [row.replicas for row in found.rows] == sorted({row.replicas for row in found.rows})


@pytest.mark.parametrize("name", ["ttft", "itl"])
def test_each_objective_is_enough_to_need_more_replicas(name: str) -> None:
    """Planted: one of them is not looked at."""
    loose = ServiceLevelObjectives(ttft=LatencyObjective(seconds=60), itl=LatencyObjective(seconds=60))
    strict = loose.model_copy(update={name: LatencyObjective(seconds=0.3 if name == "ttft" else 0.0078)})
    few, many = found_for(BURSTS, loose).replicas, found_for(BURSTS, strict).replicas
    assert few is not None and many is not None and few < many


def test_what_no_fleet_meets_is_said() -> None:
    impossible = ServiceLevelObjectives(ttft=LatencyObjective(seconds=0.001))
    found = found_for(BURSTS, impossible, most=4)
    assert (found.answer, found.replicas) == (CapacityOutcome.MISSED, None)
    assert found.rows[-1].replicas == 4


def test_a_trace_that_is_too_short_for_its_percentile_is_no_answer() -> None:
    short = BURSTS.first(5)
    assert short.turns < found_for(short, SLO).needed == events_needed(0.99) == 299
    assert found_for(short, SLO).answer is CapacityOutcome.TOO_SHORT
    lower = ServiceLevelObjectives(ttft=LatencyObjective(seconds=0.4, share=0.95))
    assert found_for(short, lower).answer is CapacityOutcome.FOUND


def test_a_hopeless_fleet_is_given_up_early() -> None:
    early = FleetSimulation(BURSTS, LENGTHS, SHAPE).run(Late(0.4, 20))
    whole = FleetSimulation(BURSTS, LENGTHS, SHAPE).run()
    assert not early.whole and whole.whole and 20 <= early.requests < whole.requests
    assert early.steps < 0.5 * whole.steps
    assert whole.ttft_p99 > 400 and whole.busy > 0.95


@pytest.mark.parametrize("blocks", [0, 64])
@pytest.mark.parametrize("slots", [2, 5, 24])
def test_a_simulated_engine_resumes_prompts_where_the_servers_core_does(blocks: int, slots: int) -> None:
    """Planted: slots are not looked at, or snapshots that were copied are never given back."""
    draw, size, longest = random.Random(slots), 64, 2048
    begin = [draw.randrange(200) for _ in range(1500)]
    prompts = [[*begin[: draw.choice((130, 400, 1500))], 200 + n, *begin[: n % 3 * 70]] for n in range(12)]
    engine = ChainEngine(blocks=blocks, slots=slots, block_tokens=size, max_tokens=longest, vocab_size=256)
    core = EngineCore(ModelledTime(engine), Limits(max_draft_tokens=0))
    simulated, now, found, expected = SimulatedEngine(LENGTHS, blocks, slots=slots), 0.0, list[int](), list[int]()
    for number, prompt in enumerate(2 * prompts):
        request = GenerateRequest(str(number), prompt, 1)
        expected += [answer.cached_tokens for answer in answer_all(core, [request])]
        found.append(cached_tokens([simulated], request)[0])
        simulated.add(request, range(1), now)
        while (end := simulated.begin(now)) is not None:
            ended = simulated.end(now := end)
            assert all(cached == found[-1] for cached in ended.first.values())
    assert found == expected and any(found)
    simulated.scheduler.check()


def test_a_replica_with_few_slots_of_recurrent_state_holds_less_traffic() -> None:
    talks = multi_turn(0, seconds=30, rate=1.5)
    few, many, none = (
        FleetSimulation(talks, LENGTHS, FleetShape(2, 60_000, EVERYONE_WAITS, slots=slots)).run()
        for slots in (4, 128, 0)
    )
    assert few.hits < many.hits <= none.hits and few.ttft_p99 > many.ttft_p99


def test_cost_is_paid_time_over_tokens() -> None:
    seconds, tokens = BURSTS.conversations[-1].start, sum(len(c.turns[0].answer) for c in BURSTS.conversations)
    assert cost(BURSTS, 3, 2.0) == pytest.approx(3 * 2 * seconds / 3600 / tokens * 1e6)


# --- the traffic log -------------------------------------------------------------------------------------------------


def line(texts: list[str], response: str, prompt_tokens: int, completion_tokens: int = 20) -> str:
    messages = [{"role": "user", "content": text} for text in texts]
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return json.dumps({"messages": messages, "prompts": [], "responses": [response], **counts})


def test_a_log_keeps_lengths_and_what_prompts_share(tmp_path: Path) -> None:
    system, first, answer = "s" * 400, "q" * 100, "a" * 80
    lines = [line([system, first], answer, 500), line([system, first, answer, "more"], "x", 600), line(["y"], "z", 7)]
    (tmp_path / "traffic.jsonl").write_text("\n".join(lines))
    workload = logged_traffic(logged_calls(tmp_path), seed=1, rate=2.0)
    one, two, three = (conversation.turns[0] for conversation in workload.conversations)
    assert (one.prompt_tokens, len(one.answer)) == (500, 20)
    history = [*one.tokens(), *one.answer]
    assert two.tokens()[: len(history)] == history
    assert three.prompt_tokens == 7 and not set(three.tokens()) & set(two.tokens())
    assert workload == logged_traffic(logged_calls(tmp_path), seed=1, rate=2.0)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(STEPS))
    return path


def words(steps: Path, *more: str) -> list[str]:
    return ["capacity", "--steps", str(steps), "--price-per-hour", "0.2", *more]


def test_the_command_answers_for_drawn_traffic(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = words(steps, "--rate", "4", "--seconds", "40", "--ttft", "0.3", "--itl", "0.03")
    assert main([*asked, "--json"]) == ExitCode.PASS
    record = json.loads(capsys.readouterr().out)
    (row,) = [row for row in record["rows"] if row["replicas"] == record["replicas"]]
    assert row["meets"] and row["cost"] > 0 and row["figures"]["ttft_p99"] <= 300
    assert main(asked) == ExitCode.PASS
    assert f"{record['replicas']} replicas meet the objectives" in capsys.readouterr().out


def test_exit_codes_tell_missed_and_too_short_apart(steps: Path) -> None:
    assert main(words(steps, "--rate", "1", "--seconds", "5", "--ttft", "9")) == ExitCode.INCONCLUSIVE
    assert (
        main(words(steps, "--rate", "2", "--seconds", "20", "--ttft", "0.001", "--most", "2")) == ExitCode.GATE_FAILED
    )


def test_a_trace_brings_its_own_times(steps: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    entries = [{"timestamp": 50 * n, "input_length": 900, "output_length": 40, "hash_ids": [n]} for n in range(400)]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    slo = tmp_path / "slo.yaml"
    slo.write_text("slo: {ttft: {seconds: 1.0, share: 0.95}}\n")
    assert main(words(steps, str(path), "--shrink", "4", "--slo", str(slo))) == ExitCode.PASS


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--ttft", "1"], "no traffic"),
        (["--rate", "1"], "no objective"),
        (["--rate", "1", "--ttft", "1", "--slo", "x"], "two sources"),
        (["nothing.jsonl", "--ttft", "1"], "cannot be read"),
        (["README.md", "--ttft", "1"], "a trace called README.md"),
        (["tests", "--ttft", "1"], "--rate"),
    ],
)
def test_mistakes_are_one_clear_message(
    steps: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(words(steps, *more)) == ExitCode.BROKEN
    error = capsys.readouterr().err
    assert said in error and "expected" in error and "Traceback" not in error


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"decode_seconds": {}, "prompt_seconds": {"8": 1}}',
        '{"decode_seconds": {"0": 1}, "prompt_seconds": {"8": 1}}',
    ],
)
def test_lengths_of_steps_are_checked(tmp_path: Path, content: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(content)
    with pytest.raises(RequestError, match="expected"):
        read_step_lengths(path)


def test_lengths_come_from_the_benchmark_of_the_very_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a benchmark of another bundle is taken."""
    numbers = SimpleNamespace(digest="a" * 64, itl_ms={1: 3.0, 4: 5.0}, prefill_tokens_per_s=2000.0)
    records: dict[str, Any] = {
        "EngineBundle": SimpleNamespace(
            digest="a" * 64,
            record=SimpleNamespace(io=SimpleNamespace(slots=4, max_tokens=512, token_bytes=96, slot_bytes=0)),
        ),
        "Benchmark": SimpleNamespace(record=SimpleNamespace(candidate=numbers, price_per_hour=0.3)),
    }
    monkeypatch.setattr(command.artifact, "load_record", lambda _, kind: records[kind.__name__])
    replica = command.ReplicaModel(ReplicaOptions())
    assert replica.lengths == step_lengths({1: 0.003, 4: 0.005}, {1: 0.0005})
    assert (replica.cache_tokens, replica.slots, replica.max_tokens, replica.price) == (2048, 0, 512, 0.3)
    with pytest.raises(RequestError, match="--slots 3"):
        command.ReplicaModel(ReplicaOptions(slots=3))
    io = records["EngineBundle"].record.io
    io.token_bytes, io.slot_bytes = 0, 4096  # of a model without attention
    replica = command.ReplicaModel(ReplicaOptions())
    assert (replica.cache_tokens, replica.slots) == (0, 8)
    assert command.ReplicaModel(ReplicaOptions(slots=3)).slots == 3
    with pytest.raises(RequestError, match="--cache-tokens 640"):
        command.ReplicaModel(ReplicaOptions(cache_tokens=640))
    records["EngineBundle"].digest = "b" * 64
    with pytest.raises(RequestError, match="the benchmark beside"):
        command.ReplicaModel(ReplicaOptions())


def test_an_entry_without_a_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(RequestError, match="there is no 'hash_ids'"):
        read_trace(path)
