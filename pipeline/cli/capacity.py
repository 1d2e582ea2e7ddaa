"""``tapeout capacity``: how many replicas a traffic needs, and what a million tokens then cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from engines.bundle import EngineBundle
from evals.kinds.speed import Benchmark
from pipeline.cli.capacity_options import ReplicaOptions, TrafficOptions
from pipeline.sources.traffic import logged_calls
from runtime.simulation.capacity import EVERYONE_WAITS, CapacityAnswer, CapacityOutcome, CapacityRow, find_capacity
from runtime.simulation.fleet import FleetShape
from runtime.simulation.step_lengths import StepLengths, read_step_lengths, step_lengths
from runtime.simulation.traffic import Traffic, logged_traffic, multi_turn, read_trace
from tapeout import artifact
from tapeout.errors import ExitCode, RequestError
from tapeout.slo import LatencyObjective, ServiceLevelObjectives, read_objectives
from tapeout.state import SEQUENCE_SLOTS

CODES = {
    CapacityOutcome.FOUND: ExitCode.PASS,
    CapacityOutcome.MISSED: ExitCode.GATE_FAILED,
    CapacityOutcome.TOO_SHORT: ExitCode.INCONCLUSIVE,
}


class ReplicaModel:
    """``max_tokens``: of a sequence. ``slots``: of recurrent state, 0 where the model has none. ``price``: an hour."""

    def __init__(self, options: ReplicaOptions) -> None:
        self.lengths: StepLengths
        cache, slots, tokens, price = options.cache_tokens, options.slots, options.max_tokens, options.price_per_hour
        if options.steps is not None:
            self.lengths = read_step_lengths(options.steps)
            self.source = str(options.steps)
        else:
            timed, bundle = _benchmark(options.bundle)
            one = timed.candidate
            seconds = {batch: milliseconds / 1000 for batch, milliseconds in one.itl_ms.items()}
            self.lengths = step_lengths(seconds, {1: 1 / one.prefill_tokens_per_s})
            self.source = f"the benchmark of {options.bundle}"
            io = bundle.io
            _require_kept("--cache-tokens", cache, io.token_bytes, options.bundle)
            _require_kept("--slots", slots, io.slot_bytes, options.bundle)
            cache = cache or (io.slots * io.max_tokens if io.token_bytes else 0)
            slots = slots or (io.slots * SEQUENCE_SLOTS if io.slot_bytes else 0)
            tokens, price = tokens or io.max_tokens, price or timed.price_per_hour
        self.cache_tokens = 60_000 if cache is None else cache
        self.slots, self.max_tokens, self.price = slots or 0, tokens or 2048, price or 0.0


def _require_kept(option: str, given: int | None, each: int, bundle: Path) -> None:
    """:class:`RequestError` for room for state that a bundle does not have."""
    if given is not None and not each:
        kind = "keys and values" if option == "--cache-tokens" else "recurrent state"
        raise RequestError(f"{option} {given}", expected=f"none: {bundle} keeps no {kind}", remedy="leave it out")


def _benchmark(folder: Path) -> tuple[Benchmark, EngineBundle]:
    bundle = artifact.load_record(folder, EngineBundle)
    timed = artifact.load_record(folder.resolve().parent / "benchmark", Benchmark).record
    if timed.candidate.digest != bundle.digest:
        raise RequestError(
            f"the benchmark beside {folder} is of bundle {timed.candidate.digest[:12]}",
            expected=f"one of {bundle.digest[:12]}",
            remedy="run `dvc repro benchmark`, or give lengths of steps with --steps",
        )
    return timed, bundle.record


def run(
    traffic: TrafficOptions, options: ReplicaOptions, slo: ServiceLevelObjectives, most_replicas: int
) -> tuple[dict[str, Any], Table, ExitCode]:
    """The answer for a script, as a table, and as exit code."""
    replica = ReplicaModel(options)
    workload = traffic_of(traffic, replica.max_tokens)
    found = find_capacity(
        workload,
        replica.lengths,
        slo,
        shape=FleetShape(1, replica.cache_tokens, EVERYONE_WAITS, replica.max_tokens, replica.slots),
        price_per_hour=replica.price,
        most_replicas=most_replicas,
        progress=lambda row: print(_progress(row), file=sys.stderr),
    )
    record = {
        "answer": found.answer.value,
        "replicas": found.replicas,
        "requests": workload.turns,
        "slo": slo.model_dump(exclude={"availability"}, exclude_none=True),
        "steps": {"source": replica.source, **replica.lengths.as_json()},
        "cache_tokens": replica.cache_tokens,
        "slots": replica.slots,
        "price_per_hour": replica.price,
        "rows": [row.as_json() for row in found.rows],
    }
    return record, _table(found, sentence(found, workload, most_replicas)), CODES[found.answer]


def objectives(file: Path | None, ttft: float | None, itl: float | None) -> ServiceLevelObjectives:
    """Those of a file, or 99 % within the seconds given. :class:`RequestError` for both or none."""
    given = ttft is not None or itl is not None
    if (file is None) != given:
        found = "two sources of objectives" if given else "no objective"
        raise RequestError(found, expected="--slo, or --ttft and --itl")
    slo = ServiceLevelObjectives(ttft=_p99(ttft), itl=_p99(itl)) if file is None else read_objectives(file)
    if slo.ttft is None and slo.itl is None:
        raise RequestError(f"{file} bounds no latency", expected="ttft or itl in its section `slo`")
    return slo


def _p99(seconds: float | None) -> LatencyObjective | None:
    return None if seconds is None else LatencyObjective(seconds=seconds)


def traffic_of(options: TrafficOptions, max_tokens: int) -> Traffic:
    trace, seconds = options.trace, options.seconds
    if trace is None:
        if options.rate is None:
            raise RequestError("no traffic", expected="a trace, a traffic log, or --rate")
        drawn = multi_turn(
            options.seed,
            seconds=seconds or 300.0,
            rate=options.rate,
            message_tokens=options.prompt_tokens,
            answer_tokens=options.answer_tokens,
            turns=options.turns,
            most_tokens=max_tokens,
        )
        return drawn.faster(options.faster)
    if trace.is_dir():
        if options.rate is None:
            raise RequestError(f"no rate for {trace}", expected="--rate: a traffic log does not say when calls came")
        read = logged_traffic(logged_calls(trace), options.seed, options.rate, max_tokens)
    else:
        if options.rate is not None:
            raise RequestError("--rate with a trace", expected="--faster, since a trace says when requests came")
        read = read_trace(trace, options.shrink, max_tokens)
    return (read if seconds is None else read.first(seconds)).faster(options.faster)


def sentence(found: CapacityAnswer, workload: Traffic, most: int) -> str:
    """The answer."""
    if found.answer is CapacityOutcome.MISSED:
        return f"{most} replicas do not meet the objectives: a request alone may be too long for them, or raise --most."
    if found.answer is CapacityOutcome.TOO_SHORT:
        return (
            f"{workload.turns} requests are too few: a P99 takes at least {found.needed}, "
            "counted after the first tenth of the time."
        )
    row = next(row for row in found.rows if row.replicas == found.replicas)
    return f"{row.replicas} replicas meet the objectives, at {row.cost:.3g} for a million tokens of answers."


def _progress(row: CapacityRow) -> str:
    return f"{row.replicas} replicas: {'enough' if row.meets else 'too few'}"


def _table(found: CapacityAnswer, caption: str) -> Table:
    table = Table(caption=caption, caption_justify="left", caption_style="")
    columns = ("replicas", "TTFT P50 ms", "P99", "ITL P99 ms", "hits", "tokens/s", "busy", "cost a million tokens", "")
    for column in columns:
        table.add_column(column, justify="right")
    for row in found.rows:
        one, early = row.figures, "" if row.figures.whole else "> "
        table.add_row(
            str(row.replicas),
            f"{early}{one.ttft_p50:,.0f}",
            f"{early}{one.ttft_p99:,.0f}",
            f"{one.itl_p99:,.1f}",
            f"{one.hits:.1%}",
            f"{one.tokens_per_second:,.0f}" if one.whole else "-",
            f"{one.busy:.0%}" if one.whole else "-",
            f"{row.cost:.3g}",
            "enough" if row.meets else "too few",
        )
    return table
