"""Limits that several gateways share: each leases a part of them from a database ahead of its requests.

What a gateway holds it has taken from the limit before, so all of them together never use more, however they die. For
each limit of a key there is a row with ``taken``: of a budget the tokens that were ever leased, of a rate those that
are missing in its bucket, which come back with time. For each gateway there is a row with what it was ``granted``, all
in all.

A gateway says how much it has used and how much it wants to hold (:class:`LimitAsk`); the database raises or lowers
what is granted and says so. These numbers are totals, so an answer that is lost, or that comes twice, changes nothing.
Before a gateway asks for less than it was granted, it stops using the rest.

- A gateway that is killed leaves what it held taken: of a rate that comes back with time, of a budget it stays used.
- A gateway that has not reached the database for :data:`STALE_SECONDS` stops using what it holds of rates, and after
  :data:`LEASE_SECONDS` the others count it no more: it is not used nor given back when the gateway is there again. What
  it holds of budgets stays its own.
- All ages are of the database's clock. A step forward fills buckets, once; a step back delays them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tapeout.database import create_tables, database_seconds, open_database, refusal

if TYPE_CHECKING:
    from sqlalchemy import Column, Connection, Table
    from sqlalchemy.dialects import postgresql, sqlite

    Insert = postgresql.Insert | sqlite.Insert

STALE_SECONDS = 75.0
LEASE_SECONDS = 90.0
FORGET_SECONDS = 86400.0  # until its rows are removed


class LimitAsk(NamedTuple):
    """One limit of one key. ``size`` None: there is none, what is used is only counted.

    ``used``: by this gateway so far, with what is reserved. ``need``: of requests that wait. ``keep``: wanted beyond.
    ``per_second``: that come back, of a rate. ``granted``: as far as the gateway knows. ``before``: used before anybody
    has leased of this limit.
    """

    key: str
    kind: str
    size: float | None
    per_second: float
    used: float
    need: float
    keep: float
    granted: float
    before: float = 0.0

    @property
    def target(self) -> float:
        return self.used + self.need + self.keep


class LimitAnswer(NamedTuple):
    """``granted``: all in all. ``free``: nobody holds it. ``fair``: no gateway should hold more than that ahead."""

    granted: float
    free: float
    fair: float


class LimitState(NamedTuple):
    """A row of a limit. ``at``: when ``taken`` was right, by the database's clock."""

    taken: float
    at: float


class LeaseState(NamedTuple):
    """A row of a gateway. ``held``: of what it was granted, not used when it last said so, at ``seen_at``."""

    granted: float
    held: float
    seen_at: float

    def counts(self, now: float) -> bool:
        return now - self.seen_at < LEASE_SECONDS


def lease(
    ask: LimitAsk, limit: LimitState, own: LeaseState | None, others: Sequence[float], now: float
) -> tuple[LimitState, LeaseState, LimitAnswer]:
    """One step of the books. ``others``: what the other gateways hold."""
    rate = ask.per_second > 0
    if own is not None and (own.counts(now) or not rate):
        granted, held = own.granted, own.held
    else:  # of a rate others may have what it held
        granted, held = ask.used if rate else ask.granted, 0.0
    taken = limit.taken
    if rate:  # what is held is no longer in the bucket, so the bucket fills only up to that
        taken = max(taken - max(now - limit.at, 0.0) * ask.per_second, min(taken, held + sum(others)))
    if ask.size is None:
        granted, taken = ask.used, taken + ask.used - granted
        answer = LimitAnswer(granted, 0.0, 0.0)
    else:
        free, stock = max(ask.size - taken, 0.0), max(granted - ask.used, 0.0)
        fair = math.floor(max(free + stock - ask.need, 0.0) / (len(others) + 2))
        wanted = ask.used + ask.need + min(ask.keep, fair)
        change = min(wanted - granted, free) if wanted > granted else min(ask.target - granted, 0.0)
        granted, taken = granted + change, taken + change
        answer = LimitAnswer(granted, max(ask.size - taken, 0.0), fair)
    held = max(granted - ask.used, 0.0)
    taken = max(taken, held + sum(others) if rate else 0.0)
    return LimitState(taken, now), LeaseState(granted, held, now), answer


class LeaseDatabase:
    """``url``: of SQLAlchemy. :class:`tapeout.database.DatabaseError` for a wrong one; it need not answer yet."""

    def __init__(self, url: str) -> None:
        self._engine = open_database(url, "limits", with_clock=True)
        self._limits, self._leases = _tables()
        self._created = False

    def sync(self, holder: str, asks: Sequence[LimitAsk]) -> dict[tuple[str, str], LimitAnswer]:
        """By key and kind, in one transaction. ``holder``: of 32 characters, another one for each start of a gateway.

        Raises what SQLAlchemy raises; then nobody knows whether anything has changed. And
        :class:`tapeout.database.DatabaseRefusedError` where the database does not let this user in, or not to the
        tables. Without asks it says whether both is so.
        """
        from sqlalchemy.exc import SQLAlchemyError

        try:
            if not self._created:
                create_tables(self._engine, self._limits.metadata)
                self._created = True
            with self._engine.begin() as connection:
                return self._sync(connection, holder, asks) if asks else self._look(connection)
        except SQLAlchemyError as error:
            tables = " and ".join(table.name for table in (self._limits, self._leases))
            if (
                refused := refusal(error, "limits", f"the tables {tables}", "the URL of --limits-database")
            ) is not None:
                raise refused from error
            raise

    def leave(self, holder: str) -> None:
        """Forget a gateway that holds nothing any more, and those that have been gone for long."""
        import sqlalchemy as sa

        leases = self._leases.c
        with self._engine.begin() as connection:
            old = database_seconds(connection) - FORGET_SECONDS
            gone = sa.or_(leases.holder == holder, leases.seen_at < old)
            connection.execute(sa.delete(self._leases).where(gone))

    def close(self) -> None:
        self._engine.dispose()

    def _look(self, connection: Connection) -> dict[tuple[str, str], LimitAnswer]:
        import sqlalchemy as sa

        for table in (self._limits, self._leases):
            connection.execute(sa.select(table).limit(1))
        return {}

    def _sync(
        self, connection: Connection, holder: str, asks: Sequence[LimitAsk]
    ) -> dict[tuple[str, str], LimitAnswer]:
        import sqlalchemy as sa

        limits, leases = self._limits.c, self._leases.c
        keys = {ask.key for ask in asks}
        # The first statement writes, so that SQLite locks the file before anything is read.
        missing = [{"key": ask.key, "kind": ask.kind, "taken": ask.before, "at": 0.0} for ask in asks]
        connection.execute(_insert(connection, self._limits).on_conflict_do_nothing(), missing)
        query = sa.select(self._limits).where(limits.key.in_(keys)).order_by(limits.key, limits.kind).with_for_update()
        known = {(row.key, row.kind): LimitState(row.taken, row.at) for row in connection.execute(query)}
        now = database_seconds(connection)
        rows = connection.execute(sa.select(self._leases).where(leases.key.in_(keys))).all()
        mine: dict[tuple[str, str], LeaseState] = {}
        theirs: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            place, found = (row.key, row.kind), LeaseState(row.granted, row.held, row.seen_at)
            if row.holder == holder:
                mine[place] = found
            elif found.counts(now):
                theirs.setdefault(place, []).append(found.held)
        changed: list[dict[str, Any]] = []
        written: list[dict[str, Any]] = []
        answers: dict[tuple[str, str], LimitAnswer] = {}
        for ask in asks:
            place = (ask.key, ask.kind)
            limit, own, answer = lease(ask, known[place], mine.get(place), theirs.get(place, []), now)
            names = {"key": ask.key, "kind": ask.kind}
            changed.append(names | limit._asdict())
            written.append(names | own._asdict() | {"holder": holder})
            answers[place] = answer
        for table, found in ((self._limits, changed), (self._leases, written)):
            insert = _insert(connection, table)
            values = {column.name: insert.excluded[column.name] for column in table.columns if not column.primary_key}
            keyed = [column.name for column in table.primary_key]
            connection.execute(insert.on_conflict_do_update(index_elements=keyed, set_=values), found)
        return answers


def _insert(connection: Connection, table: Table) -> Insert:
    from sqlalchemy.dialects import postgresql, sqlite

    return (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(table)


def _tables() -> tuple[Table, Table]:
    import sqlalchemy as sa

    def named() -> list[Column[str]]:
        return [sa.Column(name, sa.String(64), primary_key=True) for name in ("key", "kind")]

    def numbers(*names: str) -> list[Column[float]]:
        return [sa.Column(name, sa.Double, nullable=False) for name in names]

    metadata = sa.MetaData()
    holder = sa.Column("holder", sa.String(32), primary_key=True)
    return (
        sa.Table("limits", metadata, *named(), *numbers("taken", "at")),
        sa.Table("limit_leases", metadata, holder, *named(), *numbers("granted", "held", "seen_at")),
    )
