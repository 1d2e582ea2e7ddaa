"""What the benchmark feeds to the engines that it times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engines.bundle import EngineBundle
from engines.sequences import Sequences
from evals.kinds.speed import ENGINES, KIND, Benchmark, SpeedSettings, measure
from tapeout.artifact import Artifact
from tapeout.fingerprint import Fingerprint

EXPERTS = 64  # a token chooses the one of its number
SETTINGS = SpeedSettings(prompt_tokens=4, new_tokens=3, batches=(1, 8, 16), repeats=1)
MACHINE = Fingerprint(machine="x86_64", features=(), libraries={})


class Timed:
    """Stands in for an engine whose answers are always the same token."""

    vocab_size, slots, digest = 1000, 16, "a" * 64

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.engine = SimpleNamespace(capabilities=SimpleNamespace(threads=2))

    def prefill(self, slot: int, tokens: list[int]) -> None:
        pass

    def copy_slot(self, source: int, target: int, length: int) -> None:
        pass

    def decode_greedy(self, tokens: list[int], lengths: list[int]) -> Any:
        self.steps.append(list(tokens))
        return np.full(len(tokens), 7)


def benchmark(patch: pytest.MonkeyPatch, baseline: Timed, candidate: Timed) -> Benchmark:
    written: list[Benchmark] = []
    patch.setattr(measure, "read_bandwidth", lambda threads: 1e10)
    patch.setattr(measure, "peak_memory_mb", lambda *_: 1.0)
    patch.setattr(measure, "REST_SECONDS", 0)
    patch.setattr(measure, "PREFILL_TRIALS", 1)
    patch.setattr(type(KIND), "write", lambda _, folder, record, **__: written.append(record))
    record = SimpleNamespace(step_bytes=0, io=SimpleNamespace(token_bytes=1))
    bundle = cast(Artifact[EngineBundle], SimpleNamespace(folder=Path(), record=record, files={}))
    measure.benchmark(
        SETTINGS,
        cast(Sequences, baseline),
        cast(Sequences, candidate),
        bundles=dict.fromkeys(ENGINES, bundle),
        threads=2,
        seed=0,
        executed_on=MACHINE,
        folder=Path(),
    )
    return written[0]


def test_sequences_of_a_batch_are_fed_different_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ones choose the same experts: a step of 16 would read those of one, and be timed as that."""
    baseline, candidate = Timed(), Timed()
    benchmark(monkeypatch, baseline, candidate)
    assert baseline.steps == candidate.steps
    assert {len(step) for step in candidate.steps} == set(SETTINGS.batches)
    for step in candidate.steps:
        assert len(set(step)) == len(step)
        # Of 16 tokens that choose one of 64 experts at random, 14.4 are expected.
        assert len({token % EXPERTS for token in step}) > len(step) / 2
    by_batch = {batch: [step for step in candidate.steps if len(step) == batch] for batch in SETTINGS.batches}
    assert all(len({tuple(step) for step in steps}) == len(steps) for steps in by_batch.values())
