"""Engines write into a table of a database where they listen, and gateways read it.

A row is as old as the database's clock says. An engine writes its own once a second (:class:`Announcement`), and
removes it when it ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from tapeout.database import create_tables, database_seconds, open_database, refusal
from tapeout.errors import one_line

if TYPE_CHECKING:
    from sqlalchemy import Table

BEAT_SECONDS = 1.0

log = logging.getLogger(__name__)


class EngineTable:
    """``url``: of SQLAlchemy. ``place``: of the URL, for messages. :class:`tapeout.database.DatabaseError` for a wrong
    one; it need not answer yet.

    Its methods raise what SQLAlchemy raises, and :class:`tapeout.database.DatabaseRefusedError` where the database does
    not let this user do that.
    """

    def __init__(self, url: str, place: str = "its URL") -> None:
        self._engine, self._table, self._created = open_database(url, "engines", with_clock=True), _table(), False
        self._place = place

    def write(self, address: str) -> None:
        import sqlalchemy as sa

        with self._refusals(), self._engine.begin() as connection:
            row = {"address": address, "seen_at": database_seconds(connection)}
            found = connection.execute(sa.update(self._table).where(self._table.c.address == address).values(row))
            if not found.rowcount:
                connection.execute(sa.insert(self._table).values(row))

    def remove(self, address: str) -> None:
        import sqlalchemy as sa

        with self._engine.begin() as connection:
            connection.execute(sa.delete(self._table).where(self._table.c.address == address))

    def read(self) -> dict[str, float]:
        """By address, in their order: seconds since each was written, also of old ones."""
        import sqlalchemy as sa

        with self._refusals(), self._engine.connect() as connection:
            rows = connection.execute(sa.select(self._table).order_by(self._table.c.address)).all()
            now = database_seconds(connection)
        return {row.address: now - row.seen_at for row in rows}

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _refusals(self) -> Generator[None]:
        """Around what needs the table, which is created at first."""
        from sqlalchemy.exc import SQLAlchemyError

        try:
            if not self._created:
                create_tables(self._engine, self._table.metadata)
                self._created = True
            yield
        except SQLAlchemyError as error:
            if (refused := refusal(error, "engines", f"the table {self._table.name}", self._place)) is not None:
                raise refused from error
            raise


class Announcement:
    """Keeps an engine's row young, in a thread, until it is left. ``address``: where gateways reach the engine."""

    def __init__(self, url: str, address: str) -> None:
        self._table, self._address = EngineTable(url, "the URL of --register"), address
        self._stop, self._failed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="announcement", daemon=True)

    def begin(self) -> None:
        """The engine is open. Nothing happens if that was said before."""
        if not self._thread.is_alive():
            self._thread.start()

    def __enter__(self) -> Announcement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
            with suppress(Exception):  # else its age tells
                self._table.remove(self._address)
        self._table.close()

    def _run(self) -> None:
        while True:
            try:
                self._table.write(self._address)
            except Exception as error:  # of any kind: an engine serves whoever knows it already
                if not self._failed:
                    why = one_line(getattr(error, "orig", None) or error)  # the driver's words, without SQLAlchemy's
                    log.error("gateways cannot be told of this engine: %s", why)
                self._failed = True
            else:
                if self._failed:
                    log.warning("gateways are told of this engine again")
                self._failed = False
            if self._stop.wait(BEAT_SECONDS):
                return


def _table() -> Table:
    import sqlalchemy as sa

    return sa.Table(
        "engine_addresses",  # "engines" of earlier versions has columns that nobody fills any more
        sa.MetaData(),
        sa.Column("address", sa.String(255), primary_key=True),
        sa.Column("seen_at", sa.Double, nullable=False),
    )
