"""Compare how requests are spread over a fleet, in virtual time; what docs/benchmarks/fleet.md shows.

python -m benchmarks.fleet.run
python -m benchmarks.fleet.run --traces /path/to/traces --json fleet.json --page docs/benchmarks/fleet.md
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
from pathlib import Path

from benchmarks.fleet.bundles import BUNDLES
from benchmarks.fleet.decision import decision
from benchmarks.fleet.fairness import GATEWAYS, fairness
from benchmarks.fleet.page import Compared, bar_table, bars, page, table
from benchmarks.fleet.policies import POLICIES
from benchmarks.fleet.traffic import single_turn, without_pauses
from runtime.simulation.fleet import FleetShape, simulate
from runtime.simulation.step_lengths import StepLengths
from runtime.simulation.traffic import Traffic, multi_turn, read_trace
from tapeout.errors import ExitCode, TapeoutError

LOADS = (0.4, 0.7, 0.95)
# By name of the file: by what lengths are divided, since the default bundle has 2,048 positions, how many times as many
# requests come a second, so that eight engines have something to do, and how many seconds of the trace are taken.
TRACES = {
    "mooncake_conversation.jsonl": (16, 2.0, 900.0),
    "azure_2023_conversation.csv": (4, 3.0, 300.0),
    "azure_2023_code.csv": (4, 4.0, 900.0),
}


def saturation(workload: Traffic, lengths: StepLengths, shape: FleetShape, seed: int) -> float:
    """Conversations a second that round robin finishes, where they all come at once and nobody pauses to think."""
    at_once = without_pauses(workload.faster(1e9))
    figures = simulate(at_once, lengths, shape, POLICIES["round robin"], seed)
    answers = sum(len(turn.answer) for conversation in workload.conversations for turn in conversation.turns)
    return len(workload.conversations) * figures.tokens_per_second / answers


def compare(
    workload: Traffic,
    policies: Iterable[str],
    lengths: StepLengths,
    shape: FleetShape,
    seed: int = 0,
    load: float | None = None,
) -> Compared:
    figures = {policy: simulate(workload, lengths, shape, POLICIES[policy], seed) for policy in policies}
    return Compared(workload.name, load, workload.turns, figures)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help=f"a folder with any of {', '.join(TRACES)}")
    parser.add_argument("--bundle", choices=BUNDLES, default="default", help="whose step lengths are taken")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--cache-tokens", type=int, default=60_000, help="KV memory of each engine")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument(
        "--seconds", type=float, default=40, help="in which conversations would start at full load; more at lower ones"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--real", type=Path, help="what benchmarks.fleet.real wrote, for the page")
    parser.add_argument(
        "--page", type=Path, help="write docs/benchmarks/fleet.md; with the cost of a decision and fairness, too"
    )
    options = parser.parse_args(words)
    real = json.loads(options.real.read_text(encoding="utf-8")) if options.real else None
    lengths, shape = BUNDLES[options.bundle], FleetShape(options.engines, options.cache_tokens)
    seed, seconds, compared = options.seed, options.seconds, list[Compared]()

    def run(workload: Traffic, load: float | None = None) -> None:
        print(f"{workload.name}: {workload.turns} requests", file=sys.stderr)
        compared.append(compare(workload, options.policies, lengths, shape, seed, load))

    try:
        most = saturation(multi_turn(seed, seconds=20, rate=options.engines), lengths, shape, seed)
        print(f"round robin can answer {most:.2f} multi-turn conversations a second", file=sys.stderr)
        for load in LOADS:
            # About as many conversations at each load: else P99 would be one of few requests where there is little.
            run(multi_turn(seed, seconds=seconds / load, rate=load * most), load)
        rate = 0.5 / (lengths.seconds(0, 300) + 60 * lengths.seconds(8, 0) / 8) * options.engines
        run(single_turn(seed, seconds=seconds / 2, rate=rate, prompt_tokens=300, answer_tokens=60))
        for name, (shrink, faster, first) in TRACES.items() if options.traces else ():
            if (options.traces / name).is_file():
                run(read_trace(options.traces / name, shrink).first(first).faster(faster))
    except TapeoutError as error:
        print(error, file=sys.stderr)
        return ExitCode.BROKEN
    print(f"{table(compared)}\n\n{bar_table(bars(compared))}")
    settings = {
        "bundle": options.bundle,
        "engines": options.engines,
        "cache_tokens": options.cache_tokens,
        "seed": seed,
        "saturation": most,
    }
    cost = decision() if options.page else None
    fair = [fairness(gateways, seed=seed) for gateways in GATEWAYS] if options.page else []
    if options.json:
        content = {**settings, "compared": [one.as_json() for one in compared], "decision": cost}
        content["fairness"] = [one.as_json() for one in fair]
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if cost is not None:
        options.page.write_text(page(compared, settings, cost, fair, real), encoding="utf-8")
    return ExitCode.PASS


if __name__ == "__main__":
    sys.exit(main())
