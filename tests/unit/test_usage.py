"""Usage records: every admitted request is counted once, whatever happens to the process or the database."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

import pytest

from pipeline.cli.main import main
from runtime.gateway.accounts import usage as module
from runtime.gateway.accounts.usage import Usage, UsageError, UsageRecord, connect, sums
from runtime.gateway.protocol.calls import Call, Caller
from runtime.gateway.protocol.errors import ApiError
from tests.postgres import running_postgres
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]


class Place:
    def __init__(self, folder: Path, url: str = "") -> None:
        self.url, self.journal = url or f"sqlite:///{folder}/usage.db", folder / "usage.journal"

    def open(self) -> Usage:
        return Usage(self.url, self.journal)

    def rows(self) -> dict[str, dict[str, Any]]:
        engine, table = connect(self.url)
        with engine.connect() as connection:
            found = [dict(row._mapping) for row in connection.execute(table.select())]
        engine.dispose()
        assert len({row["id"] for row in found}) == len(found)
        return {row["id"]: row for row in found}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.02)
    return Place(tmp_path)


def begin(usage: Usage, prompt: int = 5) -> Call:
    call = Call(uuid4().hex, "req-1", "chat", "m", "b", Caller("k", "t"), False, [[1] * prompt], 1, 99)
    usage.admit(call)
    return call


def progress(usage: Usage, call: Call, tokens: int) -> None:
    usage.tokens(call, 0, tokens, 0.0)
    call.completion_tokens += tokens


def end(usage: Usage, call: Call, tokens: int, reason: str = "stop") -> None:
    progress(usage, call, tokens)
    call.finish_reasons[0], call.end = reason, time.monotonic()
    usage.ended(call)


def refuse(usage: Usage, call: Call) -> None:
    call.error, call.end = ApiError(429, "the queue is full"), time.monotonic()
    usage.ended(call)


def crash(usage: Usage) -> None:
    """Stop everything without writing: what the death of the process leaves."""
    usage._stop.set()
    usage._turn = lambda wait: wait  # the last turns write nothing  # pyright: ignore
    usage._write_journal = lambda progress: None  # pyright: ignore
    for thread in usage._threads:
        thread.join()
    usage._file.close()
    usage._guard.close()


def test_a_request_is_recorded_with_its_counts(place: Place) -> None:
    usage = place.open()
    call = begin(usage)
    call.cached[0], call.first_token = 2, call.arrival + 0.25
    end(usage, call, 7)
    refuse(usage, begin(usage))
    usage.close()
    (row,) = place.rows().values()
    assert (row["request_id"], row["key"], row["tenant"], row["model"], row["bundle"]) == ("req-1", "k", "t", "m", "b")
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (5, 2, 7)
    assert (row["finish_reason"], row["first_token_seconds"]) == ("stop", 0.25)
    assert list(place.journal.glob("*.jsonl")) == []


def test_the_database_is_in_wal_mode(place: Place) -> None:
    place.open().close()
    with sqlite3.connect(place.url.removeprefix("sqlite:///")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_the_reason_says_how_a_call_ended(place: Place) -> None:
    usage = place.open()
    left, failed = begin(usage), begin(usage)
    left.cancelled, left.end = True, time.monotonic()
    failed.error, failed.end = ApiError(503, "planted", code="engine_down"), time.monotonic()
    for call in (left, failed):
        usage.ended(call)
    usage.close()
    rows = place.rows()
    assert (rows[left.id]["finish_reason"], rows[failed.id]["finish_reason"]) == ("cancelled", "engine_down")


def test_what_a_crash_leaves_is_replayed_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRESS_SECONDS", 60)
    usage = place.open()
    ended, running, refused = begin(usage), begin(usage, prompt=9), begin(usage)
    end(usage, ended, 3, "length")
    progress(usage, running, 4)
    usage._write_progress({})
    progress(usage, running, 2)
    refuse(usage, refused)
    left = usage._path.read_bytes()
    crash(usage)
    assert place.rows() == {}
    for _ in range(2):
        usage = place.open()
        assert usage.tokens_by_key() == {"k": 5 + 3 + 9 + 4}
        usage.close()
        rows = place.rows()
        assert (rows[ended.id]["finish_reason"], rows[ended.id]["completion_tokens"]) == ("length", 3)
        interrupted = rows[running.id]
        assert (interrupted["finish_reason"], interrupted["completion_tokens"]) == ("interrupted", 4)
        assert len(rows) == 2
        (place.journal / "000001.jsonl").write_bytes(left)  # as if the crash had come before the journal was removed


def test_a_line_that_was_cut_off_does_not_spoil_the_others(place: Place) -> None:
    usage = place.open()
    first = begin(usage)
    usage._file.write(b'\n["end",{"id":"12')
    second = begin(usage)
    crash(usage)
    place.open().close()
    assert set(place.rows()) == {first.id, second.id}


def test_a_full_disk_refuses_requests_and_keeps_those_that_end(place: Place) -> None:
    usage = place.open()
    request = begin(usage)
    journal, usage._file = usage._file, Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
    with pytest.raises(ApiError) as refused:
        begin(usage)
    assert refused.value.status == 503
    end(usage, request, 8)
    usage._file.close()
    usage._file = journal
    usage.close()
    assert [row["completion_tokens"] for row in place.rows().values()] == [8]


def full(usage: Usage, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line can be written from now on, until the patch is undone."""

    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(usage, "_append", write)


def test_what_ends_on_a_full_disk_is_in_the_journal_once_there_is_room(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: it is in memory alone until the database answers, and a kill loses its counts."""
    usage = place.open()
    monkeypatch.setattr(usage, "_write_database", lambda: None)  # it does not answer
    request, refused = begin(usage), begin(usage)
    with monkeypatch.context() as patch:
        full(usage, patch)
        end(usage, request, 8)
        refuse(usage, refused)
        for _ in range(2):
            with pytest.raises(ApiError):
                begin(usage)
        assert "No space left" in usage.failed
    wait_for(lambda: usage.failed == "")
    crash(usage)
    place.open().close()
    assert [(row["finish_reason"], row["completion_tokens"]) for row in place.rows().values()] == [("stop", 8)]
    assert [
        record.getMessage().partition(" until ")[0] for record in caplog.records if record.levelname == "ERROR"
    ] == ["no request is admitted"]


def test_the_database_gets_what_a_full_disk_keeps_from_the_journal(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: what cannot be written to one of them keeps it from the other."""
    usage = place.open()
    running, request = begin(usage), begin(usage)
    with monkeypatch.context() as patch:
        full(usage, patch)
        progress(usage, running, 3)
        end(usage, request, 8)
        wait_for(lambda: usage.pending == 0)
        assert usage.failed
    wait_for(lambda: usage.failed == "")
    end(usage, running, 1)
    usage.close()
    assert sorted(row["completion_tokens"] for row in place.rows().values()) == [4, 8]


def test_progress_is_in_the_journal_while_the_database_does_not_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: one thread for both, which waits for the database."""
    usage, asked, answers = place.open(), Event(), Event()
    monkeypatch.setattr(usage, "_write_database", lambda: (asked.set(), answers.wait(60)))
    request = begin(usage)
    assert asked.wait(60)
    progress(usage, request, 7)
    wait_for(lambda: b'"progress"' in usage._path.read_bytes())
    answers.set()
    crash(usage)
    place.open().close()
    assert [row["completion_tokens"] for row in place.rows().values()] == [7]


def test_a_journal_that_cannot_be_replaced_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: it is left with lines that count, and so is half of its successor."""
    usage = place.open()
    kept, refused = begin(usage), begin(usage)
    path = usage._path
    with monkeypatch.context() as patch:
        full(usage, patch)
        usage._roll()
    assert list(place.journal.glob("*.jsonl")) == [path]
    refuse(usage, refused)
    progress(usage, kept, 6)
    usage._roll()
    assert list(place.journal.glob("*.jsonl")) == [usage._path] != [path]
    crash(usage)
    place.open().close()
    assert [row["completion_tokens"] for row in place.rows().values()] == [6]


def test_records_wait_for_a_database_that_is_locked(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    usage = place.open()
    with sqlite3.connect(place.url.removeprefix("sqlite:///"), isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with caplog.at_level(logging.ERROR):
            end(usage, begin(usage), 1)
            wait_for(lambda: "wait for the database" in caplog.text)
        assert usage.pending == 1
        other.execute("COMMIT")
    wait_for(lambda: usage.pending == 0)
    usage.close()
    assert len(place.rows()) == 1


def test_the_journal_is_replaced_when_it_is_long(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROLL_BYTES", 3000)
    usage = place.open()
    kept = begin(usage)
    progress(usage, kept, 11)
    for _ in range(30):
        for _ in range(5):
            end(usage, begin(usage), 2)
        time.sleep(0.01)
    wait_for(lambda: usage.pending == 0 and len(list(place.journal.glob("*.jsonl"))) == 1)
    (path,) = place.journal.glob("*.jsonl")
    assert int(path.stem) > 1
    crash(usage)
    place.open().close()
    rows = place.rows()
    assert len(rows) == 151 and rows[kept.id]["completion_tokens"] == 11


def test_two_servers_do_not_share_a_journal(place: Place) -> None:
    usage = place.open()
    with pytest.raises(UsageError, match="another server"):
        place.open()
    other = Usage(place.url, place.journal.with_name("other"))
    for one in (usage, other):
        end(one, begin(one), 1)
        one.close()
    assert len(place.rows()) == 2


@pytest.mark.parametrize("url", ["nonsense", "nodialect://x", "sqlite:////no/such/folder/x.db"])
def test_a_database_that_cannot_be_opened_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="usage database"):
        Usage(url, tmp_path)


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_killed_server_has_counted_every_request_once(tmp_path: Path, database: str) -> None:
    with running_postgres() if database == "postgres" else nullcontext() as server:
        _kill_and_count(Place(tmp_path, server.url if server else ""), tmp_path)


def _kill_and_count(place: Place, folder: Path) -> None:
    notes, draw = folder / "notes", random.Random(1)
    kills = 6
    for seed in range(kills):
        words = [sys.executable, "-m", "tests.usage_server", place.url, str(place.journal), str(notes), str(seed)]
        before = notes.stat().st_size if notes.exists() else 0
        with subprocess.Popen(words, cwd=ROOT) as server:
            wait_for(lambda at=before: notes.exists() and notes.stat().st_size > at)
            time.sleep(draw.uniform(0.05, 0.4))
            os.kill(server.pid, signal.SIGKILL)
    place.open().close()
    rows = place.rows()
    admitted, ended, refused = dict[str, int](), dict[str, int](), set[str]()
    for line in notes.read_text().splitlines():
        kind, id, number = line.split()
        match kind:
            case "A":
                admitted[id] = int(number)
            case "E":
                ended[id] = int(number)
            case _:
                refused.add(id)
    assert len(ended) > 50 and len(refused) > 3
    lost = admitted.keys() - refused - rows.keys()
    # A kill may fall between a call and its note: that request was admitted, or refused, without being noted.
    assert len(lost) <= kills and not lost & ended.keys()
    assert len(rows.keys() - admitted.keys()) <= kills and not rows.keys() & refused
    assert all(rows[id]["completion_tokens"] == tokens for id, tokens in ended.items())
    assert all(rows[id]["prompt_tokens"] == prompt for id, prompt in admitted.items() if id in rows)
    reasons = {row["finish_reason"] for row in rows.values()}
    assert reasons == {"stop", "interrupted"}


def test_sums_by_day_key_and_model_are_exported(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyarrow import parquet

    engine, table = connect(place.url, create=True)
    for number, (day, key) in enumerate([(1, "a"), (1, "a"), (1, "b"), (2, "a"), (3, "a")]):
        start = 1_793_491_200 + (day - 1) * 86_400 + 86_399.5  # the last second of the day: 2026-11-01 and so on
        record = UsageRecord(str(number), "r", key, "t", "m", "b", "chat", start, 10, 4, 3, "stop", 0.1, 0.5)
        module._insert(engine, table, [record])
    engine.dispose()
    found = sums(place.url, date(2026, 11, 1), date(2026, 11, 3))
    assert [(row.day, row.key, row.requests, row.prompt_tokens) for row in found] == [
        ("2026-11-01", "a", 2, 20),
        ("2026-11-01", "b", 1, 10),
        ("2026-11-02", "a", 1, 10),
    ]
    out = tmp_path / "usage.parquet"
    words = ["usage", "--database", place.url, "--from", "2026-11-01", "--to", "2026-11-03", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert parquet.read_table(out).to_pylist() == printed == [row._asdict() for row in found]
    assert main(words) == 0 and "2026-11-02" in capsys.readouterr().out
    assert main(["usage", "--from", "yesterday"]) == 2
    assert main(["usage", "--database", f"sqlite:///{tmp_path}/none.db"]) == 2
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("content", [b"this is a text, and longer than the head of a database", b"", None])
def test_what_holds_no_usage_records_is_no_fault_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    """A file that is no database, one without tables, and a server that does not answer."""
    url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    if content is not None:
        (tmp_path / "usage.db").write_bytes(content)
        url = f"sqlite:///{tmp_path}/usage.db"
    assert main(["usage", "--database", url]) == 2
    said = capsys.readouterr().err
    assert "the usage records cannot be read: " in said and "correct the URL" in said and "SELECT" not in said
