"""Usage records: what each key has used, exact across crashes of the server.

The rule. A request is in the journal before it is admitted, and its counts are there before its answer ends. A writer
thread copies ended requests to the database in batches, and the journal is replayed at the next start. So:

- every admitted request becomes one record, whenever the process is killed: ids are unique, and one that the database
  has is not written again;
- a request that had ended has its exact counts;
- one that was running has the finish reason ``interrupted``, its prompt tokens, and its new tokens as they were at most
  one second before the end (``PROGRESS_SECONDS``);
- if the machine itself fails, what the journal got in its last second may be lost (it is synced once a second).

``usage.journal/000001.jsonl`` holds lines ``[kind, …]``. Each begins with a line break, so one that was cut off by a
full disk does not spoil the next. While the journal cannot be written, nothing is admitted; what ends meanwhile is in
memory and in the database, and comes into the journal once there is room.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.gateway.protocol.calls import Call, Hook
from runtime.gateway.protocol.errors import ApiError
from tapeout.database import DatabaseError, create_tables, open_database
from tapeout.errors import TapeoutError, one_line

if TYPE_CHECKING:
    from sqlalchemy import Engine, Table

PROGRESS_SECONDS = 1.0  # between two looks at the running requests, and between two syncs
ROLL_BYTES = 4 << 20  # a journal file of this size is replaced
BATCH = 500  # records of one transaction
LONGEST_RETRY = 30.0  # seconds between two attempts at a database that does not answer
INTERRUPTED = "interrupted"

log = logging.getLogger(__name__)


class UsageError(TapeoutError):
    """The usage records or their journal cannot be read or written."""


@dataclass(frozen=True)
class UsageRecord:
    """One call. ``id``: ours, unique; ``request_id``: the client's, if it gave one. ``started_at``: of ``time.time()``.

    ``first_token_seconds`` and ``seconds``: from the arrival; None where it was not reached.
    """

    id: str
    request_id: str
    key: str
    tenant: str
    model: str
    bundle: str  # digest
    endpoint: str
    started_at: float
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = INTERRUPTED
    first_token_seconds: float | None = None
    seconds: float | None = None

    @property
    def day(self) -> str:
        """UTC, of the start."""
        return datetime.fromtimestamp(self.started_at, UTC).date().isoformat()


class UsageSum(NamedTuple):
    """Of one day (UTC), key, tenant and model. Times are seconds."""

    day: str
    key: str
    tenant: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float


@dataclass
class _Running:
    record: UsageRecord  # as it was admitted
    completion_tokens: int = 0


class Usage(Hook, Collector):
    """A hook of all calls. One per journal, which is locked.

    Replays what an earlier process left, then starts its threads. ``failed``: why the journal cannot be written;
    empty where it can.
    """

    def __init__(self, url: str = "sqlite:///usage.db", journal: Path = Path("usage.journal")) -> None:
        self._engine, self._table = connect(url, create=True)
        self._folder, self._guard = journal, _lock(journal)
        self._lock = threading.Lock()
        self._open: dict[str, _Running] = {}
        self._ended: list[UsageRecord] = []
        self._late: list[tuple[str, Any]] = []  # lines of the journal that there was no room for
        self.failed = ""
        self._written = 0  # bytes of the journal file
        left = sorted(journal.glob("*.jsonl"))
        self._write_left(replay(left))
        self._number = max((int(path.stem) for path in left), default=0) + 1
        self._file = self._next_file()
        for path in left:
            path.unlink()
        self._stop = threading.Event()
        writers = {"usage-journal": self._keep_journal, "usage-database": self._keep_database}
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in writers.items()]
        for thread in self._threads:
            thread.start()

    def admit(self, call: Call) -> None:
        """:class:`ApiError` 503 if the journal cannot be written: what cannot be counted is not admitted."""
        caller = call.caller
        record = UsageRecord(
            id=call.id,
            request_id=call.request_id,
            key=caller.name,
            tenant=caller.tenant,
            model=call.model,
            bundle=call.digest,
            endpoint=call.endpoint,
            started_at=time.time(),
            prompt_tokens=call.prompt_tokens,
        )
        with self._lock:
            try:
                self._append("begin", asdict(record))
            except OSError as error:
                self._journal_fails(error)
                raise ApiError(503, "usage records cannot be written", code="usage_unavailable") from error
            self._open[call.id] = _Running(record)

    def tokens(self, call: Call, choice: int, count: int, now: float) -> None:
        self._open[call.id].completion_tokens += count

    def ended(self, call: Call) -> None:
        """Comes before the last bytes of the answer: what a client has in full is in the journal."""
        assert call.end is not None
        with self._lock:
            record = replace(
                self._open.pop(call.id).record,
                cached_tokens=call.cached_tokens,
                completion_tokens=call.completion_tokens,
                finish_reason=_reason(call),
                first_token_seconds=call.first_token and call.first_token - call.arrival,
                seconds=call.end - call.arrival,
            )
            line: tuple[str, Any] = ("discard", call.id) if call.refused else ("end", asdict(record))
            try:
                self._append(*line)
            except OSError as error:
                self._late.append(line)
                self._journal_fails(error)
            if not call.refused:
                self._ended.append(record)

    def tokens_by_key(self) -> dict[str, int]:
        """Prompt and new tokens in the database, for the budgets of the keys."""
        return totals(self._engine, self._table)

    @property
    def pending(self) -> int:
        """Ended requests that the database does not have yet."""
        return len(self._ended)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "tapeout:usage_records_waiting", "Usage records that the database does not have yet.", value=self.pending
        )

    def close(self) -> None:
        """Write what has ended. What is still open becomes ``interrupted`` at the next start."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        with self._lock:
            if not self._open and not self._ended:
                self._path.unlink()
            self._file.close()
            self._guard.close()
        self._engine.dispose()

    def _write_left(self, records: list[UsageRecord]) -> None:
        """What an earlier process has left. :class:`UsageError` where the database does not take it."""
        from sqlalchemy.exc import SQLAlchemyError

        try:
            for batch in _batches(records):
                _insert(self._engine, self._table, batch)
        except SQLAlchemyError as error:
            raise UsageError(
                f"{len(records)} usage records in {self._folder} cannot be written to the database: {one_line(error)}",
                expected="a database that takes what an earlier server has left",
                remedy="make room on its disk, or see what keeps it from writing; the journal keeps the records",
            ) from error

    def _append(self, kind: str, content: Any) -> None:
        line = b"\n" + json.dumps([kind, content], separators=(",", ":")).encode()
        done = self._file.write(line)
        self._written += done
        if done < len(line):
            raise OSError(f"only {done} of {len(line)} bytes were written")

    def _keep_journal(self) -> None:
        """Of a thread."""
        progress = dict[str, int]()
        while not self._stop.wait(PROGRESS_SECONDS):
            self._write_journal(progress)
        self._write_journal(progress)

    def _write_journal(self, progress: dict[str, int]) -> None:
        """What is not in it yet."""
        try:
            self._write_late()
            self._write_progress(progress)
            os.fsync(self._file.fileno())
            if self._written > ROLL_BYTES and self.pending < BATCH:
                self._roll()
        except Exception as error:  # of any kind: the thread must not end
            self._journal_fails(error)

    def _keep_database(self) -> None:
        """Of another thread: a database that does not answer must not keep progress from the journal."""
        wait = PROGRESS_SECONDS
        while not self._stop.wait(wait):
            wait = self._turn(wait)
        self._turn(wait)

    def _turn(self, wait: float) -> float:
        """Write what has ended to the database; gives the seconds until the next time."""
        try:
            self._write_database()
        except Exception as error:  # the journal keeps what the database does not take
            log.error("%d usage records wait for the database: %s", self.pending, one_line(error))
            return min(2 * wait, LONGEST_RETRY)
        return PROGRESS_SECONDS

    def _journal_fails(self, error: Exception) -> None:
        if not self.failed:
            log.error("no request is admitted until %s can be written: %s", self._folder, one_line(error))
        self.failed = one_line(error)

    def _write_late(self) -> None:
        """What there was no room for; a line without content where only that is to be seen."""
        if not self.failed:
            return
        with self._lock:
            self._append("progress", {})
            while self._late:
                self._append(*self._late[0])
                del self._late[0]
            self.failed = ""
        log.warning("%s can be written again", self._folder)

    def _write_progress(self, written: dict[str, int]) -> None:
        with self._lock:
            now = {id: running.completion_tokens for id, running in self._open.items()}
            if changed := {id: tokens for id, tokens in now.items() if tokens and written.get(id) != tokens}:
                self._append("progress", changed)
        written.clear()
        written.update(now)

    def _write_database(self) -> None:
        while batch := self._ended[:BATCH]:
            _insert(self._engine, self._table, batch)
            with self._lock:
                del self._ended[: len(batch)]

    def _roll(self) -> None:
        """Go on in a new file that holds all that still counts, then remove the old one; or stay with the old one."""
        with self._lock:
            old, old_path = self._file, self._path
            try:
                self._file = self._next_file()
                for running in self._open.values():
                    self._append("begin", asdict(replace(running.record, completion_tokens=running.completion_tokens)))
                for record in self._ended:
                    self._append("end", asdict(record))
                os.fsync(self._file.fileno())
            except OSError as error:
                log.warning("%s stays, since no other file can be written: %s", old_path, one_line(error))
                if self._file is not old:
                    self._file.close()
                    self._path.unlink()
                self._file, self._path, self._written = old, old_path, 0  # tried again once it has grown as much
                return
        old.close()
        old_path.unlink()

    def _next_file(self) -> IO[bytes]:
        self._path = self._folder / f"{self._number:06}.jsonl"
        self._number, self._written = self._number + 1, 0
        return self._path.open("ab", buffering=0)


def _reason(call: Call) -> str:
    if call.error is not None:
        return call.error.code or "error"
    return "cancelled" if call.cancelled else ",".join(dict.fromkeys(call.finish_reasons.values()))


def replay(files: Sequence[Path]) -> list[UsageRecord]:
    """The requests of journal files, oldest first: as they ended, or as far as they were known to be."""
    found: dict[str, UsageRecord] = {}
    for kind, content in (line for path in files for line in _lines(path)):
        match kind:
            case "begin" | "end":
                record = UsageRecord(**content)
                if kind == "end" or record.id not in found or found[record.id].finish_reason == INTERRUPTED:
                    found[record.id] = record
            case "discard":
                found.pop(content, None)
            case "progress":
                for id, tokens in content.items():
                    if id in found and found[id].finish_reason == INTERRUPTED:
                        found[id] = replace(found[id], completion_tokens=tokens)
            case _:
                raise UsageError(f"{kind!r} in a usage journal", expected="a journal of this version of the server")
    return list(found.values())


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n")):
        if line:
            try:
                kind, content = json.loads(line)
            except ValueError:
                log.warning("line %d of %s was cut off", number, path)
                continue
            yield kind, content


def _lock(folder: Path) -> IO[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    guard = (folder / "lock").open("ab")
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        guard.close()
        raise UsageError(
            f"{folder} is in use by another server",
            expected="a journal for each server",
            remedy="name another folder; the database may be the same",
        ) from error
    return guard


def connect(url: str, *, create: bool = False) -> tuple[Engine, Table]:
    """The database and its table of usage records. ``create``: make what is missing, instead of refusing."""
    import sqlalchemy as sa
    from sqlalchemy import exc

    table = sa.Table(
        "usage",
        sa.MetaData(),
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("day", sa.String(10), nullable=False, index=True),
        *(sa.Column(name, sa.String(128), nullable=False) for name in ("key", "tenant", "model", "bundle")),
        *(sa.Column(name, sa.String(64), nullable=False) for name in ("endpoint", "finish_reason")),
        sa.Column("started_at", sa.Double, nullable=False),
        *(sa.Column(f"{name}_tokens", sa.Integer, nullable=False) for name in ("prompt", "cached", "completion")),
        *(sa.Column(name, sa.Double) for name in ("first_token_seconds", "seconds")),
    )
    try:
        engine = open_database(url, "usage")
        database = engine.url.database
        if engine.dialect.name == "sqlite" and not create and database and not Path(database).is_file():
            raise UsageError(f"there is no {database}", expected="the database of a server's usage records")
        if create:
            create_tables(engine, table.metadata)
    except (exc.SQLAlchemyError, DatabaseError) as error:
        raise UsageError(
            error.found
            if isinstance(error, DatabaseError)
            else f"the usage database cannot be opened: {one_line(error)}",
            expected="an SQLAlchemy URL, such as sqlite:///usage.db",
            remedy="correct the URL, or install the driver that it names",
        ) from error
    return engine, table


def _insert(engine: Engine, table: Table, records: Sequence[UsageRecord]) -> None:
    """Write those that the database does not have."""
    import sqlalchemy as sa

    with engine.begin() as connection:
        ids = [record.id for record in records]
        known = set(connection.scalars(sa.select(table.c.id).where(table.c.id.in_(ids))))
        rows = [asdict(record) | {"day": record.day} for record in records if record.id not in known]
        if rows:
            connection.execute(sa.insert(table), rows)


def _batches(records: list[UsageRecord]) -> Iterator[list[UsageRecord]]:
    return (records[at : at + BATCH] for at in range(0, len(records), BATCH))


def totals(engine: Engine, table: Table) -> dict[str, int]:
    """Prompt and new tokens by key."""
    import sqlalchemy as sa

    used = sa.func.sum(table.c.prompt_tokens + table.c.completion_tokens)
    with engine.connect() as connection:
        rows = connection.execute(sa.select(table.c.key, used).group_by(table.c.key)).all()
    return {key: int(tokens) for key, tokens in rows}


def sums(url: str, since: date | None = None, until: date | None = None) -> list[UsageSum]:
    """Of the requests that started from ``since`` on and before ``until`` (UTC). :class:`UsageError` for a database
    that does not answer, or is none of usage records.
    """
    import sqlalchemy as sa
    from sqlalchemy import exc

    engine, table = connect(url)
    by = [table.c[name] for name in ("day", "key", "tenant", "model")]
    added = [sa.func.sum(table.c[name]).label(name) for name in UsageSum._fields[5:]]
    query = sa.select(*by, sa.func.count().label("requests"), *added).group_by(*by).order_by(*by)
    if since is not None:
        query = query.where(table.c.day >= since.isoformat())
    if until is not None:
        query = query.where(table.c.day < until.isoformat())
    try:
        with engine.connect() as connection:
            rows = [dict(row) for row in connection.execute(query).mappings()]
    except exc.SQLAlchemyError as error:
        cause = one_line(getattr(error, "orig", None) or error)  # without the statement
        raise UsageError(
            f"the usage records cannot be read: {cause}",
            expected="the database of a server's usage records, which answers and lets this user read",
            remedy="correct the URL, or start the database",
        ) from error
    finally:
        engine.dispose()
    # Some databases sum to decimal numbers.
    return [UsageSum(**{name: _KINDS.get(name, int)(row[name]) for name in UsageSum._fields}) for row in rows]


def _seconds(total: Any) -> float:
    return float(total or 0.0)  # of interrupted requests it is not known


_KINDS: dict[str, Callable[[Any], Any]] = {"day": str, "key": str, "tenant": str, "model": str, "seconds": _seconds}
