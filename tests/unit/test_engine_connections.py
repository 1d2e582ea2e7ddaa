"""The engine's ends of its connections: nobody who connects ends the engine, or holds up the others."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from runtime.engine import connections
from runtime.engine.cache.blocks import BlockPool
from runtime.engine.connections import Connections
from runtime.engine.routing import RoutingReports
from runtime.gateway.engines import connection
from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.remote import RemoteEngine
from runtime.wire.failures import Failure
from runtime.wire.messages import (
    Add,
    Cancel,
    Delta,
    EngineInfo,
    EngineLoad,
    EngineStats,
    GenerateRequest,
    ReadFile,
    StepReport,
)
from runtime.wire.session import Session
from tests.waiting import wait_for

KEY = b"k" * 32
INFO = EngineInfo("d" * 64, "name", 64, 12, 4, 8, 1, 1, frozenset(), files={"tokenizer.json": "s"})


class Served:
    """An engine's connections, and who connects to them."""

    def __init__(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connections = Connections(INFO, folder, listener=self.listener, key=KEY)
        self.ends: list[socket.socket] = []

    def connect(self, key: bytes = KEY) -> tuple[socket.socket, Session]:
        """One that has sent its greeting."""
        end, session = socket.create_connection(self.listener.getsockname()), Session("server", key)
        self.ends.append(end)
        end.sendall(session.outgoing)
        session.outgoing.clear()
        self.connections.receive(1000)
        return end, session

    def server(self) -> tuple[socket.socket, Session]:
        """One that has proven its key and heard the answer."""
        end, session = self.connect()
        messages = list[object]()
        while not messages:
            messages += session.receive(end.recv(1 << 16))
            end.sendall(session.outgoing)
            session.outgoing.clear()
            self.connections.receive(1000)
        assert messages == [INFO]
        return end, session


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path)
    yield found
    found.connections.close()
    for end in (*found.ends, found.listener):
        end.close()


def closed(served: Served, end: socket.socket) -> bool:
    """By the engine, while it goes on."""
    served.connections.receive(50)
    end.setblocking(False)
    try:
        return not end.recv(1 << 16)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("kind", ["Nonsense", "", "RuntimeError", "SignatureError"])
def test_a_stranger_that_speaks_of_an_error_is_left_with_one_line(
    served: Served, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has seen its key yet. Planted: the name of a class that there is not ends the engine."""
    caplog.set_level(logging.WARNING)
    end, session = served.connect(b"")
    end.sendall(session.frame(Failure(kind, "found\n2026-01-01 ERROR a line of its own", "expected", "")))
    wait_for(lambda: closed(served, end))
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    served.server()


def test_a_place_that_no_file_has_ends_one_connection(served: Served) -> None:
    end, session = served.server()
    end.sendall(session.frame(ReadFile("s", (1 << 64) - 1)))
    wait_for(lambda: closed(served, end))
    served.server()


REPORTS = 25  # more than sockets hold
TOKENS = tuple(range(100_000, 260_000))


def report(number: int) -> StepReport:
    """To each of two servers 800 KB."""
    return StepReport(tuple(Delta(id, (number, *TOKENS)) for id in "ab"), EngineStats())


def asking(served: Served) -> list[tuple[socket.socket, Session]]:
    """Two servers, each with a request."""
    found = [served.server() for _ in "ab"]
    for (end, session), id in zip(found, "ab", strict=True):
        end.sendall(session.frame(Add(GenerateRequest(id, [1], 1), 0.0)))
        wait_for(lambda: bool(served.connections.receive(50)))
    return found


def read(end: socket.socket, session: Session) -> list[int]:
    """The reports that have come."""
    found = list[StepReport]()
    end.settimeout(0.02)
    with suppress(TimeoutError):
        while data := end.recv(1 << 20):
            found += session.receive(data)
    return [delta.tokens[0] for one in found for delta in one.deltas]


def test_a_server_that_reads_nothing_holds_up_nobody(served: Served) -> None:
    """Such as one that is stopped, or behind a link that is down. Planted: the engine waits for it, and then it is
    given up, while all others hear nothing.
    """
    slow, other = asking(served)
    routing = RoutingReports(BlockPool(8), BlockPool(8), EngineLoad)
    heard = list[int]()
    for number in range(REPORTS):
        served.connections.send(report(number), routing)
        heard += read(*other)
    assert heard == [*range(REPORTS)] and served.connections.behind is False
    late = list[int]()

    def caught_up() -> bool:
        late.extend(read(*slow))
        served.connections.receive(50)  # as soon as there is room, not with the next report
        return len(late) >= REPORTS

    wait_for(caught_up, 30)
    assert late == heard, "nothing is lost, and nothing comes twice"


def test_a_server_that_reads_nothing_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = asking(served)
    routing = RoutingReports(BlockPool(8), BlockPool(8), EngineLoad)
    for number in range(REPORTS):
        served.connections.send(report(number), routing)
        read(*other)
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.0)
    served.connections.send(report(REPORTS), routing)
    assert served.connections.receive(50) == [Cancel("a")]
    assert read(*other) == [REPORTS] and len(read(*slow)) < REPORTS


def test_who_sends_without_end_does_not_stop_the_steps(served: Served) -> None:
    """Planted: the engine reads until there is nothing more, and steps no more meanwhile."""
    end, session = served.server()
    flood = b"".join(session.frame(Cancel("x" * 100)) for _ in range(60_000))
    sending = Thread(target=end.sendall, args=(flood,), daemon=True)
    sending.start()
    served.connections.receive(1000)
    assert served.connections.waiting()
    while served.connections.waiting() or sending.is_alive():
        served.connections.receive(50)


def test_an_engine_that_falls_silent_before_its_files_have_come_is_left(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway admits engines one after another: no other one would ever be. Planted: it waits for ever."""
    monkeypatch.setattr(connection, "PART_SECONDS", 0.2)

    async def run() -> None:
        engine = RemoteEngine(f"tcp:127.0.0.1:{served.listener.getsockname()[1]}", KEY, tmp_path / "cache")
        opening = asyncio.ensure_future(engine.open(20))
        while not opening.done():
            await asyncio.to_thread(served.connections.receive, 50)
        try:
            with pytest.raises(EngineDownError, match="has sent no part of a file"):
                async with asyncio.timeout(20):
                    await engine.files()
        finally:
            await engine.close()

    asyncio.run(run())
