"""Verdicts, artifacts and diagnoses as terminal output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from evals.check import Check, Outcome
from evals.level import LevelVerdict
from evals.verdict import COLUMNS, Verdict, row
from pipeline.cli.doctor import Diagnosis, Status
from tapeout.artifact import Artifact
from tapeout.lineage import Explanation, Parent, fields

OUTCOME_STYLE = {Outcome.PASS: "bold green", Outcome.FAIL: "bold red", Outcome.INCONCLUSIVE: "bold yellow"}
STATUS_STYLE = {
    Status.OK: "green",
    Status.LIMITED: "yellow",
    Status.MISSING: "bold red",
    Status.BROKEN: "bold red",
    Status.ABSENT: "dim",
}
SHOWN_ROWS = 12
SHOWN_ITEMS = 8
PLAIN_WIDTH = 160  # in a log file or a pipe, where rich would assume 80 and fold every line


class Terminal(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would exit with 1, which here means that the gate failed


def console() -> Terminal:
    found = Terminal(highlight=False)
    return found if found.is_terminal else Terminal(highlight=False, width=PLAIN_WIDTH)


def checks_table(title: str, checks: Sequence[Check]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for check, cells in zip(checks, map(row, checks), strict=True):
        table.add_row(Text(cells[0], OUTCOME_STYLE[check.outcome]), *(escape(cell) for cell in cells[1:]))
    return table


def level_verdict(found: Artifact[LevelVerdict]) -> RenderableType:
    """Of `tapeout verify`."""
    record, bundle = found.record, found.parents["candidate"].digest
    place = f"  bundle {bundle[:12]} at {record.executed_on.level}: {found.folder}"
    headline = Text.assemble((record.outcome.value, OUTCOME_STYLE[record.outcome]), place)
    return Group(checks_table("Level", record.checks), headline)


def verdict(judged: Verdict) -> RenderableType:
    headline = Text.assemble(
        (judged.outcome.value, OUTCOME_STYLE[judged.outcome]),
        f"  candidate {judged.candidate[:12]} against baseline {judged.baseline[:12]}",
    )
    reasons = [
        Text(f"  {check.outcome.value}: {check.title}: {check.reason}", OUTCOME_STYLE[check.outcome])
        for check in judged.checks
        if check.outcome is not Outcome.PASS
    ]
    return Group(checks_table("Verdict", judged.checks), headline, *reasons)


def diagnosis(found: Diagnosis) -> RenderableType:
    tables: list[RenderableType] = []
    for name, findings in found.sections().items():
        if not findings:
            continue
        table = Table(
            title=name, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2, 0, 0)
        )
        table.add_column(width=8)
        for _ in range(3):
            table.add_column(overflow="fold")
        for finding in findings:
            status = Text(finding.status.value, STATUS_STYLE[finding.status])
            table.add_row(status, finding.subject, escape(finding.found), Text(finding.remedy, "dim"))
        tables.extend((table, Text()))
    return Group(*tables[:-1])


def explanation(found: Explanation) -> RenderableType:
    single, tables = fields(found.record)
    parts: list[RenderableType] = [
        Text.assemble((found.artifact_type, "bold"), f"  {found.folder}"),
        Text(f"digest {found.digest}", "dim"),
        _pairs({**single, "files": f"{len(found.files)}, {megabytes(found.size_bytes)}"}),
    ]
    for name, rows in tables.items():
        parts.extend(_rows(name, rows))
    parts.extend(_rows("files", [{"name": name, "size": megabytes(size)} for name, size in found.files.items()]))
    tree = Tree(Text(f"made from{'' if found.parents else ' nothing else'}", "bold"))
    _grow(tree, found.parents)
    parts.append(tree)
    if found.problems:
        parts.extend(Text(f"PROBLEM: {problem}", "bold red") for problem in found.problems)
    else:
        parts.append(Text("every file has the content that was recorded", "green"))
    return Group(*parts)


def _grow(tree: Tree, parents: Sequence[Parent]) -> None:
    for parent in parents:
        where = f"{parent.artifact_type} {parent.folder or 'not beside this artifact'}"
        style = "" if parent.folder else "yellow"
        _grow(tree.add(Text(f"{parent.name}: {where}  {parent.digest[:12]}", style)), parent.parents)


def _pairs(values: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, escape(short(value)))
    return table


def _rows(name: str, rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    values = [short(row["value"]) for row in rows] if columns == ["name", "value"] else []
    if len(values) > SHOWN_ROWS and len(set(values)) <= SHOWN_ROWS:
        # A long mapping with few values, such as the scheme of each linear, is shown as counts.
        columns, rows = ["count", "value"], [{"count": n, "value": value} for value, n in Counter(values).most_common()]
    table = Table(title=name, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for shown in rows[:SHOWN_ROWS]:
        table.add_row(*(escape(short(shown.get(column, ""))) for column in columns))
    hidden = len(rows) - SHOWN_ROWS
    return [table, Text(f"… and {hidden} more (--json shows all)\n", "dim")] if hidden > 0 else [table]


def short(value: Any) -> str:
    """One cell: numbers to four digits, long lists counted.

    >>> short(0.123456), short([1, 2]), short(list(range(99)))
    ('0.1235', '1, 2', '0, 1, 2, 3, 4, 5, 6, 7, … (99)')
    """
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.4g}"
        case dict():
            return ", ".join(f"{key} {short(item)}" for key, item in value.items())
        case list():
            shown = ", ".join(short(item) for item in value[:SHOWN_ITEMS])
            return shown if len(value) <= SHOWN_ITEMS else f"{shown}, … ({len(value)})"
        case _:
            return str(value)


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} kB"
