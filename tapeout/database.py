"""A database that processes share: PostgreSQL, or an SQLite file where all of them run on one machine.

What is compared between machines is the database's own clock (:func:`database_seconds`), never theirs.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tapeout.errors import TapeoutError, one_line

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, MetaData, Table
    from sqlalchemy.engine.interfaces import ReflectedColumn

CONNECT_SECONDS = 2
STATEMENT_SECONDS = 5
SQLITE_AGAIN_SECONDS = 0.02
# Of libpq and the server: a machine that is gone must not hold a connection for minutes, and a process that is stopped
# or gone in the midst of a transaction must not keep its locks from the others.
POSTGRES: dict[str, Any] = {
    "connect_timeout": CONNECT_SECONDS,
    "tcp_user_timeout": STATEMENT_SECONDS * 1000,
    # One that has the question, and dies before it answers, is noticed only by asking whether it is there.
    "keepalives_idle": STATEMENT_SECONDS,
    "keepalives_interval": STATEMENT_SECONDS,
    "options": " ".join(
        f"-c {name}={STATEMENT_SECONDS * 1000}" for name in ("statement_timeout", "idle_in_transaction_session_timeout")
    ),
}


class DatabaseError(TapeoutError):
    """A database cannot be opened."""


class DatabaseRefusedError(DatabaseError):
    """A database answers, but not to this user."""


def open_database(url: str, purpose: str, *, with_clock: bool = False) -> Engine:
    """``url``: of SQLAlchemy. ``purpose``: what the message calls it. :class:`DatabaseError` for a wrong URL.

    ``with_clock``: one whose clock can be read, see :func:`database_seconds`. It connects only when it is used.
    """
    import sqlalchemy as sa
    from sqlalchemy import event, exc

    try:
        name = sa.make_url(url).get_backend_name()
        if with_clock and name not in ("postgresql", "sqlite"):
            raise DatabaseError(f"the {purpose} database is {name}", expected="PostgreSQL or SQLite")
        options: dict[str, Any] = {"timeout": STATEMENT_SECONDS} if name == "sqlite" else {}
        engine = sa.create_engine(
            url, connect_args=POSTGRES if name == "postgresql" else options, pool_pre_ping=name != "sqlite"
        )
    except (exc.SQLAlchemyError, ImportError) as error:
        raise DatabaseError(
            f"the {purpose} database cannot be opened: {one_line(error)}",
            expected="an SQLAlchemy URL, such as sqlite:///usage.db or postgresql+psycopg://USER@HOST/NAME",
            remedy="correct the URL, or install the driver that it names: pip install 'tapeout[postgres]'",
        ) from error
    if name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
    return engine


def create_tables(engine: Engine, metadata: MetaData) -> None:
    """Those that are missing, and in those of earlier versions room for texts as long as they may be now. Several
    processes may do so at once, and who creates nothing needs no right to.

    Raises what SQLAlchemy raises, and :class:`DatabaseError` where a column is too short and cannot be changed.
    """
    import sqlalchemy as sa
    from sqlalchemy.schema import CreateIndex, CreateTable

    postgres = engine.dialect.name == "postgresql"
    with engine.begin() as connection:
        if postgres:  # where "if not exists" alone can still fail
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(hashtext('tapeout tables'))"))
        there = sa.inspect(connection)
        for table in metadata.sorted_tables:
            indexes = set[str | None]()
            if there.has_table(table.name):
                indexes = {index["name"] for index in there.get_indexes(table.name)}
                if postgres:  # SQLite keeps texts of any length
                    _lengthen(connection, table, there.get_columns(table.name))
            else:
                connection.execute(CreateTable(table, if_not_exists=True))
            for index in table.indexes:
                if index.name not in indexes:
                    connection.execute(CreateIndex(index, if_not_exists=True))


def refusal(error: Exception, purpose: str, tables: str, place: str) -> DatabaseRefusedError | None:
    """What to say where the database answers, but not to this user: rights are missing, the password is wrong, or
    pg_hba.conf does not let it in. It does not help to wait. None for other errors.

    ``error``: of SQLAlchemy. ``purpose``: see :func:`open_database`. ``tables``: that are read or written there.
    ``place``: of the URL.
    """
    if not _is_refusal(error):
        return None
    cause = one_line(getattr(error, "orig", None) or error)  # without the statement
    return DatabaseRefusedError(
        f"the database of {purpose} does not let this user in, or not to {tables}: {cause}",
        expected=f"the right password, a line of pg_hba.conf for this user, and rights to create {tables} or to use it",
        remedy=f"correct {place}, or let this user in and give it these rights",
    )


def _is_refusal(error: Exception) -> bool:
    from sqlalchemy import exc

    if isinstance(error, exc.ProgrammingError):
        return True
    # A connection that was refused has no code, but psycopg keeps what it was. Servers that start, stop or are full say
    # so before they ask for a password. The name of the file is the same in all languages of the server.
    refused = getattr(getattr(error, "orig", None), "pgconn", None)
    if refused is None:
        return False
    return bool(refused.needs_password or refused.used_password or b"pg_hba.conf" in refused.error_message)


def database_seconds(connection: Connection) -> float:
    """Since 1970, by the clock of the database."""
    import sqlalchemy as sa

    sqlite = connection.dialect.name == "sqlite"
    clock = "(julianday('now') - 2440587.5) * 86400.0" if sqlite else "extract(epoch from clock_timestamp())"
    return float(connection.execute(sa.text(f"SELECT {clock}")).scalar_one())


def _lengthen(connection: Connection, table: Table, columns: Sequence[ReflectedColumn]) -> None:
    """PostgreSQL does not touch the rows for that."""
    import sqlalchemy as sa
    from sqlalchemy import exc

    for column in columns:
        name = column["name"]
        found, wanted = (getattr(of, "length", None) for of in (column["type"], table.columns[name].type))
        if found is None or wanted is None or found >= wanted:
            continue
        quote = connection.dialect.identifier_preparer.quote
        statement = f"ALTER TABLE {quote(table.name)} ALTER COLUMN {quote(name)} TYPE VARCHAR({wanted})"
        try:
            connection.execute(sa.text(statement))
        except exc.ProgrammingError as error:
            raise DatabaseError(
                f"the column {name} of {table.name} holds {found} characters, and this user may not change it",
                expected=f"{wanted} characters",
                remedy=f"run this as the owner of the table: {statement}",
            ) from error


def _prepare_sqlite(connection: sqlite3.Connection, _: Any) -> None:
    # Readers do not block the writer, and a transaction that has ended is on the disk.
    deadline = time.monotonic() + STATEMENT_SECONDS
    while not _has_write_ahead_log(connection, time.monotonic() > deadline):
        time.sleep(SQLITE_AGAIN_SECONDS)
    connection.execute("PRAGMA synchronous=FULL")


def _has_write_ahead_log(connection: sqlite3.Connection, last: bool) -> bool:
    """SQLite waits for locks, but not for that of another process which writes to a new file."""
    try:
        connection.execute("PRAGMA journal_mode=WAL")
    except sqlite3.OperationalError as error:
        if last or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True
