"""Measure what Python adds to the steps of a GPU engine, over a stand-in for a GPU whose steps take a given time.

    python -m benchmarks.steps_ahead
    python -m benchmarks.steps_ahead --step-ms 2 --streams 8

The core that serves, the ``cuda`` engine's packing and the encoding of reports are the real ones; only the device is
not: it is busy for so long from the begin of a step, or from the end of the one before it, and chooses tokens at once.
One engine takes two steps at once, so the next one begins before the last has ended; one takes them one by one. They
take turns, round by round. Printed are medians over rounds of the time of a step beyond the device's. All time is this
thread's own processor time, in which it also waits, so what else runs on the machine does not count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from engines.bundle import BLOCK_TOKENS, IOContract
from engines.kernels.cuda.library import DeviceStep, StepResults
from engines.targets.cuda.engine import CudaEngine
from runtime.engine.core import EngineCore
from runtime.wire.codec import encode
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest
from tapeout.errors import ExitCode

BAR_US = 100.0  # that Python may add to a step
VOCABULARY, PROMPT_TOKENS, TOKEN = 32_000, 64, 5
WARMUP_STEPS = 20


class TimedDevice:
    """Stands in for a GPU: a step takes ``seconds``, and steps run one after the other."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.free_at = seconds, 0.0

    def begin(self, step: DeviceStep, *, ranking: bool, logits: bool) -> Callable[[], StepResults]:
        assert not ranking and not logits
        end = self.free_at = max(time.thread_time(), self.free_at) + self.seconds
        results = StepResults(np.full(len(step.rows), TOKEN))

        def finish() -> StepResults:
            while time.thread_time() < end:
                pass
            return results

        return finish

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[1.0, 1.5, 2.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(words)


def added_us(seconds: float, streams: int, steps: int, at_once: int) -> float:
    """Microseconds of a step beyond those of the device, on average."""
    io = IOContract(inputs=(), state=(), max_tokens=4096, slots=1, vocab_size=VOCABULARY)
    blocks = streams * io.max_tokens // BLOCK_TOKENS
    engine = CudaEngine(TimedDevice(seconds), io, digest="", blocks=blocks, threads=0)
    engine.capabilities = replace(engine.capabilities, steps_at_once=at_once)
    core = EngineCore(engine, Limits(max_running=streams, max_draft_tokens=0))
    for number in range(streams):
        prompt = [7 + number] * PROMPT_TOKENS
        core.add(GenerateRequest(f"{number}", prompt, WARMUP_STEPS + 2 * steps), time.monotonic())
    for _ in range(WARMUP_STEPS):
        encode(core.step(time.monotonic()))
    before, start = core.stats().steps, time.thread_time()
    for _ in range(steps):
        encode(core.step(time.monotonic()))
    elapsed, done = time.thread_time() - start, core.stats().steps - before
    core.close()
    return 1e6 * (elapsed / done - seconds)


def main() -> int:
    options = arguments()
    worst = 0.0
    for step_ms in options.step_ms:
        for streams in options.streams:
            found: dict[int, list[float]] = {1: [], 2: []}
            for turn in range(options.rounds):
                for at_once in (1, 2) if turn % 2 else (2, 1):
                    found[at_once].append(added_us(step_ms / 1e3, streams, options.steps, at_once))
            plain, ahead = median(found[1]), median(found[2])
            print(f"{step_ms:3.1f} ms, {streams:3} streams: {plain:6.0f} us added one by one, {ahead:6.0f} ahead")
            worst = max(worst, ahead)
    return ExitCode.PASS if worst <= BAR_US else ExitCode.GATE_FAILED


if __name__ == "__main__":
    sys.exit(main())
