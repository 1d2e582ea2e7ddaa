"""``tapeout usage``: what each key has used, for a reader, a script or a bill."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from rich.table import Table

from runtime.gateway.accounts.usage import UsageSum, sums
from tapeout.errors import RequestError


def run(database: str, since: str, until: str, out: Path | None) -> tuple[list[dict[str, Any]], Table]:
    """The sums, for a script and as a table; also written to ``out`` as Parquet."""
    found = sums(database, _day(since), _day(until))
    if out is not None:
        _write(found, out)
    return [row._asdict() for row in found], _table(found)


def _day(text: str) -> date | None:
    try:
        return date.fromisoformat(text) if text else None
    except ValueError as error:
        raise RequestError(f"{text!r} is no day", expected="a date such as 2026-11-01") from error


def _write(found: list[UsageSum], out: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    kinds = {
        "day": pa.string(),
        "key": pa.string(),
        "tenant": pa.string(),
        "model": pa.string(),
        "seconds": pa.float64(),
    }
    schema = pa.schema([(name, kinds.get(name, pa.int64())) for name in UsageSum._fields])
    unfinished = out.with_name(f".{out.name}.part")
    parquet.write_table(pa.Table.from_pylist([row._asdict() for row in found], schema=schema), unfinished)
    unfinished.replace(out)


def _table(found: list[UsageSum]) -> Table:
    table = Table()
    for name in UsageSum._fields:
        table.add_column(name.replace("_", " "), justify="left" if name in UsageSum._fields[:4] else "right")
    for row in found:
        table.add_row(*row[:4], *(f"{number:,}" for number in row[4:8]), f"{row.seconds:,.1f}")
    return table
