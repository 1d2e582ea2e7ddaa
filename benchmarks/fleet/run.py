"""Compare how requests are spread over a fleet, in virtual time; what docs/benchmarks/fleet.md shows.

python -m benchmarks.fleet.run
python -m benchmarks.fleet.run --traces /path/to/traces --json fleet.json
python -m benchmarks.fleet.run --bundle llama-3.2-1b --engines 4 --policies "round robin" exact

Without --traces only generated workloads are simulated. Loads of multi-turn conversations are shares of what round
robin can answer, which is measured first: as many conversations a second as it finishes where all of them come at once.
Figures depend on the seed and on nothing else of the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet.engines import BUNDLES, StepLengths
from benchmarks.fleet.policies import POLICIES
from benchmarks.fleet.simulate import Figures, FleetShape, simulate
from benchmarks.fleet.workloads import Workload, multi_turn, read_trace, single_turn
from tapeout.errors import ExitCode, TapeoutError

LOADS = (0.4, 0.7, 0.95)
BLIND = ("round robin", "two choices", "least load")
RIVALS = ("round robin", "least load", "session hash")
# By name of the file: by what lengths are divided, since the default bundle has 2,048 positions, how many times as many
# requests come a second, so that eight engines have something to do, and how many seconds of the trace are taken.
TRACES = {
    "mooncake_conversation.jsonl": (16, 2.0, 1200.0),
    "azure_2023_conversation.csv": (4, 3.0, 600.0),
    "azure_2023_code.csv": (4, 4.0, 1200.0),
}


@dataclass(frozen=True)
class Compared:
    """One workload under several policies. ``load``: a share of what round robin can answer, where that is known."""

    workload: str
    load: float | None
    turns: int
    figures: tuple[Figures, ...]

    def of(self, policy: str) -> Figures | None:
        return next((figures for figures in self.figures if figures.policy == policy), None)

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "load": self.load,
            "turns": self.turns,
            "policies": [figures.as_json() for figures in self.figures],
        }


@dataclass(frozen=True)
class Bar:
    what: str
    expected: str
    found: str
    holds: bool


def saturation(workload: Workload, lengths: StepLengths, shape: FleetShape, seed: int) -> float:
    """Conversations a second that round robin finishes, where they all come at once and nobody pauses to think."""
    at_once = workload.faster(1e9).without_pauses()
    figures = simulate(at_once, "round robin", lengths, shape, seed)
    answers = sum(len(turn.answer) for conversation in workload.conversations for turn in conversation.turns)
    return len(workload.conversations) * figures.tokens_per_second / answers


def compare(
    workload: Workload,
    policies: Iterable[str],
    lengths: StepLengths,
    shape: FleetShape,
    seed: int = 0,
    load: float | None = None,
) -> Compared:
    figures = [simulate(workload, policy, lengths, shape, seed) for policy in policies]
    return Compared(workload.name, load, workload.turns, tuple(figures))


def bars(compared: Sequence[Compared]) -> list[Bar]:
    """Those of the comparison whose policies are all there."""
    found = list[Bar]()
    for one in compared:
        name = one.workload if one.load is None else f"{one.workload}, {one.load:.0%} load"
        ours = one.of("exact")
        if ours is None:
            continue
        blind = [figures for policy in BLIND if (figures := one.of(policy))]
        if one.load == 0.7 and blind:
            ratios = {figures.policy: ours.ttft_p99 / figures.ttft_p99 for figures in blind}
            text = ", ".join(f"{ratio:.2f} of {policy}" for policy, ratio in ratios.items())
            found.append(Bar(f"{name}: P99 TTFT", "at most 0.25 of each", text, max(ratios.values()) <= 0.25))
        rivals = [figures for policy in RIVALS if (figures := one.of(policy))]
        if rivals:
            p50 = ours.ttft_p50 / min(figures.ttft_p50 for figures in rivals)
            p99 = ours.ttft_p99 / min(figures.ttft_p99 for figures in rivals)
            text = f"P50 {p50:.2f}, P99 {p99:.2f}"
            found.append(Bar(f"{name}: TTFT, of the best other", "at most 1.05", text, max(p50, p99) <= 1.05))
        oracle = one.of("most cached")
        if oracle is not None and oracle.hits:
            text = f"{ours.hits / oracle.hits:.1%} ({ours.hits:.1%} and {oracle.hits:.1%})"
            found.append(Bar(f"{name}: hits, of the oracle's", "at least 97 %", text, ours.hits >= 0.97 * oracle.hits))
    return found


def table(compared: Sequence[Compared]) -> str:
    lines = [
        "| workload | load | policy | TTFT P50 ms | TTFT P99 ms | hits | of the possible | tokens/s |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for one in compared:
        load = "-" if one.load is None else f"{one.load:.0%}"
        lines += [
            f"| {one.workload} | {load} | {figures.policy} | {figures.ttft_p50:,.0f} | {figures.ttft_p99:,.0f} "
            f"| {figures.hits:.1%} | {figures.possible:.1%} | {figures.tokens_per_second:,.0f} |"
            for figures in one.figures
        ]
    return "\n".join(lines)


def bar_table(found: Sequence[Bar]) -> str:
    lines = ["| what | bar | found | |", "|---|---|---|---|"]
    lines += [
        f"| {bar.what} | {bar.expected} | {bar.found} | {'holds' if bar.holds else '**missed**'} |" for bar in found
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help=f"a folder with any of {', '.join(TRACES)}")
    parser.add_argument("--bundle", choices=BUNDLES, default="default", help="whose step lengths are taken")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--cache-tokens", type=int, default=60_000, help="KV memory of each engine")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seconds", type=float, default=120, help="of virtual time in which conversations start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    lengths, shape = BUNDLES[options.bundle], FleetShape(options.engines, options.cache_tokens)
    seed, seconds, compared = options.seed, options.seconds, list[Compared]()

    def run(workload: Workload, load: float | None = None) -> None:
        print(f"{workload.name}: {workload.turns} requests", file=sys.stderr)
        compared.append(compare(workload, options.policies, lengths, shape, seed, load))

    try:
        most = saturation(multi_turn(seed, seconds=20, rate=options.engines), lengths, shape, seed)
        print(f"round robin can answer {most:.2f} multi-turn conversations a second", file=sys.stderr)
        for load in LOADS:
            run(multi_turn(seed, seconds=seconds, rate=load * most), load)
        rate = 0.5 / (300 * lengths.token + 60 * lengths.seconds(8, 0) / 8) * options.engines
        run(single_turn(seed, seconds=seconds / 2, rate=rate, prompt_tokens=300, answer_tokens=60))
        for name, (shrink, faster, first) in TRACES.items() if options.traces else ():
            if (options.traces / name).is_file():
                run(read_trace(options.traces / name, shrink).first(first).faster(faster))
    except TapeoutError as error:
        print(error, file=sys.stderr)
        return ExitCode.BROKEN
    found = bars(compared)
    print(f"{table(compared)}\n\n{bar_table(found)}")
    if options.json:
        content = {
            "bundle": options.bundle,
            "engines": options.engines,
            "cache_tokens": options.cache_tokens,
            "seed": seed,
            "saturation": most,
            "compared": [one.as_json() for one in compared],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return ExitCode.PASS


if __name__ == "__main__":
    sys.exit(main())
