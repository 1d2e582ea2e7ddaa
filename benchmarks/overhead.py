"""Measure the share of a decode step that is spent outside ONNX Runtime: binding inputs, reading tokens, sampling.

python -m benchmarks.overhead artifacts/candidate
python -m benchmarks.overhead artifacts/candidate --batches 1 --steps 500

A step lasts from the end of one run of the session to the end of the next run. All time before the run starts counts as
Python. Prints one line of greedy decode for each batch size, and one line for `runtime.generate`, which samples one
sequence and detokenizes it. Ends with exit code 1 if the share of a greedy step exceeds the bar. On a busy machine the
session slows down more than Python does, so shares look better than they are: compare the microseconds with the step
time of a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime as ort
from tokenizers import Tokenizer

from engines.load import load
from engines.sequences import Sequences
from runtime.engine.core import EngineCore
from runtime.generate import GenerationSettings, generate
from runtime.wire.limits import Limits
from tapeout.errors import EvidenceError, ExitCode, TapeoutError

WARMUP_STEPS = 5
GENERATE = "generate"
BAR = 0.03  # share of a greedy step; generate also detokenizes, so it has no bar

Span = tuple[float, float]  # start and end of a run, in seconds on one clock


@dataclass(frozen=True)
class Overhead:
    """Medians over steps; ``share`` is the median of the shares of single steps."""

    step_ms: float
    python_us: float
    share: float


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0, help="default: one per physical core")
    return parser.parse_args(words)


@contextmanager
def recorded_runs() -> Generator[list[Span]]:
    """All runs of ONNX Runtime sessions with IO binding while the context is open, in order."""
    runs: list[Span] = []
    run_with_iobinding = ort.InferenceSession.run_with_iobinding

    def timed(self: ort.InferenceSession, iobinding: Any, run_options: Any = None) -> None:
        start = time.perf_counter()
        run_with_iobinding(self, iobinding, run_options)
        runs.append((start, time.perf_counter()))

    ort.InferenceSession.run_with_iobinding = timed
    try:
        yield runs
    finally:
        ort.InferenceSession.run_with_iobinding = run_with_iobinding


def overhead(runs: Sequence[Span]) -> Overhead:
    """Summarize the steps between the first run and the last. :class:`EvidenceError` if there are none.

    >>> overhead([(0.0, 0.5), (0.625, 1.5)])
    Overhead(step_ms=1000.0, python_us=125000.0, share=0.125)
    """
    if len(runs) < 2:
        raise EvidenceError(f"{len(runs)} runs of the session", expected="an engine that decodes on ONNX Runtime")
    steps = [end - previous_end for (_, previous_end), (_, end) in pairwise(runs)]
    python = [start - previous_end for (_, previous_end), (start, _) in pairwise(runs)]
    shares = [outside / step for outside, step in zip(python, steps, strict=True)]
    return Overhead(1e3 * median(steps), 1e6 * median(python), median(shares))


def decode_greedily(engine: Sequences, prompt: Sequence[int], batch: int, steps: int) -> Overhead:
    """Decode ``batch`` neighbouring slots that all hold the prompt, one token each per step."""
    engine.prefill(0, prompt)
    for slot in range(1, batch):
        engine.copy_slot(0, slot, len(prompt))
    tokens = [prompt[-1 - slot % len(prompt)] for slot in range(batch)]
    with recorded_runs() as runs:
        for step in range(WARMUP_STEPS + steps):
            tokens = engine.decode_greedy(tokens, [len(prompt) + step] * batch).tolist()
    return overhead(runs[WARMUP_STEPS - 1 :])


def generate_text(core: EngineCore, tokenizer: Tokenizer, prompt: Sequence[int], steps: int) -> Overhead:
    """Generate the text of one sequence; tokens are sampled with default settings."""
    settings = GenerationSettings(max_new_tokens=1 + WARMUP_STEPS + steps)
    with recorded_runs() as runs:
        for _ in generate(core, tokenizer, prompt, settings):
            pass
    return overhead(runs[WARMUP_STEPS:])


def run(options: argparse.Namespace) -> dict[str, Overhead]:
    opened = load(options.bundle, threads=options.threads, slots=max(options.batches))
    engine = Sequences(opened)
    try:
        tokenizer = Tokenizer.from_file(str(options.bundle / "tokenizer.json"))
        text = Path(__file__).read_text()
        prompt = tokenizer.encode(text, add_special_tokens=False).ids[: options.prompt_tokens]
        found = {f"batch {batch}": decode_greedily(engine, prompt, batch, options.steps) for batch in options.batches}
        return found | {GENERATE: generate_text(EngineCore(opened, Limits()), tokenizer, prompt, options.steps)}
    finally:
        engine.close()


def main() -> int:
    try:
        found = run(arguments())
    except TapeoutError as error:
        print(error, file=sys.stderr)
        return ExitCode.BROKEN
    for name, measured in found.items():
        step = f"{measured.step_ms:7.2f} ms per step, {measured.python_us:5.0f} µs outside the session"
        print(f"{name:9} {step}: {measured.share:.2%}")
    greedy = [measured.share for name, measured in found.items() if name != GENERATE]
    return ExitCode.PASS if max(greedy) < BAR else ExitCode.GATE_FAILED


if __name__ == "__main__":
    sys.exit(main())
