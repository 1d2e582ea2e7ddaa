"""The benchmark beside busy processes, on an engine that needs no bundle; what it measures is not asserted."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from benchmarks.busy_machine import Case, Sample, arguments, busy_processes, decode, measure, table
from tests.fake_engine import History


def options(*words: str) -> list[str]:
    return ["bundle", "--rounds", "2", "--seconds", "0.001", *words]


def test_every_case_takes_its_turn_in_every_round() -> None:
    engines = {name: History(vocab_size=2000, max_tokens=256, slots=3) for name in ("one", "other")}
    samples = measure(dict(engines), arguments(options("--batches", "1", "3", "--busy", "0", "1")))
    assert set(samples) == {Case(name, batch, busy) for name in engines for batch in (1, 3) for busy in (0, 1)}
    assert all(len(found) == 2 and all(sample.tokens_per_s > 0 for sample in found) for found in samples.values())


def test_all_streams_decode_again_and_again_after_the_same_context(monkeypatch: pytest.MonkeyPatch) -> None:
    milliseconds = itertools.count()  # as many steps on a busy machine as on a quiet one
    monkeypatch.setattr(time, "perf_counter", lambda: next(milliseconds) / 1000)
    engine = History(vocab_size=2000, max_tokens=256, slots=2)
    for slot in range(2):
        engine.prefill(slot, range(128))
    assert decode(engine, 2, 0.2).tokens_per_s > 0
    assert set(map(tuple, engine.engine.steps[2:])) == {(1, 1)} and len(engine.engine.steps) > 128


def test_busy_processes_are_stopped_at_first_and_end() -> None:
    with busy_processes(2) as processes:
        stats = [Path(f"/proc/{pid}/stat") for pid in processes]
        for pid in processes:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert [stat.read_text().rpartition(")")[2].split()[0] for stat in stats] == ["T", "T"]
    assert not any(stat.exists() for stat in stats)


def test_the_table_has_medians_and_what_is_kept_of_the_quiet_speed() -> None:
    quiet, busy = Case("bundle", 8, 0), Case("bundle", 8, 1)
    samples = {
        quiet: [Sample(1000, 1), Sample(2000, 2), Sample(4000, 4)],
        busy: [Sample(700, 2), Sample(1000, 3), Sample(3200, 9)],
    }
    *_, first, second = table(samples).splitlines()
    assert first == "| bundle | 8 | 0 | 2,000 | 1.00 | 2.00 |"
    assert second == "| bundle | 8 | 1 | 1,000 | 0.70 | 3.00 |"
