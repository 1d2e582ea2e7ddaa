"""The loop of the engine's process: who comes first, and what it does while it has nothing to do."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

import pytest

from runtime.constraints.compiler import ConstraintCompiler
from runtime.engine import worker
from runtime.engine.connections import Connections
from runtime.engine.core import EngineCore
from runtime.engine.moving.moves import BlockMoves
from runtime.engine.shared_cores import SharedCores
from runtime.engine.worker import serve
from runtime.wire.block_keys import block_keys
from runtime.wire.limits import Limits
from runtime.wire.messages import (
    KEY_BYTES,
    Add,
    Close,
    Command,
    EngineInfo,
    GenerateRequest,
    StepReport,
    WatchBlocks,
)
from runtime.wire.session import Session
from tests.fake_engine import HistoryEngine
from tests.waiting import wait_for


class SlowCompiler(ConstraintCompiler):
    def __init__(self) -> None:
        super().__init__("", 12, ())
        self.loads = 0

    def load(self) -> None:
        self.loads += 1
        time.sleep(0.3)


class Server:
    """Its end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._session = end, Session("server")
        self._messages: list[Any] = []
        while not self._messages:
            self._receive()
        assert isinstance(self._messages.pop(0), EngineInfo)

    def send(self, message: Command) -> None:
        self._socket.sendall(self._session.frame(message))

    def report(self, seconds: float | None = None) -> StepReport:
        """The next one; :class:`TimeoutError` if it takes longer."""
        self._socket.settimeout(seconds)
        while not self._messages:
            self._receive()
        return self._messages.pop(0)

    def _receive(self) -> None:
        self._socket.sendall(self._session.outgoing)
        self._session.outgoing.clear()
        self._messages += self._session.receive(self._socket.recv(1 << 16))


@contextmanager
def serving(engine: HistoryEngine, compiler: ConstraintCompiler | None = None) -> Iterator[Server]:
    ours, theirs = socket.socketpair()
    core = EngineCore(engine, Limits(max_running=4, max_draft_tokens=0))
    info = EngineInfo("digest", "name", 64, 12, 4, 8, 1, 1, frozenset())
    connections, moves = Connections(info, ends=(theirs,)), BlockMoves(core, info, b"")

    answered = Event()

    def run() -> None:
        while not connections.answered:
            connections.receive(1000)
        answered.set()
        serve(connections, core, compiler, SharedCores(threads=1), moves)

    thread = Thread(target=run)
    thread.start()
    with ours:
        server = Server(ours)
        answered.wait()  # a command that came before would be read with the answer, and get lost
        try:
            yield server
        finally:
            server.send(Close())
            thread.join()


def reports(server: Server, seconds: float) -> list[StepReport]:
    """Those that come within so many seconds."""
    found, until = list[StepReport](), time.monotonic() + seconds
    with suppress(TimeoutError):
        while (left := until - time.monotonic()) > 0:
            found.append(server.report(left))
    return found


def engine() -> HistoryEngine:
    return HistoryEngine(12, slots=8, max_tokens=64, block_tokens=4)


def test_a_request_that_comes_first_does_not_wait_for_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the compiler loaded at once, or never."""
    monkeypatch.setattr(worker, "IDLE_MS", 2000)  # on a busy machine, the request came half a second later
    compiler = SlowCompiler()
    with serving(engine(), compiler) as server:
        server.send(Add(GenerateRequest("a", [1, 2], 3), 0.0))
        tokens = 0
        while tokens < 3:
            report = server.report()
            tokens += sum(len(delta.tokens) for delta in report.deltas)
            assert not compiler.loads
        wait_for(lambda: compiler.loads > 0)
        reports(server, worker.IDLE_MS / 1000 + 0.5)
        assert compiler.loads == 1


def test_an_idle_engine_works_ahead_until_there_is_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a report for each call, or calls without end."""
    monkeypatch.setattr(worker, "IDLE_MS", 100)
    fake = engine()
    fake.work_ahead = 20
    with serving(fake) as server:
        assert len(reports(server, 0.35)) <= 4
        assert 20 <= len(fake.prepared) <= 24, "once more in each pause"
        assert set(fake.prepared) == {4}


def test_a_running_engine_works_ahead_once_its_report_is_sent() -> None:
    fake = engine()
    with serving(fake) as server:
        server.send(Add(GenerateRequest("a", [1, 2], 5), 0.0))
        while not any(delta.finish_reason for delta in server.report().deltas):
            pass
        assert fake.prepared.count(1) == 4, "after each step but the last"


def routed(server: Server) -> StepReport:
    """The next report that says how to route."""
    while (report := server.report(5)).routing is None:
        pass
    return report


def test_a_server_that_asks_hears_of_blocks_and_load() -> None:
    """Planted: reports for those that have not asked, counts of what came before, or keys that nobody can compute."""
    prompt = list(range(1, 10))
    with serving(engine()) as server:
        server.send(Add(GenerateRequest("a", prompt, 2), 0.0))
        ended = False
        while not ended:
            report = server.report(5)
            assert report.routing is None
            ended = any(delta.finish_reason for delta in report.deltas)
        server.send(WatchBlocks(3))
        routing = routed(server).routing
        assert routing is not None and (routing.turn, routing.number, routing.whole, routing.received) == (
            3,
            0,
            True,
            0,
        )
        assert routing.blocks.published == b"".join(key[:KEY_BYTES] for key in block_keys(prompt, 4))
        server.send(Add(GenerateRequest("b", [7, 8, 9, 10, 11], 40), 0.0))
        while not (report := routed(server)).stats.running:
            pass
        routing = report.routing
        assert routing is not None and not routing.whole and routing.received == 1
        assert routing.load.running == routing.load.decodes == 1 and routing.load.most_running == 4
        server.send(WatchBlocks(4))
        while (routing := routed(server).routing) is None or routing.turn != 4:
            pass
        assert routing.whole and not routing.number
