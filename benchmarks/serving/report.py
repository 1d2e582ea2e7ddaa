"""Write docs/benchmarks/serving.md and .json from the figures of a run, and compare them with the bars."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.serving.scenarios import (
    COST_STREAMS,
    KERNEL_MS,
    LONG_PROMPT,
    PREFIX,
    SHORT_ROUNDS,
    Interruption,
    Load,
    Prefix,
)
from tapeout.artifact import Frozen

THROUGHPUT_BAR, COST_BAR, LONG_BAR, PREFIX_BAR, START_BAR = 1.5, 0.10, 2.0, 8.0, 3.0
STREAMS_BAR = 0.98  # of the throughput of fewer streams: medians of few rounds differ by a per cent or two


class Measured(Frozen):
    """One server. ``cost``: for each round, tokens per second of the server and of the bare engine at 16 streams."""

    name: str
    ours: bool
    cold_start_seconds: float
    saturation: tuple[Load, ...] = ()
    latency: Load | None = None
    cost: tuple[tuple[float, float], ...] = ()
    long_prompt: tuple[Interruption, ...] = ()
    prefix: Prefix | None = None
    streams: tuple[tuple[int, tuple[float, ...]], ...] = ()  # number of streams, tokens per second of each round


class Run(Frozen):
    """All figures of one run. ``load_before``: the machine's load average of one minute."""

    servers: tuple[Measured, ...]
    failures: dict[str, str]
    machine: str
    threads: int
    requests: int
    rounds: int
    load_before: float


class Bar(NamedTuple):
    what: str
    bar: str
    found: str
    holds: bool | None  # None: not measured


def write(run: Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "serving.json").write_text(run.model_dump_json(indent=1) + "\n")
    (folder / "serving.md").write_text(page(run))


def page(run: Run) -> str:
    sections = [
        "# Serving under load",
        "This page is written by `make bench-serving`; do not edit it. [serving.json](serving.json) has all figures.",
        f"{run.machine}; each server has {run.threads} threads, and shares the machine with the client, which is one "
        "process that does not interrupt them (`SCHED_BATCH`). An event counts from when the system received it. "
        f"Servers take turns (rounds: {run.rounds}, and at least {SHORT_ROUNDS} of scenarios that take "
        "seconds); while one runs, the others are paused. "
        "All get the same token ids over the same API (`/v1/completions`, streamed, greedy, without a stop token). "
        f"The load average was {run.load_before:.1f} before the run.",
        "## Bars",
        _bars(bars(run)),
        "## Open-loop load",
        f"Poisson arrivals of {run.requests} requests with prompts of 32 to 512 tokens and answers of 16 to 128. "
        "Saturation offers more than any server can answer; its row is the median round. Rates count answered requests "
        "only. The second run offers 70 % of the requests per second that the best other server answers at saturation.",
        _loads(run),
        "## Cold start",
        "From the start of the process to the first token of a response; model files are in the page cache.",
        _table(("server", "seconds"), [(m.name, f"{m.cold_start_seconds:.1f}") for m in run.servers]),
    ]
    ours = our_server(run)
    if ours and ours.streams:
        sections += [
            "## Streams",
            "Requests that start at once, with prompts of 64 tokens and answers of 96.",
            _table(
                ("streams", "tokens/s"),
                [(str(count), f"{median(found):,.0f}") for count, found in ours.streams],
            ),
        ]
    if run.failures:
        lines = [f"- **{name}**: {reason}" for name, reason in run.failures.items()]
        sections += ["## What could not be measured", "\n".join(lines)]
    return "\n\n".join(sections) + "\n"


def our_server(run: Run) -> Measured | None:
    return next((measured for measured in run.servers if measured.ours), None)


def bars(run: Run) -> list[Bar]:
    ours = our_server(run)
    if ours is None:
        return []
    peers = [measured for measured in run.servers if not measured.ours]
    return [
        _throughput_bar(ours, peers),
        *_latency_bars(ours, peers),
        _cost_bar(ours),
        _long_bar(ours),
        _prefix_bar(ours),
        _streams_bar(ours),
        Bar(
            "cold start to first token",
            f"below {START_BAR:.0f} s",
            f"{ours.cold_start_seconds:.1f} s",
            ours.cold_start_seconds < START_BAR,
        ),
    ]


def _throughput_bar(ours: Measured, peers: Sequence[Measured]) -> Bar:
    what, bar = "output tokens/s at saturation", f"{THROUGHPUT_BAR} times the best other server"
    rivals = [peer for peer in peers if peer.saturation]
    if not rivals or not ours.saturation:
        return Bar(what, bar, "", None)
    ratios = {
        peer.name: median(
            mine.tokens_per_s / theirs.tokens_per_s
            for mine, theirs in zip(ours.saturation, peer.saturation, strict=False)
        )
        for peer in rivals
    }
    name = min(ratios, key=lambda name: ratios[name])
    return Bar(what, bar, f"{ratios[name]:.2f} times {name}", ratios[name] >= THROUGHPUT_BAR)


def _latency_bars(ours: Measured, peers: Sequence[Measured]) -> list[Bar]:
    found: list[Bar] = []
    for what, read in (("P99 inter-token latency", _p99_itl), ("P99 TTFT", _p99_ttft)):
        theirs = [read(peer.latency) for peer in peers if peer.latency]
        words = f"{what} at 70 % of the best other server's saturation", "no worse than the best other server"
        if not theirs or not ours.latency:
            found.append(Bar(*words, "", None))
            continue
        mine, best = read(ours.latency), min(theirs)
        found.append(Bar(*words, f"{mine:,.0f} ms against {best:,.0f} ms", mine <= best))
    return found


def _p99_itl(load: Load) -> float:
    return load.itl_ms[1]


def _p99_ttft(load: Load) -> float:
    return load.ttft_ms[1]


def _cost_bar(ours: Measured) -> Bar:
    what, bar = f"cost of the server over the bare engine, {COST_STREAMS} streams", f"at most {COST_BAR:.0%}"
    if not ours.cost:
        return Bar(what, bar, "", None)
    lost = median(1 - server / bare for server, bare in ours.cost)
    rates = (
        f"{median(server for server, _ in ours.cost):,.0f} and {median(bare for _, bare in ours.cost):,.0f} tokens/s"
    )
    return Bar(what, bar, f"{lost:.0%} ({rates})", lost <= COST_BAR)


def _long_bar(ours: Measured) -> Bar:
    """Judged by all latencies. Beside them are those that the kernel did not disturb, and those without the prompt."""
    what = f"a prompt of {LONG_PROMPT:,} tokens among {COST_STREAMS} streams: largest inter-token latency"
    bar = f"at most {LONG_BAR:.0f} times the median"
    if not ours.long_prompt:
        return Bar(what, bar, "", None)
    fed, usual = [one.fed for one in ours.long_prompt], [one.usual for one in ours.long_prompt]
    judged = median(gaps.worst_ratio for gaps in fed)
    share = median(gaps.disturbed_share for gaps in fed)
    found = f"{judged:.1f} times ({_each(gaps.worst_ratio for gaps in fed)}), without the prompt "
    found += f"{median(gaps.worst_ratio for gaps in usual):.1f} ({_each(gaps.worst_ratio for gaps in usual)}); "
    found += f"99th percentile {median(gaps.p99_ratio for gaps in fed):.1f} times, without the prompt "
    found += (
        f"{median(gaps.p99_ratio for gaps in usual):.1f}; median {median(gaps.median_ms for gaps in fed):,.0f} ms; "
    )
    found += f"TTFT of the prompt {median(one.long_ttft_ms for one in ours.long_prompt):,.0f} ms. Without the "
    found += f"{share:.1%} of the latencies in which a thread of the kernel had a core for {KERNEL_MS:.0f} ms: "
    found += f"{median(gaps.undisturbed_ratio for gaps in fed):.1f} times "
    found += f"({_each(gaps.undisturbed_ratio for gaps in fed)})"
    return Bar(what, bar, found, judged <= LONG_BAR)


def _each(ratios: Iterable[float]) -> str:
    return ", ".join(f"{ratio:.1f}" for ratio in ratios)


def _prefix_bar(ours: Measured) -> Bar:
    what, bar = f"TTFT with a shared prefix of {PREFIX} tokens", f"at least {PREFIX_BAR:.0f} times shorter than cold"
    if ours.prefix is None:
        return Bar(what, bar, "", None)
    ratio = ours.prefix.cold_ms / ours.prefix.warm_ms
    return Bar(
        what,
        bar,
        f"{ratio:.1f} times ({ours.prefix.cold_ms:,.0f} and {ours.prefix.warm_ms:,.0f} ms)",
        ratio >= PREFIX_BAR,
    )


def _streams_bar(ours: Measured) -> Bar:
    what, bar = "throughput at 1, 8, 32 and 128 streams", f"never falls by more than {1 - STREAMS_BAR:.0%}"
    rates = [median(found) for _, found in ours.streams]
    if len(rates) < 2:
        return Bar(what, bar, "", None)
    holds = all(after >= STREAMS_BAR * before for before, after in itertools.pairwise(rates))
    return Bar(what, bar, " ".join(f"{rate:,.0f}" for rate in rates) + " tokens/s", holds)


def _bars(found: Sequence[Bar]) -> str:
    words = {True: "holds", False: "**missed**", None: "not measured"}
    return _table(("what", "bar", "measured", ""), [(b.what, b.bar, b.found, words[b.holds]) for b in found])


def _loads(run: Run) -> str:
    rows: list[tuple[str, ...]] = []
    for measured in run.servers:
        middle = sorted(measured.saturation, key=lambda load: load.tokens_per_s)
        chosen = [("saturation", middle[len(middle) // 2])] if middle else []
        for name, load in [*chosen, *([("70 %", measured.latency)] if measured.latency else [])]:
            rows.append(
                (
                    measured.name,
                    f"{name} ({load.offered_per_s:.1f}/s)",
                    f"{load.tokens_per_s:,.0f}",
                    f"{load.requests_per_s:.2f}",
                    f"{load.ttft_ms[0]:,.0f} / {load.ttft_ms[1]:,.0f}",
                    f"{load.itl_ms[0]:,.0f} / {load.itl_ms[1]:,.0f}",
                    str(load.failed),
                    f"{load.client_cpu_share:.0%}",
                )
            )
    heads = ("server", "offered", "tokens/s", "requests/s", "TTFT P50 / P99 ms", "ITL P50 / P99 ms", "failed", "client")
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
