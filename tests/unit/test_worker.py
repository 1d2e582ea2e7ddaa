"""The loop of the engine's process: who comes first, and what it does while it has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread

import pytest

from runtime.constraints.compiler import ConstraintCompiler
from runtime.engine import worker
from runtime.engine.core import EngineCore
from runtime.engine.shared_cores import SharedCores
from runtime.engine.worker import serve
from runtime.wire.limits import Limits
from runtime.wire.messages import Add, Close, GenerateRequest, StepReport
from tests.fake_engine import HistoryEngine


class SlowCompiler(ConstraintCompiler):
    def __init__(self) -> None:
        super().__init__("", 12, ())
        self.loads = 0

    def load(self) -> None:
        self.loads += 1
        time.sleep(0.3)


@contextmanager
def serving(engine: HistoryEngine, compiler: ConstraintCompiler | None = None) -> Iterator[Connection]:
    ours, theirs = Pipe()
    core = EngineCore(engine, Limits(max_running=4, max_draft_tokens=0))
    thread = Thread(target=serve, args=(theirs, core, compiler, SharedCores(threads=1)))
    thread.start()
    try:
        yield ours
    finally:
        ours.send(Close())
        thread.join()


def reports(connection: Connection, seconds: float) -> list[StepReport]:
    """Those that come within so many seconds."""
    found, until = list[StepReport](), time.monotonic() + seconds
    while connection.poll(max(0.0, until - time.monotonic())):
        found.append(StepReport.decode(connection.recv_bytes()))
    return found


def engine() -> HistoryEngine:
    return HistoryEngine(12, slots=8, max_tokens=64, block_tokens=4)


def test_a_request_that_comes_first_does_not_wait_for_constraints() -> None:
    """Planted: the compiler loaded at once, or never."""
    compiler = SlowCompiler()
    with serving(engine(), compiler) as connection:
        connection.send(Add(GenerateRequest("a", [1, 2], 3), time.monotonic()))
        tokens = 0
        while tokens < 3:
            report = StepReport.decode(connection.recv_bytes())
            tokens += sum(len(delta.tokens) for delta in report.deltas)
            assert not compiler.loads
        reports(connection, worker.IDLE_MS / 1000 + 0.5)
        assert compiler.loads == 1


def test_an_idle_engine_works_ahead_until_there_is_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a report for each call, or calls without end."""
    monkeypatch.setattr(worker, "IDLE_MS", 100)
    fake = engine()
    fake.work_ahead = 20
    with serving(fake) as connection:
        assert len(reports(connection, 0.35)) <= 4
        assert 20 <= len(fake.prepared) <= 24, "once more in each pause"
        assert set(fake.prepared) == {4}


def test_a_running_engine_works_ahead_once_its_report_is_sent() -> None:
    fake = engine()
    with serving(fake) as connection:
        connection.send(Add(GenerateRequest("a", [1, 2], 5), time.monotonic()))
        while not any(delta.finish_reason for delta in StepReport.decode(connection.recv_bytes()).deltas):
            pass
        assert fake.prepared.count(1) == 4, "after each step but the last"
