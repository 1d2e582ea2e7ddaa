"""Measure steps that hold decodes and a chunk of a prompt together, against the two alone.

    python -m benchmarks.mixed_step artifacts/candidate

A step with both reads the weights once, so it should cost less than two steps. The three kinds of step take turns, and
all write the same positions each time, so the caches do not grow. Medians are printed, and the ratio of each round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from engines.load import load
from engines.protocol import Engine, Entry
from tapeout.errors import ExitCode

BAR = 1.1  # times the sum of the parts
CONTEXT = 128  # positions before each decode
SLOTS = 32


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--decodes", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=256, help="prompt tokens of a step")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(words)


def measure(engine: Engine, decodes: int, chunk: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round's steps: of decodes, of a chunk, and of both."""
    size = engine.capabilities.block_tokens
    tables = _tables(size, [CONTEXT + 1] * decodes + [chunk])
    for number in range(decodes):
        engine.step([Entry(_tokens(CONTEXT, number), 0, tables[number])])
    decoding = [Entry(_tokens(1, number), CONTEXT, tables[number]) for number in range(decodes)]
    prompt = [Entry(_tokens(chunk, decodes), 0, tables[decodes], positions=())]
    steps = {"decodes": decoding, "chunk": prompt, "mixed": [*decoding, *prompt]}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        for name, entries in steps.items():
            start = time.perf_counter()
            engine.step(entries)
            if turn >= 3:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _tables(block_tokens: int, lengths: Sequence[int]) -> list[list[int]]:
    tables, first = list[list[int]](), 0
    for length in lengths:
        count = -(-length // block_tokens)
        tables.append(list(range(first, first + count)))
        first += count
    return tables


def _tokens(count: int, seed: int) -> list[int]:
    return [100 + (position * 37 + seed * 101) % 1000 for position in range(count)]


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    engine = load(options.bundle, threads=options.threads, slots=SLOTS)
    seconds = measure(engine, options.decodes, options.chunk, options.rounds)
    parts = [a + b for a, b in zip(seconds["decodes"], seconds["chunk"], strict=True)]
    ratio = median(mixed / part for mixed, part in zip(seconds["mixed"], parts, strict=True))
    found = {f"{name}_ms": round(1000 * median(times), 2) for name, times in seconds.items()}
    print(json.dumps({**found, "ratio": round(ratio, 3), "bar": BAR}))
    return ExitCode.PASS if ratio <= BAR else ExitCode.GATE_FAILED


if __name__ == "__main__":
    sys.exit(main())
