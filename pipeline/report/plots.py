"""The charts of a release: rows in, SVG text out; and the same rows as CSV for ``dvc plots``.

Every chart is 480 units wide, so that beside each other on a desk and below each other on a phone the text stays
readable. ``charts`` gives them inline (the page holds the style sheet); ``svg.standalone`` makes a file of one.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from evals.block import Bars, Chart, Divergence, Intervals, Roofline, Rows
from pipeline.report import frontier
from pipeline.report.data import LayerRow, ReportData
from pipeline.report.svg import Canvas, Scale, label, ticks
from quantization.frontier import HEADER, cells
from tapeout.errors import EvidenceError

WIDTH = 480.0


def charts(data: ReportData) -> dict[str, str]:
    """Every chart there is evidence for, by file name without suffix, in the order of the report."""
    drawn: dict[str, str] = {}
    for block in data.blocks:
        drawn |= {name: draw(chart) for name, chart in block.charts.items()}
    if data.plan and data.plan.frontier:
        drawn["frontier"] = frontier.chart(data.plan.frontier)
    if data.layers:
        drawn["bits"] = bits_by_layer(data.layers)
        units = dict.fromkeys(row.unit for row in data.layers if row.layer is not None)
        for unit in units:
            drawn[f"layer-error-{unit}"] = layer_error(data.layers, unit)
    return drawn


def draw(chart: Chart) -> str:
    match chart:
        case Intervals():
            return intervals(chart)
        case Divergence():
            return kl_distribution(chart)
        case Bars():
            return bars(chart)
        case Roofline():
            return roofline(chart)


def intervals(chart: Intervals) -> str:
    """Paired differences, one a row and pooled, with confidence bounds, zero and the margin."""
    rows, margin = chart.rows, chart.margin
    _require_finite(chart.title, (number for row in rows for number in (row.value, row.lower, row.upper)))
    said = rows[-1] if rows[-1].pooled else min(rows, key=lambda row: row.value)
    canvas = Canvas(
        WIDTH,
        76 + 28 * len(rows),
        chart.title,
        f"{said.label}: {_points(said.value)} points, bounds {_points(said.lower)} to {_points(said.upper)} at "
        f"{100 * chart.confidence:g} % confidence each; the margin is {_points(-margin)}.",
    )
    low, high = min(-margin, *(row.lower for row in rows)), max(margin / 2, *(row.upper for row in rows))
    pad = (high - low) * 0.06
    left = min(240.0, 20 + 7.2 * max(len(row.label) for row in rows))
    x = Scale(low - pad, high + pad, left, WIDTH - 56)
    top, bottom = 52.0, 52.0 + 28 * len(rows)
    for tick in ticks(x.low * 100, x.high * 100):
        canvas.line(x(tick / 100), top, x(tick / 100), bottom, "axis" if tick == 0 else "grid")
        canvas.text(x(tick / 100), bottom + 18, f"{tick:+g}" if tick else "0", "soft", "middle")
    canvas.text(WIDTH, bottom + 18, "points", "soft", "end")
    canvas.line(x(-margin), top - 6, x(-margin), bottom, "limit")
    canvas.text(x(-margin) + 4, top - 8, f"margin {-margin * 100:g}", "soft limit-text")
    for i, row in enumerate(rows):
        y = top + 28 * i + 14
        canvas.text(0, y + 4, row.label, "title" if row.pooled else "")
        canvas.line(x(row.lower), y, x(row.upper), y, "whisker candidate")
        for end in (row.lower, row.upper):
            canvas.line(x(end), y - 5, x(end), y + 5, "whisker candidate")
        tip = f"{row.label}: {_points(row.value)}, n={row.n}"
        canvas.circle(x(row.value), y, 6 if row.pooled else 4.5, "candidate", tip)
        canvas.text(WIDTH, y + 4, _points(row.value), "soft", "end")
    return canvas.render()


def kl_distribution(divergence: Divergence, bins: int = 24) -> str:
    """How many held-out documents have which mean KL, with the pooled mean, its upper bound and the limit."""
    values = [value for value in divergence.documents if math.isfinite(value)]
    absent = len(divergence.documents) - len(values)
    _require_finite("KL", (divergence.mean, divergence.upper, divergence.bound))
    note = f"; {absent} documents without a finite KL are not drawn" if absent else ""
    canvas = Canvas(
        WIDTH,
        250,
        "KL from the float engine, by document",
        f"{len(values)} documents{note}; mean {divergence.mean:.4f} nats per token, upper bound "
        f"{divergence.upper:.4f}, limit {divergence.bound:g}.",
    )
    high = 1.08 * max(divergence.bound, divergence.upper, *values) if values else divergence.bound * 1.08
    x = Scale(0, high, 40, WIDTH - 8)
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, max(0, int(value / high * bins)))] += 1
    y = _y_axis(canvas, 0, max(1, *counts) * 1.1, top=66, bottom=212, left=40, whole=True)
    for i, count in enumerate(counts):
        left, right = x(high * i / bins), x(high * (i + 1) / bins)
        tip = f"{count} documents from {high * i / bins:.4f} to {high * (i + 1) / bins:.4f} nats"
        canvas.rect(left + 0.5, y(count), right - left - 1, 212 - y(count), "bar candidate", tip)
    for tick in ticks(0, high):
        canvas.text(x(tick), 230, label(tick), "soft", "middle")
    canvas.text(0, 62, "documents", "soft")
    canvas.text(WIDTH - 8, 246, f"nats per token{note}", "soft", "end")
    canvas.line(40, 32, 54, 32, "mean")
    canvas.text(60, 36, f"mean {divergence.mean:.4f} and its upper bound {divergence.upper:.4f}", "soft")
    for value in (divergence.mean, divergence.upper):
        canvas.line(x(value), 58, x(value), 212, "mean")
    canvas.line(x(divergence.mean), 58, x(divergence.upper), 58, "mean")
    canvas.line(x(divergence.bound), 44, x(divergence.bound), 212, "limit")
    late = x(divergence.bound) > WIDTH * 0.75
    text_x, anchor = x(divergence.bound) + (-5 if late else 5), "end" if late else "start"
    canvas.text(text_x, 52, f"limit {divergence.bound:g}", "soft limit-text", anchor)
    return canvas.render()


def layer_error(layers: Sequence[LayerRow], unit: str) -> str:
    """Squared output error over squared output of every linear of one unit (qkv, o, ...): nearest, and as kept."""
    rows = sorted((row for row in layers if row.unit == unit and row.layer is not None), key=lambda row: row.layer or 0)
    if not rows:
        raise EvidenceError(f"no layer of the plan has a unit {unit!r}", expected="a unit named in the plan")
    _require_finite("layer error", (v for row in rows for v in (row.error_before, row.error_after)))
    worst = max(rows, key=lambda row: row.error_after)
    numbers = [row.layer or 0 for row in rows]
    canvas = Canvas(
        WIDTH,
        220,
        f"{unit}: squared error over squared output",
        f"{len(rows)} linears in {len(set(numbers))} layers; the largest kept error is {worst.error_after:.3g} in "
        f"{worst.group}, {worst.error_before:.3g} before.",
    )
    x = Scale(min(numbers) - 0.5, max(numbers) + 0.5, 52, WIDTH - 8)
    high = max(max(row.error_before, row.error_after) for row in rows) or 1.0
    y = _y_axis(canvas, 0, high * 1.08, top=46, bottom=182, left=52)
    for number in sorted({round(tick) for tick in ticks(min(numbers), max(numbers) + 1e-9 + (len(numbers) == 1), 8)}):
        if number in numbers:
            canvas.text(x(number), 199, str(number), "soft", "middle")
    canvas.text(WIDTH - 8, 215, "layer", "soft", "end")
    canvas.legend([("hollow baseline-stroke", "before: round to nearest"), ("candidate", "after: as kept")], 52, 36)
    for row, number in zip(rows, numbers, strict=True):
        canvas.line(x(number), y(row.error_before), x(number), y(row.error_after), "axis")
    for row, number in zip(rows, numbers, strict=True):
        tip = f"{row.group} {row.format}: {row.error_before:.3g} before, {row.error_after:.3g} after"
        canvas.circle(x(number), y(row.error_before), 3.5, "hollow baseline-stroke", tip)
        canvas.circle(x(number), y(row.error_after), 3.5, "candidate", tip)
    return canvas.render()


def bits_by_layer(layers: Sequence[LayerRow]) -> str:
    """The plan as a strip: a column per layer, a row per unit, the cell says and shows the bits."""
    blocks = [row for row in layers if row.layer is not None]
    outside = [row for row in layers if row.layer is None]
    units = list(dict.fromkeys(row.unit for row in blocks))
    numbers = sorted({row.layer for row in blocks if row.layer is not None})
    present = sorted({row.bits for row in layers})
    share = ", ".join(f"{sum(row.bits == bits for row in layers)} linears in {bits} bits" for bits in present)
    canvas = Canvas(WIDTH, 92 + 22 * len(units) + 20 * len(outside), "Bits by layer", f"{share}.")
    left = 76.0
    size = (WIDTH - left) / max(1, len(numbers))
    place = {number: left + size * i for i, number in enumerate(numbers)}
    canvas.legend(
        [(f"bar {_bits_style(bits)}", f"{bits} bits" if bits < 32 else "float") for bits in present], left, 36
    )
    for i, unit in enumerate(units):
        canvas.text(0, 62 + 22 * i, unit)
    for row in blocks:
        assert row.layer is not None
        y = 48.0 + 22 * units.index(row.unit)
        canvas.rect(place[row.layer] + 0.5, y, size - 1, 20, _bits_style(row.bits), f"{row.group}: {row.format}")
        if size >= 9:
            style = f"tiny on-{_bits_style(row.bits)}"
            canvas.text(place[row.layer] + size / 2, y + 14, str(row.bits), style, "middle")
    bottom = 48.0 + 22 * len(units)
    every = max(1, math.ceil(len(numbers) / 8))
    for number in numbers[::every]:
        canvas.text(place[number] + size / 2, bottom + 14, str(number), "soft", "middle")
    canvas.text(0, bottom + 14, "layer", "soft")
    for i, row in enumerate(outside):
        canvas.rect(0, bottom + 24 + 20 * i, 12, 12, _bits_style(row.bits))
        canvas.text(20, bottom + 35 + 20 * i, f"{row.group}: {row.format}", "soft")
    return canvas.render()


def bars(chart: Bars) -> str:
    """Baseline and candidate side by side for each label, with the values on the bars."""
    title, unit, pairs = chart.title, chart.unit, chart.pairs
    _require_finite(title, (value for _, *values in pairs for value in values))
    said = "; ".join(f"{name}: baseline {label(base)}, candidate {label(cand)} {unit}" for name, base, cand in pairs)
    canvas = Canvas(WIDTH, 236, title, f"{'Higher' if chart.higher_is_better else 'Lower'} is better. {said}.")
    high = max(max(base, cand) for _, base, cand in pairs) or 1.0
    y = _y_axis(canvas, 0, high * 1.12, top=46, bottom=200, left=52)
    better = "higher is better" if chart.higher_is_better else "lower is better"
    canvas.legend([("bar baseline", "baseline"), ("bar candidate", "candidate")], 52, 36)
    canvas.text(WIDTH, 234, chart.axis, "soft", "end")
    canvas.text(WIDTH, 36, f"{unit}, {better}", "soft", "end")
    slot = (WIDTH - 60) / len(pairs)
    bar = min(44.0, slot * 0.36)
    for i, (name, *values) in enumerate(pairs):
        middle = 56 + slot * (i + 0.5)
        canvas.text(middle, 218, name, "soft", "middle")
        for j, (style, value) in enumerate(zip(("baseline", "candidate"), values, strict=True)):
            left = middle - bar - 1 + j * (bar + 2)
            canvas.rect(left, y(value), bar, 200 - y(value), f"bar {style}", f"{name} {style}: {label(value)} {unit}")
            canvas.text(left + bar / 2, y(value) - 4, label(value), "soft", "middle")
    return canvas.render()


def roofline(roof: Roofline) -> str:
    """Weight bytes read per second at batch 1, against what this machine can read."""
    _require_finite("roofline", (roof.bandwidth_gb_s, roof.baseline_gb_s, roof.candidate_gb_s))
    canvas = Canvas(
        WIDTH,
        150,
        "Single-stream decode against read bandwidth",
        f"The candidate reads {roof.candidate_gb_s:.1f} GB/s, {roof.candidate_share:.0%} of the measured "
        f"{roof.bandwidth_gb_s:.1f} GB/s; the baseline {roof.baseline_gb_s:.1f} GB/s, {roof.baseline_share:.0%}.",
    )
    x = Scale(0, 1.12 * max(roof.bandwidth_gb_s, roof.baseline_gb_s, roof.candidate_gb_s), 76, WIDTH - 16)
    for tick in ticks(0, x.high):
        canvas.line(x(tick), 42, x(tick), 116, "grid")
        canvas.text(x(tick), 133, label(tick), "soft", "middle")
    canvas.text(WIDTH, 148, "GB/s", "soft", "end")
    for i, (name, value, share) in enumerate(
        (
            ("baseline", roof.baseline_gb_s, roof.baseline_share),
            ("candidate", roof.candidate_gb_s, roof.candidate_share),
        )
    ):
        y = 50.0 + 34 * i
        canvas.text(0, y + 17, name)
        canvas.rect(x(0), y, x(value) - x(0), 24, f"bar {name}")
        inside = value > x.high * 0.45
        canvas.text(
            x(value) + (-6 if inside else 6),
            y + 17,
            f"{value:.1f} GB/s, {share:.0%}",
            "on-bar" if inside else "soft",
            "end" if inside else "start",
        )
    canvas.line(x(roof.bandwidth_gb_s), 28, x(roof.bandwidth_gb_s), 116, "mean")
    late = x(roof.bandwidth_gb_s) > WIDTH / 2
    said = f"measured {roof.bandwidth_gb_s:.1f} GB/s"
    canvas.text(x(roof.bandwidth_gb_s) + (-5 if late else 5), 38, said, "soft", "end" if late else "start")
    return canvas.render()


def write_dvc_rows(data: ReportData, folder: Path) -> tuple[Path, ...]:
    """``kl.csv``, ``layers.csv`` and others for ``dvc plots``; a file without rows has its header only."""
    points = data.plan.frontier.points if data.plan and data.plan.frontier else ()
    tables = {
        "frontier.csv": Rows(HEADER, tuple(cells(point) for point in points)),
        "layers.csv": Rows(
            ("index", "group", "layer", "unit", "bits", "bits_per_weight", "error_before", "error_after"),
            tuple(
                (i, row.group, row.layer, row.unit, row.bits, row.bits_per_weight, row.error_before, row.error_after)
                for i, row in enumerate(data.layers)
            ),
        ),
    }
    for block in data.blocks:
        tables |= block.plots
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        with (folder / name).open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(table.header)
            writer.writerows(table.rows)
    return tuple(folder / name for name in tables)


def _y_axis(
    canvas: Canvas, low: float, high: float, *, top: float, bottom: float, left: float, whole: bool = False
) -> Scale:
    y = Scale(low, high, bottom, top)
    for tick in ticks(low, high, 4):
        if whole and tick != int(tick):
            continue
        canvas.line(left, y(tick), canvas.width, y(tick), "axis" if tick == 0 else "grid")
        canvas.text(left - 6, y(tick) + 4, label(tick), "soft", "end")
    return y


def _points(fraction: float) -> str:
    return f"{fraction * 100:+.2f}"


def _bits_style(bits: int) -> str:
    return "b4" if bits <= 4 else "b8" if bits <= 8 else "b32"


def _require_finite(what: str, values: Iterable[float]) -> None:
    bad = [value for value in values if not math.isfinite(value)]
    if bad:
        raise EvidenceError(f"{what} holds {bad[0]}", expected="finite numbers", remedy="find the stage that wrote it")
