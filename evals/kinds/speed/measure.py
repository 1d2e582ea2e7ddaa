"""Benchmark: latency, throughput and memory of both engines, measured in turn on this machine.

Every repeat times baseline and candidate in turn at each batch, so that a busy neighbour slows both; what is compared
is the pair. Prompts and decoded tokens are random, of a fixed seed: speed does not depend on what they say. But the
sequences of a batch are fed different ones. Of a mixture of experts equal tokens would all choose the same experts, and
a step would read as little as one of a single sequence.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from engines.bundle import EngineBundle
from engines.costs.bandwidth import read_bandwidth, roofline_share
from engines.protocol import MapsWeights
from engines.sequences import Sequences
from engines.weight_pages import major_faults
from evals.kind import Context
from evals.kinds.speed import ENGINES, KIND, Benchmark, EngineNumbers, SpeedSample, SpeedSettings
from tapeout.artifact import Artifact
from tapeout.errors import EvidenceError
from tapeout.fingerprint import Fingerprint
from tapeout.progress import ProgressBar

PREFILL_TRIALS = 7  # a repeat is their median: one prefill is short, and easily disturbed
# Threads of an engine that has just run spin on for some 20 ms, on the cores of the one that is timed next: 128 tokens
# of prompt took 60 ms right after the other engine, 49 after a pause of 20 ms, 30 after 100 and alone (measured).
REST_SECONDS = 0.1


class _Timed(NamedTuple):
    """``faults``: pages that the process waited for meanwhile, until they were read from a disk."""

    seconds: float
    faults: int


def measure(context: Context, folder: Path) -> None:
    """The stage of `evals/kinds/speed/`."""
    settings, bundles = context.section(SpeedSettings), {role: context.bundle(role) for role in ENGINES}
    slots = max(settings.batches)
    baseline, candidate = (context.engine(role, slots=slots) for role in ENGINES)
    benchmark(
        settings,
        baseline,
        candidate,
        bundles=bundles,
        threads=context.threads,
        seed=context.seed,
        executed_on=context.executed_on(),
        folder=folder,
        progress=context.progress,
    )


def benchmark(
    settings: SpeedSettings,
    baseline: Sequences,
    candidate: Sequences,
    *,
    bundles: Mapping[str, Artifact[EngineBundle]],
    threads: int,
    seed: int,
    executed_on: Fingerprint,
    folder: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> Artifact[Benchmark]:
    """Write a :class:`Benchmark` with ``metrics.json`` (flat numbers).

    ``bundles``: of ``baseline`` and ``candidate``. A decode step at batch 1 moves at least their ``decode_bytes``.
    """
    engines = {"baseline": baseline, "candidate": candidate}
    progress("read bandwidth")
    bandwidth = read_bandwidth(threads)
    prompt = np.random.default_rng(seed).integers(1, baseline.vocab_size, settings.prompt_tokens).tolist()
    batches, slots = settings.batches, min(engine.slots for engine in engines.values())
    steps = SpeedSettings.warmup_tokens + settings.new_tokens
    fed = {batch: decoded_tokens(batch, steps, baseline.vocab_size, seed) for batch in batches}
    if max(batches) > slots:
        raise EvidenceError(
            f"benchmark.batches {list(batches)} is more than the engines' {slots} slots",
            expected="batches within build.slots",
            remedy="raise build.slots or lower benchmark.batches",
        )
    prefill: dict[str, list[float]] = {name: [] for name in engines}
    decode: dict[tuple[str, int], list[float]] = {(name, b): [] for name in engines for b in batches}
    faults = dict.fromkeys(engines, 0)
    resident = {name: [_resident_share(engine)] for name, engine in engines.items()}
    for engine in engines.values():
        _prefill_seconds(engine, prompt)
    for _ in ProgressBar(range(settings.repeats), title="timing", unit="repeat"):
        trials = [[_prefill_seconds(engine, prompt) for engine in engines.values()] for _ in range(PREFILL_TRIALS)]
        for name, timed in zip(engines, zip(*trials, strict=True), strict=True):
            prefill[name].append(median(one.seconds for one in timed))
            faults[name] += sum(one.faults for one in timed)
        for batch in batches:
            for name, engine in engines.items():
                timed = _step_seconds(engine, prompt, fed[batch])
                decode[name, batch].append(timed.seconds)
                faults[name] += timed.faults
        bandwidth = max(bandwidth, read_bandwidth(threads))
    for name, engine in engines.items():
        resident[name].append(_resident_share(engine))
    progress("peak memory")

    def numbers(name: str) -> EngineNumbers:
        bundle, step = bundles[name], {batch: median(decode[name, batch]) for batch in batches}
        speeds = {batch: batch / step[batch] for batch in batches}
        return EngineNumbers(
            digest=engines[name].digest,
            ttft_ms=1e3 * median(prefill[name]),
            prefill_tokens_per_s=len(prompt) / median(prefill[name]),
            itl_ms={batch: 1e3 * step[batch] for batch in batches},
            decode_tokens_per_s=speeds,
            resident_share=_least(resident[name]),
            page_faults=faults[name],
            peak_memory_mb=peak_memory_mb(bundle.folder, settings.prompt_tokens, settings.new_tokens, threads),
            kv_token_bytes=bundle.record.io.token_bytes,
            bundle_mb=sum(file.size_bytes for file in bundle.files.values()) / 1e6,
            roofline_share=roofline_share(bundle.record.decode_bytes, step[min(batches)], bandwidth),
            cost_per_million_tokens=settings.price_per_hour / 3600 * 1e6 / max(speeds.values()),
        )

    def sample(phase: Literal["decode", "prefill"], batch: int) -> SpeedSample:
        """Prefill is timed one prompt at a time."""
        tokens = len(prompt) if phase == "prefill" else batch
        times = {name: prefill[name] if phase == "prefill" else decode[name, batch] for name in engines}
        speeds = {f"{name}_tokens_per_s": tuple(tokens / s for s in seconds) for name, seconds in times.items()}
        return SpeedSample(batch=batch, phase=phase, **speeds)

    record = Benchmark(
        baseline=numbers("baseline"),
        candidate=numbers("candidate"),
        samples=(sample("prefill", 1), *(sample("decode", batch) for batch in batches)),
        threads=candidate.engine.capabilities.threads or threads,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        read_bandwidth_gb_s=bandwidth / 1e9,
        price_per_hour=settings.price_per_hour,
        executed_on=executed_on,
    )
    return KIND.write(folder, record, parents=bundles, metrics=benchmark_metrics(record))


def _resident_share(engine: Sequences) -> float | None:
    """Of the weights that the engine leaves in their file, in memory now; 1 where it leaves none."""
    opened, mapped = engine.engine, engine.engine.capabilities.mapped_bytes
    if not mapped:
        return 1.0
    resident = opened.resident_bytes(exact=True) if isinstance(opened, MapsWeights) else None
    return None if resident is None else resident / mapped


def _least(shares: list[float | None]) -> float | None:
    """None where one is not known."""
    known = [share for share in shares if share is not None]
    return min(known) if len(known) == len(shares) else None


def _prefill_seconds(engine: Sequences, prompt: list[int]) -> _Timed:
    time.sleep(REST_SECONDS)
    faults, start = major_faults(), time.perf_counter()
    engine.prefill(0, prompt)
    return _Timed(time.perf_counter() - start, major_faults() - faults)


def decoded_tokens(batch: int, steps: int, vocab_size: int, seed: int) -> list[list[int]]:
    """``[steps, batch]`` tokens, different within a step as far as the vocabulary has so many.

    >>> [sorted(step) for step in decoded_tokens(3, 2, 4, seed=0)]
    [[1, 2, 3], [1, 2, 3]]
    """
    random = np.random.default_rng((seed, batch))
    repeats = batch >= vocab_size
    return [(1 + random.choice(vocab_size - 1, batch, replace=repeats)).tolist() for _ in range(steps)]


def _step_seconds(engine: Sequences, prompt: list[int], fed: list[list[int]]) -> _Timed:
    """Median seconds of one decode step of sequences that hold the prompt and grow by one token a step.

    ``fed``: ``[steps, batch]`` tokens. Of the first steps neither time nor faults count.
    """
    time.sleep(REST_SECONDS)
    engine.prefill(0, prompt)
    for slot in range(1, len(fed[0])):
        engine.copy_slot(0, slot, len(prompt))
    seconds, faults = list[float](), 0
    for step, tokens in enumerate(fed):
        lengths = [len(prompt) + step] * len(tokens)
        if step == SpeedSettings.warmup_tokens:
            faults = major_faults()
        start = time.perf_counter()
        engine.decode_greedy(tokens, lengths)
        seconds.append(time.perf_counter() - start)
    return _Timed(median(seconds[SpeedSettings.warmup_tokens :]), major_faults() - faults)


def peak_memory_mb(folder: Path, prompt_tokens: int, new_tokens: int, threads: int) -> float:
    """Peak resident memory of a fresh process that opens the bundle, reads a prompt and answers, in MB."""
    arguments = [str(folder), str(prompt_tokens), str(new_tokens), str(threads)]
    result = subprocess.run(
        [sys.executable, "-m", "evals.kinds.speed.measure", *arguments], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise EvidenceError(
            f"the memory run of {folder} ended with {result.returncode}: {result.stderr.strip()[-500:]}"
        )
    return float(result.stdout)


def benchmark_metrics(record: Benchmark) -> dict[str, float]:
    """Flat numbers for ``dvc metrics``."""
    metrics = {"read_bandwidth_gb_s": record.read_bandwidth_gb_s}
    for name, numbers in (("baseline", record.baseline), ("candidate", record.candidate)):
        for key, value in numbers.model_dump(exclude={"digest"}).items():
            if isinstance(value, dict):
                metrics |= {f"{name}.{key}.b{batch}": number for batch, number in value.items()}
            elif value is not None:
                metrics[f"{name}.{key}"] = value
    return metrics


def _memory_run() -> None:
    from engines.load import load as load_engine

    folder, prompt_tokens, new_tokens, threads = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    engine = Sequences(load_engine(folder, threads=threads, slots=1))
    steps = SpeedSettings.warmup_tokens + new_tokens
    _step_seconds(engine, [1] * prompt_tokens, decoded_tokens(1, steps, engine.vocab_size, seed=0))
    print(_peak_bytes() / 1e6)


def _peak_bytes() -> int:
    """Peak resident memory of this process, in bytes.

    Linux carries ``ru_maxrss`` over from the parent through fork and exec, so the kernel's own mark is read there.
    """
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    _memory_run()
