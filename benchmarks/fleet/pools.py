"""Engines for prompts and engines for decoding against as many that do both, in virtual time.

python -m benchmarks.fleet.pools --page docs/benchmarks/pools.md

Engines that do both trade first tokens against even gaps: the more prompt tokens a step may have beside its decodes,
the sooner the first tokens and the longer the gaps (`itl_factor` of runtime/wire/limits.py). So each pair of pools is
compared with the mixed fleet of the shortest gaps among those whose first tokens come as soon.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.fleet.bundles import BUNDLES
from benchmarks.fleet.traffic import single_turn
from runtime.simulation.fleet import FleetFigures, FleetShape, simulate
from runtime.wire.limits import Limits

ENGINES, CACHE_TOKENS, BAR = 8, 60_000, 0.5
FACTORS = (1.5, 3.0, 6.0, 12.0)


class Load(NamedTuple):
    """Of independent prompts. ``block_seconds``: to move a block of the bundle between engines, at 0.8 GB/s."""

    bundle: str
    rate: float
    prompt_tokens: int
    answer_tokens: int
    seconds: float
    block_seconds: float


LOADS = (
    Load("default", 30, 300, 200, 15, 0.0009),
    Load("llama-3.2-1b", 5, 300, 100, 45, 0.0013),
)


class Compared(NamedTuple):
    """``mixed``: by ``itl_factor``. ``equal``: the factor of the fleet to compare with; None where none is as soon."""

    load: Load
    prefill: int
    pools: FleetFigures
    mixed: dict[float, FleetFigures]
    equal: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.equal is None else self.pools.itl_p99 / self.mixed[self.equal].itl_p99


def compare(load: Load, prefills: Sequence[int], seed: int) -> Compared:
    """With the number of engines for prompts that gives the soonest first tokens."""
    traffic = single_turn(
        seed, seconds=load.seconds, rate=load.rate, prompt_tokens=load.prompt_tokens, answer_tokens=load.answer_tokens
    )

    def run(prefill: int, limits: Limits) -> FleetFigures:
        shape = FleetShape(ENGINES, CACHE_TOKENS, limits, prefill=prefill, block_seconds=load.block_seconds)
        return simulate(traffic, BUNDLES[load.bundle], shape, seed=seed)

    found = {prefill: run(prefill, Limits()) for prefill in prefills}
    prefill = min(found, key=lambda prefill: found[prefill].ttft_p99)
    pools = found[prefill]
    mixed = {factor: run(0, Limits(itl_factor=factor)) for factor in FACTORS}
    as_soon = [factor for factor, figures in mixed.items() if figures.ttft_p99 <= pools.ttft_p99]
    return Compared(load, prefill, pools, mixed, min(as_soon, key=lambda f: mixed[f].itl_p99, default=None))


def page(compared: Sequence[Compared]) -> str:
    bars, rows = list[str](), list[str]()
    for one in compared:
        name = f"{one.load.bundle}, {one.load.rate:g} requests/s"
        if one.ratio is None:
            value = "no mixed fleet is as soon"
        else:
            value = f"{one.pools.itl_p99:.1f} ms, {one.ratio:.2f} of the mixed fleet's"
        holds = one.ratio is None or one.ratio <= BAR
        bars.append(f"| {name} | at most {BAR:g} | {value} | {'holds' if holds else '**missed**'} |")
        fleets = {f"{one.prefill} for prompts, {ENGINES - one.prefill} for decoding": one.pools}
        fleets |= {f"mixed, factor {factor:g}": figures for factor, figures in one.mixed.items()}
        equal = f"mixed, factor {one.equal:g}" if one.equal is not None else ""
        rows += [
            f"| {name} | {fleet}{' (compared)' if fleet == equal else ''} | {figures.ttft_p50:.0f} "
            f"| {figures.ttft_p99:.0f} | {figures.itl_p50:.1f} | {figures.itl_p99:.1f} | {figures.busy:.0%} |"
            for fleet, figures in fleets.items()
        ]
    return f"""# Engines for prompts and for decoding, simulated

This page is written by `python -m benchmarks.fleet.pools --page docs/benchmarks/pools.md`. Do not edit it.

{ENGINES} engines, independent prompts. Scheduler, cache, router and the decision to change over are those of the
server, in virtual time; the length of a step and of a move are models (`benchmarks/fleet/bundles.py`,
[fleet.md](../fleet.md#pools)). Mixed engines trade first tokens against even gaps by `itl_factor`, the share by which
prompts may make a step longer; pools run with the default, 1.5. Each is compared with the mixed fleet of the shortest
gaps among those whose P99 of the first token is no later.

| load | bar: P99 gap between tokens | found | |
|---|---|---|---|
{chr(10).join(bars)}

| load | engines | TTFT P50 ms | P99 ms | gap P50 ms | P99 ms | busy |
|---|---|--:|--:|--:|--:|--:|
{chr(10).join(rows)}

The gap in which a request changes over counts. It is one of an answer, so with answers of fewer than 100 tokens it is
what P99 shows: then pools give sooner first tokens, and no shorter gaps.
"""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill", type=int, nargs="+", default=[4, 5], help="engines for prompts that are tried")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(words)
    text = page([compare(load, options.prefill, options.seed) for load in LOADS])
    print(text)
    if options.page:
        options.page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
