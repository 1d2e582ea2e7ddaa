"""What a routing decision costs: processor time of one, and memory of the index a block.

python -m benchmarks.fleet.decision
python -m benchmarks.fleet.decision --engines 64 --tokens 2048 --json decision.json

Engines hold prefixes of different lengths of the prompts, which is more to look up than where few of them do. Times are
those of the thread alone, the median of rounds, so other work on the machine counts only as far as it takes shared
caches and cores. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from time import thread_time
from typing import Any

from runtime.gateway.routing.index import PrefixIndex
from runtime.gateway.routing.router import FleetRouter
from runtime.wire.block_keys import block_keys
from runtime.wire.messages import (
    KEY_BYTES,
    MOST_KEYS,
    EngineLoad,
    EngineStats,
    GenerateRequest,
    KeyChanges,
    RoutingReport,
    StepReport,
)

BLOCK_TOKENS = 64
PROMPTS, ROUNDS = 50, 9
BAR_US, BAR_BYTES = 250, 200


def told(engines: int, prompts: Sequence[Sequence[int]], random: Random) -> tuple[FleetRouter, list[str]]:
    """A router that has heard from so many engines, of different loads."""
    router, names = FleetRouter(), [f"tcp:10.0.{number // 256}.{number % 256}:9000" for number in range(engines)]
    for name in names:
        keys = [key for prompt in prompts for key in block_keys(prompt, BLOCK_TOKENS)[: random.randrange(40)]]
        load = EngineLoad(random.randrange(500), random.randrange(10), 0, 5, 64, 40, 0.0002, 0.006, 100)
        router.heard(name, _report(router.join(name, BLOCK_TOKENS), keys, load))
    return router, names


def decision_us(engines: int, tokens: int, *, tied: bool = False) -> dict[str, float]:
    """Microseconds of processor time by part. ``tied``: all engines are equally good."""
    random = Random(0)
    prompts = [[random.randrange(50_000) for _ in range(tokens)] for _ in range(PROMPTS)]
    requests = [GenerateRequest("r", prompt, 100) for prompt in prompts]
    router, names = told(engines, prompts, random)
    if tied:
        for name in names:
            router.join(name, BLOCK_TOKENS)
    keys = [block_keys(prompt, BLOCK_TOKENS) for prompt in prompts]
    return {
        "decision": _us(lambda number: router.choose(requests[number], names)),
        "of which keys": _us(lambda number: block_keys(prompts[number], BLOCK_TOKENS)),
        "of which index": _us(lambda number: router.index.resumable(keys[number])),
    }


def block_bytes(engines: int, blocks: int, shared: float) -> float:
    """Memory of the index for each block of each engine. ``shared``: how many of its blocks all engines have, too."""
    random, index = Random(0), PrefixIndex()
    common = [random.randbytes(KEY_BYTES) for _ in range(int(shared * blocks))]
    tracemalloc.start()
    for number in range(engines):
        turn, name = index.join(f"engine-{number}"), f"engine-{number}"
        keys = [*common, *(random.randbytes(KEY_BYTES) for _ in range(blocks - len(common)))]
        for part, start in enumerate(range(0, blocks, MOST_KEYS)):
            report = _report(turn, keys[start : start + MOST_KEYS], EngineLoad(), part)
            assert report.routing is not None
            index.apply(name, report.routing, report.stats)
        del keys
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / (engines * blocks)


def decision(engines: int = 64, tokens: int = 2048, blocks: int = 2000) -> dict[str, Any]:
    """``blocks``: of each engine, for the memory of the index."""
    return {
        "engines": engines,
        "tokens": tokens,
        "microseconds": decision_us(engines, tokens),
        "microseconds, all equal": decision_us(engines, tokens, tied=True),
        "bytes a block": block_bytes(engines, blocks, 0.0),
        "bytes a block, half shared": block_bytes(engines, blocks, 0.5),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=2000, help="of each engine, for the memory of the index")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    figures = decision(options.engines, options.tokens, options.blocks)
    print(json.dumps(figures, indent=1))
    print(f"bars: {BAR_US} microseconds and {BAR_BYTES} bytes", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def _us(call: Callable[[int], object]) -> float:
    times = list[float]()
    for _ in range(ROUNDS):
        started = thread_time()
        for number in range(PROMPTS):
            call(number)
        times.append((thread_time() - started) / PROMPTS * 1e6)
    return round(median(times), 1)


def _report(turn: int, keys: Sequence[bytes], load: EngineLoad, number: int = 0) -> StepReport:
    changes = KeyChanges(b"".join(key[:KEY_BYTES] for key in keys))
    routing = RoutingReport(turn, number, not number, 0, changes, KeyChanges(), 0, load)
    return StepReport((), EngineStats(blocks=1), (), routing)


if __name__ == "__main__":
    sys.exit(main())
