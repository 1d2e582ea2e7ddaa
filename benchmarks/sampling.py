"""Measure what choosing the tokens of a step costs, by settings, batch entries and threads.

python -m benchmarks.sampling
python -m benchmarks.sampling --tokenizer artifacts/candidate/tokenizer.json --step-ms 20

All cases take turns, and the least and the median time of each are printed: on a busy machine the least is closer to
what the work takes. The share is that of the least in a step of ``--step-ms``. Ends with exit code 1 if a case of 32
entries with the native kernel exceeds the bar. With a tokenizer it also measures compiling constraints and their masks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from engines.kernels.cpu.sampling import sampling_kernel
from engines.protocol import FloatArray
from runtime.constraints.compiler import ConstraintCompiler
from runtime.engine.sampling import BatchSampler
from runtime.wire.messages import Constraint, GenerateRequest, SamplingSettings
from tapeout.errors import ExitCode

BAR = 0.05  # share of a step
WARMUP_ROUNDS = 2
PROMPT_TOKENS = 600  # that a repetition penalty applies to

PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
CASES: dict[str, dict[str, Any]] = {
    "greedy, penalties": {"sampling": SamplingSettings(**PENALTIES)},
    "temperature 0.8": {"sampling": SamplingSettings(temperature=0.8)},
    "top-k 50": {"sampling": SamplingSettings(temperature=0.8, top_k=50)},
    "top-p 0.95": {"sampling": SamplingSettings(temperature=0.8, top_p=0.95)},
    "min-p 0.05": {"sampling": SamplingSettings(temperature=0.8, min_p=0.05)},
    "all of these": {
        "sampling": SamplingSettings(
            temperature=0.8, top_k=50, top_p=0.95, min_p=0.05, logit_bias={5: 1.0}, **PENALTIES
        )
    },
    "greedy, logprobs 5": {"logprobs": 5},
    "temperature 0.8, logprobs 5": {"sampling": SamplingSettings(temperature=0.8), "logprobs": 5},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@dataclass
class Case:
    settings: str
    entries: int
    threads: int  # 0: numpy
    run: Callable[[], object]
    seconds: list[float] = field(default_factory=list[float])


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--entries", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, nargs="+", default=[0, 1, 2], help="0: numpy, without the kernel")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of a decode step of 32 entries")
    parser.add_argument("--tokenizer", type=Path)
    return parser.parse_args(words)


def logits_like_a_models(entries: int, vocab_size: int) -> FloatArray:
    """Most tokens of a bell curve, and some that stand out by up to 12."""
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2.5, (entries, vocab_size)).astype(np.float32)
    for row in logits:
        some = generator.integers(0, vocab_size, min(60, vocab_size))
        row[some] += generator.uniform(4, 12, len(some)).astype(np.float32)
    return logits


def measure(options: argparse.Namespace) -> list[Case]:
    cases: list[Case] = []
    for threads in options.threads:
        kernel = sampling_kernel(None, options.vocab_size, threads) if threads else None
        if threads and kernel is None:
            continue
        for name, settings in CASES.items():
            for entries in options.entries:
                sampler = BatchSampler(options.vocab_size, kernel=kernel)
                ids = [str(i) for i in range(entries)]
                prompt = range(min(PROMPT_TOKENS, options.vocab_size))
                for id in ids:
                    sampler.add(GenerateRequest(id, prompt, options.rounds + WARMUP_ROUNDS, **settings))
                logits = logits_like_a_models(entries, options.vocab_size)
                cases.append(
                    Case(name, entries, threads, lambda s=sampler, ids=ids, logits=logits: s.choose(ids, logits))
                )
    for round in range(options.rounds + WARMUP_ROUNDS):
        for case in cases:
            if case.threads == 0 and round >= WARMUP_ROUNDS + 3:
                continue  # numpy takes long enough to measure in a few rounds
            start = time.perf_counter()
            case.run()
            if round >= WARMUP_ROUNDS:
                case.seconds.append(time.perf_counter() - start)
    return cases


def constraint_times(tokenizer: Path, vocab_size: int) -> dict[str, float]:
    """Milliseconds: of compiling a small schema, and of a mask and taking the token that follows, over responses."""
    compiler = ConstraintCompiler(tokenizer.read_text(encoding="utf-8"), vocab_size, [0])
    compiler.load()
    start = time.perf_counter()
    matcher = compiler.compile(Constraint("json_schema", json.dumps(SCHEMA)))
    compiled = time.perf_counter() - start
    generator = np.random.default_rng(1)
    times: list[float] = []
    for _ in range(300):
        if matcher.complete:
            matcher = compiler.compile(Constraint("json_schema", json.dumps(SCHEMA)))
        start = time.perf_counter()
        bits = np.unpackbits(matcher.mask([0]).view(np.uint8), bitorder="little")
        masked = time.perf_counter() - start
        bits[0] = 0
        token = int(generator.choice(np.flatnonzero(bits)))
        start = time.perf_counter()
        matcher.advance(token)
        times.append(masked + time.perf_counter() - start)
    return {"compile": 1e3 * compiled, "mask, mean": 1e3 * sum(times) / len(times), "mask, largest": 1e3 * max(times)}


def run(options: argparse.Namespace) -> int:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, V = {options.vocab_size}")
    print("| settings | entries | by | least ms | median ms | share of a step |")
    print("|---|---|---|---|---|---|")
    over = False
    for case in measure(options):
        least, share = 1e3 * min(case.seconds), 1e3 * min(case.seconds) / options.step_ms
        by = f"kernel, {case.threads} threads" if case.threads else "numpy"
        middle = 1e3 * median(case.seconds)
        print(f"| {case.settings} | {case.entries} | {by} | {least:.2f} | {middle:.2f} | {share:.1%} |")
        over |= case.entries == 32 and case.threads == max(options.threads) and share > BAR
    if options.tokenizer:
        for name, value in constraint_times(options.tokenizer, options.vocab_size).items():
            print(f"constraint, {name}: {value:.3f} ms")
    return ExitCode.GATE_FAILED if over else ExitCode.PASS


if __name__ == "__main__":
    sys.exit(run(arguments()))
