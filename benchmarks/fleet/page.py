"""docs/benchmarks/fleet.md: what was simulated, and which bars hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fleet.decision import BAR_BYTES, BAR_US
from benchmarks.fleet.fairness import BAR as BAR_FAIRNESS
from benchmarks.fleet.fairness import BAR_THROUGHPUT, ENGINES, RATE, SECONDS, TIMES, Fairness
from benchmarks.fleet.real import BAR, BARRED, FIGURES, differences, section
from runtime.simulation.fleet import WARM, FleetFigures

BLIND = ("round robin", "two choices", "least load")
RIVALS = ("round robin", "least load", "session hash")


@dataclass(frozen=True)
class Compared:
    """One workload under several policies, by name. ``load``: a share of what round robin can answer, if known."""

    workload: str
    load: float | None
    turns: int
    figures: Mapping[str, FleetFigures]

    @property
    def name(self) -> str:
        return self.workload if self.load is None else f"{self.workload} at {self.load:.0%}"

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "load": self.load,
            "turns": self.turns,
            "policies": {policy: figures.as_json() for policy, figures in self.figures.items()},
        }


@dataclass(frozen=True)
class Bar:
    what: str
    expected: str
    found: str
    holds: bool


def bars(compared: Sequence[Compared]) -> list[Bar]:
    """Those whose policies were all compared."""
    found = list[Bar]()
    for one in compared:
        figures = one.figures
        ours = figures.get("exact")
        if ours is None:
            continue
        blind = [policy for policy in BLIND if policy in figures]
        if one.load == 0.7 and blind:
            ratios = {policy: ours.ttft_p99 / figures[policy].ttft_p99 for policy in blind}
            text = ", ".join(f"{ratio:.2f} of {policy}" for policy, ratio in ratios.items())
            found.append(Bar(f"{one.name}: P99 TTFT", "at most 0.25 of each", text, max(ratios.values()) <= 0.25))
        rivals = [figures[policy] for policy in RIVALS if policy in figures]
        if rivals:
            p50 = ours.ttft_p50 / min(rival.ttft_p50 for rival in rivals)
            p99 = ours.ttft_p99 / min(rival.ttft_p99 for rival in rivals)
            text = f"P50 {p50:.2f}, P99 {p99:.2f}"
            what = f"{one.name}: TTFT, of the best of round robin, least load and session hash"
            found.append(Bar(what, "at most 1.05", text, max(p50, p99) <= 1.05))
        oracle = figures.get("most cached")
        if oracle is not None and oracle.hits:
            text = f"{ours.hits / oracle.hits:.1%}"
            found.append(
                Bar(f"{one.name}: hits, of most cached", "at least 97 %", text, ours.hits >= 0.97 * oracle.hits)
            )
    return found


def decision_bars(decision: Mapping[str, Any]) -> list[Bar]:
    us = max(decision["microseconds"]["decision"], decision["microseconds, all equal"]["decision"])
    used = decision["bytes a block"]
    what = f"a decision among {decision['engines']} engines, for {decision['tokens']:,} tokens"
    return [
        Bar(what, f"at most {BAR_US} µs", f"{us:.0f} µs of processor time", us <= BAR_US),
        Bar("memory of the index for each block", f"at most {BAR_BYTES} bytes", f"{used:.0f} bytes", used <= BAR_BYTES),
    ]


def fairness_bars(fair: Sequence[Fairness]) -> list[Bar]:
    found = list[Bar]()
    for one in fair:
        ratio = one.beside / one.alone
        what = f"a tenant beside one that sends {TIMES:.0f} times as much, {ENGINES} replicas, gateways: {one.gateways}"
        text = f"{ratio:.2f} ({one.beside:.0f} ms, {one.alone:.0f} alone)"
        expected = f"at most {BAR_FAIRNESS} of that alone"
        found.append(Bar(f"{what}: P99 TTFT", expected, text, ratio <= BAR_FAIRNESS))
        text, holds = f"{one.throughput:.1%}", one.throughput >= BAR_THROUGHPUT
        expected = f"at least {BAR_THROUGHPUT:.0%} of that of one tenant"
        found.append(Bar("the same: tokens/s of both", expected, text, holds))
    return found


def fairness_table(fair: Sequence[Fairness]) -> str:
    lines = [
        "| gateways | P99 alone | beside as much | beside ten times as much, P50 / P99 | the other's P50 / P99 "
        "| its gaps, P99 / most |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {one.gateways} | {one.alone:.0f} | {one.equal:.0f} | {one.beside_p50:.0f} / {one.beside:.0f} "
        f"| {one.other_p50:,.0f} / {one.other_p99:,.0f} | {one.other_gap_p99:.0f} / {one.other_gap_most:.0f} |"
        for one in fair
    ]
    return "\n".join(lines)


def table(compared: Sequence[Compared]) -> str:
    lines = [
        "| workload | policy | TTFT P50 ms | TTFT P99 ms | hits | of the possible | tokens/s |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for one in compared:
        lines += [
            f"| {one.name} | {policy} | {figures.ttft_p50:,.0f} | {figures.ttft_p99:,.0f} "
            f"| {figures.hits:.1%} | {figures.possible:.1%} | {figures.tokens_per_second:,.0f} |"
            for policy, figures in one.figures.items()
        ]
    return "\n".join(lines)


def bar_table(found: Sequence[Bar]) -> str:
    lines = ["| what | bar | found | |", "|---|---|---|---|"]
    lines += [f"| {bar.what} | {bar.expected} | {bar.found} | {_verdict(bar)} |" for bar in found]
    return "\n".join(lines)


def real_bars(real: Mapping[str, Any]) -> list[Bar]:
    """Of the simulation, against what ``benchmarks.fleet.real`` measured."""
    return [
        Bar(
            f"simulated {FIGURES[name][0]}, of that of {real['engines']} real replicas",
            f"within {BAR:.0%}",
            f"{off:+.0%}",
            abs(off) <= BAR,
        )
        for name, off in differences(real).items()
        if name in BARRED
    ]


def page(
    compared: Sequence[Compared],
    settings: Mapping[str, Any],
    decision: Mapping[str, Any],
    fair: Sequence[Fairness],
    real: Mapping[str, Any] | None = None,
) -> str:
    """``settings``: bundle, engines, cache_tokens, seed, and saturation in conversations a second. ``real``: what
    ``benchmarks.fleet.real`` wrote.
    """
    found = [*bars(compared), *fairness_bars(fair), *decision_bars(decision), *(real_bars(real) if real else [])]
    parts, tied = decision["microseconds"], decision["microseconds, all equal"]["decision"]
    return TEMPLATE.format(
        **settings,
        held=sum(bar.holds for bar in found),
        all=len(found),
        bars=bar_table(found),
        table=table(compared),
        warm=WARM,
        fairness=fairness_table(fair),
        few=ENGINES,
        seconds=SECONDS,
        rate=RATE,
        times=TIMES,
        many=decision["engines"],
        tokens=decision["tokens"],
        whole=parts["decision"],
        keys=parts["of which keys"],
        index=parts["of which index"],
        tied=tied,
        alone=decision["bytes a block"],
        shared=decision["bytes a block, half shared"],
        real="" if real is None else REAL.format(**real, table=section(real)),
        apart=""
        if real
        else " How far they are from real\nreplicas: `python -m benchmarks.fleet.real` (docs/negative-results.md).",
    )


def _verdict(bar: Bar) -> str:
    return "holds" if bar.holds else "**missed**"


TEMPLATE = """# Routing in a fleet, simulated

This page is written by `python -m benchmarks.fleet.run --traces FOLDER --page docs/benchmarks/fleet.md`.
Do not edit it.

{engines} engines with {cache_tokens:,} tokens of KV memory each. Scheduler, cache, reports of block keys, index and
choice are those of the server, in virtual time. Only the length of a step is a model, from measured steps of the
bundle "{bundle}" (`benchmarks/fleet/bundles.py`). There is one gateway, reports take no time, and no engine fails.
The figures depend on the seed ({seed}) and on nothing else of the machine.{apart}

## Bars

{held} of {all} bars hold.

{bars}

## Figures

{table}

- multi-turn: conversations of 5 turns on average, Poisson, with one of 4 system prompts of 256 tokens, messages of 80
  and answers of 100 tokens, and pauses of 6 s. Load is a share of {saturation:.1f} conversations a second, which round
  robin finishes where all come at once.
- single-turn: prompts of 300 tokens that share nothing, in bursts.
- mooncake_conversation: lengths divided by 16, so a block of the trace is 32 tokens. Conversations are told apart by
  their second block.
- azure_2023: lengths divided by 4, and no prompt shares anything.
- Requests of traces come faster than in the trace, see `TRACES` in `benchmarks/fleet/run.py`.
- exact is ours. most cached sees into all pools, goes where most of the prompt is, and ignores load: an oracle for
  hits, not for time.
- hits: prompt tokens that came from a cache. Of the possible: as a share of what the best engine for each request had
  when it arrived. The first {warm:.0%} of the time does not count.
- tokens/s: while the middle three fifths of all tokens were made.

## Fairness

`benchmarks/fleet/fairness.py`: {few} engines, {seconds:.0f} s. A tenant sends {rate:.0f} requests a second, of 64 to
512 prompt tokens, and another one nothing, as much, or {times:.0f} times as much, which is about what the engines can
do. TTFT and gaps between tokens in ms:

{fairness}

## Cost of a decision

`python -m benchmarks.fleet.decision`: {many} engines hold prefixes of different lengths of each prompt of {tokens:,}
tokens. Of {whole:.0f} µs, {keys:.0f} are the keys of the prompt's blocks and {index:.0f} the look-up for all engines.
Where all engines are equally good it takes {tied:.0f} µs. The index takes {alone:.0f} bytes a block where engines
share none, and {shared:.0f} where they share half of them. These are processor times of one thread on a busy machine.
{real}"""

REAL = """
## Real replicas

`python -m benchmarks.fleet.real BUNDLE`: {engines} processes of `tapeout engine` with one thread each on this machine
({weights_mb} MB of weights), and the gateway's client of a fleet, answer {requests} requests of multi-turn
conversations. Engines were to be busy for {load:.0%} of the time. Lengths of steps were measured just before. Engines
share the machine's memory, so steps were measured while the other engine idles and while it works, and the simulation
takes a mean of both, weighed by how busy engines are in it.

{table}
"""
