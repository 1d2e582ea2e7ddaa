"""Defects of what the benchmark times: steps that read less than they would, and steps that wait for a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engines.bundle import WEIGHTS_FILE, EngineBundle
from engines.kernels import cpu as native
from engines.load import load
from engines.sequences import Sequences
from evals.check import Outcome
from evals.gate import judge
from evals.kinds.speed import ENGINES, KIND, Benchmark, SpeedSettings, measure, paged
from evals.verdict import Verdict
from tapeout.artifact import Artifact
from tapeout.fingerprint import Fingerprint
from tests.paging import drop_pages, float_mixture
from tests.planted.test_statistics import BOUNDS, evidence

EXPERTS = 64  # a token chooses the one of its number
SETTINGS = SpeedSettings(prompt_tokens=4, new_tokens=3, batches=(1, 8, 16), repeats=1)
MACHINE = Fingerprint(machine="x86_64", features=(), libraries={})


class Timed:
    """Stands in for an engine whose answers are always the same token."""

    vocab_size, slots, digest = 200, 16, "a" * 64

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.engine = SimpleNamespace(capabilities=SimpleNamespace(threads=2, mapped_bytes=0))

    def prefill(self, slot: int, tokens: list[int]) -> None:
        pass

    def copy_slot(self, source: int, target: int, length: int) -> None:
        pass

    def decode_greedy(self, tokens: list[int], lengths: list[int]) -> Any:
        self.steps.append(list(tokens))
        return np.full(len(tokens), 7)


def benchmark(
    patch: pytest.MonkeyPatch,
    baseline: Timed | Sequences,
    candidate: Timed | Sequences,
    timed: SpeedSettings = SETTINGS,
    rest: Callable[[float], object] = lambda _: None,
) -> Benchmark:
    """``rest``: what happens before each measurement."""
    written: list[Benchmark] = []
    patch.setattr(measure, "read_bandwidth", lambda threads: 1e10)
    patch.setattr(measure, "peak_memory_mb", lambda *_: 1.0)
    patch.setattr(measure.time, "sleep", rest)
    patch.setattr(measure, "PREFILL_TRIALS", 1)
    patch.setattr(type(KIND), "write", lambda _, folder, record, **__: written.append(record))
    record = SimpleNamespace(decode_bytes=0, io=SimpleNamespace(token_bytes=1))
    bundle = cast(Artifact[EngineBundle], SimpleNamespace(folder=Path(), record=record, files={}))
    measure.benchmark(
        timed,
        cast(Sequences, baseline),
        cast(Sequences, candidate),
        bundles=dict.fromkeys(ENGINES, bundle),
        threads=2,
        seed=0,
        executed_on=MACHINE,
        folder=Path(),
    )
    return written[0]


def test_sequences_of_a_batch_are_fed_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """They choose the same experts: a step of 16 would read those of one, and be timed as that."""
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


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Artifact[EngineBundle]:
    return float_mixture(tmp_path_factory.mktemp("mixture") / "bundle")


@pytest.fixture
def mapped(mixture: Artifact[EngineBundle]) -> Iterator[Sequences]:
    (mixture.folder / WEIGHTS_FILE).read_bytes()  # all of it is in memory
    engine = Sequences(load(mixture.folder, threads=1, map_experts=True))
    yield engine
    engine.close()


def verdict(record: Benchmark) -> Verdict:
    """Of a good engine that was found to be fast, in a benchmark that says this of the weights."""
    whole = evidence()
    report = whole.reports["speed"]
    summary = report.record.model_copy(update={"paged": paged(record)})
    return judge(replace(whole, reports={**whole.reports, "speed": replace(report, record=summary)}), BOUNDS)


SMALL = SpeedSettings(prompt_tokens=4, new_tokens=2, batches=(1, 2), repeats=1)
needs_kernels = pytest.mark.skipif(native.level() is None, reason=native.unsupported())


@needs_kernels
def test_an_engine_that_reads_weights_from_the_disk_while_it_is_timed(
    mixture: Artifact[EngineBundle], mapped: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = benchmark(monkeypatch, Timed(), mapped, SMALL, rest=lambda _: drop_pages(mixture))
    # All of so small a file may be in memory again by now: the system reads ahead.
    assert record.candidate.page_faults > 0 and record.baseline.page_faults == 0
    found = verdict(record)
    assert found.outcome is Outcome.INCONCLUSIVE and found.exit_code == 3
    speeds = [check for check in found.checks if check.outcome is not Outcome.PASS]
    assert {check.name for check in speeds} == {check.name for check in found.checks if "speed" in check.name}
    assert all("the candidate waited for" in check.reason for check in speeds)


def test_a_page_in_twenty_steps_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a library's: every process waits for some."""
    record = benchmark(monkeypatch, Timed(), Timed(), SpeedSettings(new_tokens=25, batches=(1, 2), repeats=2))
    few, many = (
        record.model_copy(update={"candidate": record.candidate.model_copy(update={"page_faults": faults})})
        for faults in (5, 6)
    )
    assert not paged(few) and verdict(few).outcome is Outcome.PASS
    assert paged(many) and verdict(many).outcome is Outcome.INCONCLUSIVE


@needs_kernels
def test_weights_that_were_not_all_in_memory(
    mixture: Artifact[EngineBundle], mapped: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a page was read meanwhile: the tokens chose other experts. Those of a user may choose these."""
    whole = benchmark(monkeypatch, mapped, Timed(), SMALL)
    assert whole.baseline.resident_share == 1.0
    drop_pages(mixture)
    found = benchmark(monkeypatch, mapped, Timed(), SMALL).model_copy(update={"candidate": whole.candidate})
    share = found.baseline.resident_share
    assert share is not None and 0 <= share < 1
    quiet = found.model_copy(update={"baseline": found.baseline.model_copy(update={"page_faults": 0})})
    reasons = {check.reason for check in verdict(quiet).checks if "speed" in check.name}
    (reason,) = reasons
    assert "% of the weights that the baseline leaves in their file were not in memory" in reason
    assert verdict(quiet).outcome is Outcome.INCONCLUSIVE
    assert verdict(whole).outcome is Outcome.PASS


@needs_kernels
def test_a_system_that_does_not_tell_what_is_in_memory(mapped: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped.engine, "resident_bytes", lambda **_: None)
    record = benchmark(monkeypatch, Timed(), mapped, SMALL)
    assert record.candidate.resident_share is None
    found = verdict(record)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert any("does not tell" in check.reason for check in found.checks)
