"""Measure decoding on a machine that has other work: beside one busy process, and beside one for each core.

python -m benchmarks.busy_machine artifacts/candidate
python -m benchmarks.busy_machine artifacts/candidate --level x86-64-avx2 --json busy.json
python -m benchmarks.busy_machine artifacts/candidate other/candidate    # which of them is faster, and where

A busy process is a loop of Python. All bundles and all numbers of such processes take turns. Figures are medians over
the rounds. CPU milliseconds are those of all threads of the engine, also while they wait: what a token costs the other
processes of the machine. With `--as-server` the main thread leaves the last core to a server while it is seldom
interrupted, as that of an engine behind `tapeout serve` does. Ends with exit code 1 if a bundle keeps less than the bar
beside one busy process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from engines.load import load
from engines.sequences import Sequences
from runtime.engine.shared_cores import SharedCores
from tapeout.cores import physical_cores
from tapeout.errors import ExitCode, TapeoutError

BAR = 0.6  # of the quiet speed, beside one busy process on two cores; a fair share is two thirds
CONTEXT = 128  # positions before the first token
DECODED = 64  # positions after them
WARMUP_STEPS = 3
SETTLE_SECONDS = 0.05  # after a busy process has begun or stopped


class Case(NamedTuple):
    bundle: str
    batch: int
    busy: int  # processes


class Sample(NamedTuple):
    tokens_per_s: float
    cpu_ms: float  # of a token


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--level", default="", help="default: the best of this processor")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, physical_cores()], help="busy processes")
    parser.add_argument("--threads", type=int, default=0, help="default: as the engine chooses")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--as-server", action="store_true", help="the main thread leaves the last core to a server")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    return parser.parse_args(words)


@contextmanager
def busy_processes(count: int) -> Generator[list[int]]:
    """Process ids of loops that are stopped at first."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def decode(engine: Sequences, batch: int, seconds: float, cores: SharedCores | None = None) -> Sample:
    """Greedy decoding in ``batch`` slots for about ``seconds``, again and again after the same context."""
    tokens, step, begin, cpu = [100 + slot for slot in range(batch)], 0, 0.0, 0.0
    while step <= WARMUP_STEPS or time.perf_counter() - begin < seconds:
        if step == WARMUP_STEPS:
            begin, cpu = time.perf_counter(), time.process_time()
        tokens = engine.decode_greedy(tokens, [CONTEXT + step % DECODED] * batch).tolist()
        step += 1
        if cores is not None:
            cores.stepped(time.monotonic())
    elapsed, used, count = time.perf_counter() - begin, time.process_time() - cpu, (step - WARMUP_STEPS) * batch
    return Sample(count / elapsed, 1e3 * used / count)


def measure(engines: dict[str, Sequences], options: argparse.Namespace) -> dict[Case, list[Sample]]:
    """The samples of every case, in the order of the rounds."""
    samples: dict[Case, list[Sample]] = defaultdict(list)
    for engine in engines.values():
        for slot in range(max(options.batches)):
            engine.prefill(slot, [100 + (37 * position + 101 * slot) % 1000 for position in range(CONTEXT)])
    with busy_processes(max(options.busy)) as processes:
        # Now that all threads run, and the processes, which would keep to the same cores.
        cores = SharedCores(options.threads or physical_cores()) if options.as_server else None
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            for busy in options.busy:
                for pid in processes[:busy]:
                    os.kill(pid, signal.SIGCONT)
                time.sleep(SETTLE_SECONDS)
                for batch in options.batches:
                    for name, engine in engines.items():
                        samples[Case(name, batch, busy)].append(decode(engine, batch, options.seconds, cores))
                for pid in processes[:busy]:
                    os.kill(pid, signal.SIGSTOP)
    return samples


def kept_speed(samples: dict[Case, list[Sample]], case: Case) -> float:
    """The median of the rounds' ratios to the quiet speed.

    >>> quiet, busy = Case("a", 1, 0), Case("a", 1, 1)
    >>> kept_speed({quiet: [Sample(100, 1), Sample(200, 1)], busy: [Sample(50, 1), Sample(150, 1)]}, busy)
    0.625
    """
    pairs = zip(samples[case], samples[case._replace(busy=0)], strict=True)
    return median(busy.tokens_per_s / quiet.tokens_per_s for busy, quiet in pairs)


def table(samples: dict[Case, list[Sample]]) -> str:
    lines = [
        "| bundle | streams | busy processes | tokens/s | of quiet | CPU ms per token |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for case in sorted(samples):
        speed, cpu = (median(values) for values in zip(*samples[case], strict=True))
        share = f"{kept_speed(samples, case):.2f}" if case._replace(busy=0) in samples else "-"
        lines.append(f"| {case.bundle} | {case.batch} | {case.busy} | {speed:,.0f} | {share} | {cpu:.2f} |")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> dict[Case, list[Sample]]:
    with ExitStack() as stack:
        engines = dict[str, Sequences]()
        for folder in options.bundles:
            slots = max(options.batches)
            opened = load(folder, threads=options.threads, slots=slots, level=options.level)
            engines[str(folder)] = Sequences(opened)
            stack.callback(opened.close)
        return measure(engines, options)


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    try:
        samples = run(options)
    except TapeoutError as error:
        print(error, file=sys.stderr)
        return ExitCode.BROKEN
    print(table(samples))
    if options.json:
        options.json.write_text(
            json.dumps([{**case._asdict(), "samples": [s._asdict() for s in found]} for case, found in samples.items()])
        )
    beside_one = [kept_speed(samples, case) for case in samples if case.busy == 1 and case._replace(busy=0) in samples]
    return ExitCode.PASS if all(share >= BAR for share in beside_one) else ExitCode.GATE_FAILED


if __name__ == "__main__":
    sys.exit(main())
