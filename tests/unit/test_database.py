"""An SQLite file that several processes open for the first time at once."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tapeout import database


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "limits.db"


@pytest.fixture
def other(path: Path) -> Iterator[sqlite3.Connection]:
    """Another process in the midst of a write to the new file. SQLite itself does not wait for it here."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    connection.close()


def mode(path: Path) -> str:
    engine = database.open_database(f"sqlite:///{path}", "limits")
    try:
        with engine.connect() as connection:
            return connection.execute(sa.text("PRAGMA journal_mode")).scalar_one()
    finally:
        engine.dispose()


def test_a_write_of_another_process_is_waited_for(path: Path, other: sqlite3.Connection) -> None:
    threading.Timer(0.2, lambda: other.execute("ROLLBACK")).start()
    assert mode(path) == "wal"


@pytest.mark.usefixtures("other")
def test_a_file_that_stays_locked_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "STATEMENT_SECONDS", 0.1)
    with pytest.raises(sa.exc.OperationalError, match="database is locked"):
        mode(path)


def test_other_errors_are_not_tried_again(path: Path) -> None:
    path.mkdir()
    with pytest.raises(sa.exc.OperationalError, match="unable to open database file"):
        mode(path)
