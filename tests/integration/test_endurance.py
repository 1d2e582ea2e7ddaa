"""Half a minute of random requests, disconnects, bad inputs and killed engines against ``tapeout serve``; and the
checks that follow it, each with what it guards against. ``python -m benchmarks.serving.endurance`` runs the same for
longer.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from benchmarks.serving.endurance import (
    GROWTH_BYTES,
    HANDLES,
    INVALID,
    PLAIN,
    STREAM,
    Clients,
    Sample,
    leaks,
    run,
    untried,
    usage_problems,
)
from tests.exported import build_float, tiny_graph
from tests.native import own_cache

SECONDS, KILL_SECONDS = 26.0, 4.0  # one engine more is killed than must be


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endurance")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        return build_float(tiny_graph(), folder / "bundle", slots=8).folder


def test_the_server_endures(bundle: Path) -> None:
    found = run(bundle, SECONDS, KILL_SECONDS, seed=12, threads=1)
    assert not found.problems, "\n".join(found.problems)


def served(status: int, body: str) -> Clients:
    """Clients of a server that gives everybody this answer."""

    class Response:
        def __init__(self) -> None:
            self.status = status

        async def __aenter__(self) -> Response:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def read(self) -> bytes:
            return body.encode()

    session: Any = SimpleNamespace(post=lambda *_, **__: Response())
    text: Any = SimpleNamespace(prompt=lambda size: [1] * size, random=random.Random(1))
    return Clients(session, text)


LAST, NOT_LAST = '"length"', "null"
CHOICE = '{"choices":[{"index":0,"text":"a","finish_reason":%s}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'


@pytest.mark.parametrize(
    ("kind", "status", "body"),
    [
        (PLAIN, 500, '{"error":{"message":"failed"}}'),
        (PLAIN, 200, CHOICE % NOT_LAST),
        (STREAM, 200, f"data: {CHOICE % NOT_LAST}\n\ndata: [DONE]\n\n"),
        (STREAM, 200, f"data: {CHOICE % LAST}\n\n"),
        (STREAM, 200, f"data: {CHOICE % LAST}\n\n" * 2 + "data: [DONE]\n\n"),
        (INVALID, 200, CHOICE % LAST),
        (INVALID, 503, "{}"),
    ],
    ids=["500", "no reason", "no reason in a stream", "no end", "two reasons", "bad input answered", "bad input busy"],
)
def test_a_response_that_does_not_end_exactly_once_is_a_problem(kind: str, status: int, body: str) -> None:
    clients = served(status, body)
    asyncio.run(clients.one(kind))
    assert len(clients.load.problems) == 1


def test_a_complete_response_is_none() -> None:
    clients = served(200, f"data: {CHOICE % LAST}\n\ndata: [DONE]\n\n")
    asyncio.run(clients.one(STREAM))
    assert clients.load.problems == []
    assert clients.load.complete == {"endurance-1": (1, 1)}


def samples(*server: int, engine: int = 0, handles: int = 10) -> list[Sample]:
    return [
        Sample(at=i, server_bytes=value, engine_bytes=engine, handles=handles + i * (handles > 10))
        for i, value in enumerate(server)
    ]


def test_growing_memory_and_handles_are_found() -> None:
    assert leaks(samples(*[100] * 9)) == []
    assert "memory of the server" in leaks(samples(*[100] * 8, 101 + GROWTH_BYTES))[0]
    assert "handles" in leaks(samples(*[100] * 9, handles=11))[0]


def test_usage_records_that_do_not_add_up_are_found(tmp_path: Path) -> None:
    database = tmp_path / "usage.db"
    with sqlite3.connect(database) as connection:
        connection.execute("create table usage (request_id, prompt_tokens, completion_tokens, finish_reason)")
        rows = [("a", 3, 5, "stop"), ("b", 3, 5, "stop"), ("b", 3, 5, "stop"), ("c", 3, 4, "length")]
        connection.executemany("insert into usage values (?, ?, ?, ?)", rows)
    assert usage_problems(database, {"a": (3, 5)})[1] == ["2 usage records of request b"]
    found = usage_problems(database, {"c": (3, 5), "d": (1, 1)})[1]
    assert ["request c" in found[1], "request d" in found[2]] == [True, True]


def test_a_run_that_tried_nothing_says_so() -> None:
    assert len(untried(Counter(), 0)) == 5
    tried = Counter({"stream: complete": 1, "plain: busy": 1, "leave: left": 1, "invalid: refused": 1})
    assert untried(tried, HANDLES + 1) == []
    assert "engines were killed" in untried(tried, HANDLES)[0], "a handle that is lost with each would not be found"


def test_a_lost_connection_is_a_problem() -> None:
    clients = served(200, "")

    def post(*_: object, **__: object) -> None:
        raise aiohttp.ServerDisconnectedError

    clients.session = SimpleNamespace(post=post)  # type: ignore[assignment]
    asyncio.run(clients.one(STREAM))
    assert "connection lost" in clients.load.problems[0]
