"""The release report: one self-contained HTML page with inline SVG, no script, and light and dark schemes.

The page holds no clock time, so the same evidence gives the same bytes.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from evals.block import QUANTIZATION, Block, Cell, FactRow, Rows
from evals.check import Check, Outcome
from evals.verdict import percent
from pipeline.report.charts import charts
from pipeline.report.data import ReportData, flat_metrics, flatten
from pipeline.report.vega import STYLE, standalone
from quantization.frontier import HEADER, cells

_LAYOUT = {Outcome.PASS: "pass", Outcome.FAIL: "fail", Outcome.INCONCLUSIVE: "unsure"}


def render(data: ReportData, drawn: Mapping[str, str]) -> str:
    """The whole page with its charts."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _number,
        "cell": _cell,
        "limits": _limits,
        "fact": _fact,
        "short": _short,
        "percent": percent,
    }
    template = environment.get_template("report.html.j2")
    return template.render(
        data=data,
        verdict=data.verdict,
        outcome_style=_LAYOUT,
        sections=_sections(data.blocks),
        quantization=QUANTIZATION,
        charts={name: Markup(chart) for name, chart in drawn.items()},
        chart_style=Markup(STYLE),
        recipe=flatten(data.recipe),
    )


def _sections(blocks: Sequence[Block]) -> dict[str, list[Block]]:
    """Blocks by the heading they stand under, in the order of the first of each."""
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.section, []).append(block)
    return found


def write(data: ReportData, folder: Path) -> Path:
    """Write ``report.html``, ``metrics.json`` and ``plots/`` (an SVG per chart, a CSV per ``dvc plots`` table).

    Returns the page. What an earlier report left in the folder is replaced as a whole. :class:`EvidenceError` when a
    number that would be drawn is not finite.
    """
    drawn = charts(data)
    page = render(data, drawn)
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "plots").mkdir(parents=True)
    for name, chart in drawn.items():
        (folder / "plots" / f"{name}.svg").write_text(standalone(chart))
    for name, table in _tables(data).items():
        with (folder / "plots" / name).open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(table.header)
            writer.writerows(table.rows)
    (folder / "metrics.json").write_text(json.dumps(flat_metrics(data), indent=1, allow_nan=False) + "\n")
    (folder / "report.html").write_text(page)
    return folder / "report.html"


def _tables(data: ReportData) -> dict[str, Rows]:
    """The same rows for ``dvc plots``, by file name; a file without rows has its header only."""
    points = data.plan.frontier.points if data.plan and data.plan.frontier else ()
    columns = ("group", "layer", "unit", "bits", "bits_per_weight", "error_before", "error_after")
    layers = [tuple(getattr(row, column) for column in columns) for row in data.layers]
    tables = {
        "frontier.csv": Rows(HEADER, tuple(cells(point) for point in points)),
        "layers.csv": Rows(("index", *columns), tuple((i, *row) for i, row in enumerate(layers))),
    }
    for block in data.blocks:
        tables |= block.plots
    return tables


def _short(digest: str) -> str:
    return digest[:12]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cell(value: Cell) -> str:
    return value if isinstance(value, str) else _number(value)


def _limits(check: Check) -> str:
    if check.lower is None and check.upper is None:
        return "–"
    return f"{_number(check.lower)} … {_number(check.upper)}"


def _fact(row: FactRow) -> str:
    if isinstance(row.value, str):
        return row.value
    if row.unit == "fraction":
        return f"{row.value:.2%}"
    return _number(row.value) + {"nats": " nats", "ratio": "×", "number": ""}[row.unit]
