"""The charts of a release: rows in, SVG text out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import altair as alt

from evals.block import Bars, Chart, Divergence, Intervals, Roofline
from pipeline.report.data import LayerRow, ReportData
from pipeline.report.vega import BASELINE, CANDIDATE, INK, PAGE, SOFT, draw, limit, number, rows, rule
from quantization.frontier import Frontier
from tapeout.errors import EvidenceError

BINS = 24  # of a histogram
ENGINES = alt.Scale(domain=["baseline", "candidate"], range=[BASELINE, CANDIDATE])


def charts(data: ReportData) -> dict[str, str]:
    """Every chart there is evidence for, by file name without suffix, in the order of the report."""
    drawn: dict[str, str] = {}
    for block in data.blocks:
        drawn |= {name: chart_of(chart) for name, chart in block.charts.items()}
    if data.plan and data.plan.frontier:
        drawn["frontier"] = frontier(data.plan.frontier)
    if data.layers:
        drawn["bits"] = bits_by_layer(data.layers)
        units = dict.fromkeys(row.unit for row in data.layers if row.layer is not None)
        drawn |= {f"layer-error-{unit}": layer_error(data.layers, unit) for unit in units}
    return drawn


def chart_of(chart: Chart) -> str:
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
    """Paired differences, each and pooled, with confidence bounds, zero and the margin."""
    margin = chart.margin
    _require_finite(chart.title, (value for row in chart.rows for value in (row.value, row.lower, row.upper)))
    shown = chart.rows[-1] if chart.rows[-1].pooled else min(chart.rows, key=lambda row: row.value)
    values = [
        (f"{row.label} {_points(row.value)}", 100 * row.value, 100 * row.lower, 100 * row.upper, row.pooled, row.n)
        for row in chart.rows
    ]
    base = alt.Chart(rows("label value lower upper pooled n", values), height=alt.Step(28)).encode(
        alt.Y("label:N", sort=None, title=None).axis(grid=False, labelColor=INK)
    )
    x = alt.X(title="points", type="quantitative", scale=alt.Scale(nice=False, padding=12))
    whiskers = base.mark_errorbar(color=CANDIDATE, thickness=2, ticks=alt.TickConfig(size=10, thickness=2))
    size = alt.condition("datum.pooled", alt.value(120), alt.value(60))
    drawn = alt.layer(
        rule(0, SOFT, strokeWidth=1),
        limit(-100 * margin, f"margin {-100 * margin:g}"),
        whiskers.encode(x.field("lower"), alt.X2("upper")),
        base.transform_calculate(tip="datum.label + ', n=' + datum.n")
        .mark_point(color=CANDIDATE)
        .encode(x.field("value"), size=size, description="tip:N"),
    )
    return draw(
        drawn,
        chart.title,
        f"{shown.label}: {_points(shown.value)} points, bounds {_points(shown.lower)} to {_points(shown.upper)} at "
        f"{100 * chart.confidence:g} % confidence each; the margin is {_points(-margin)}.",
        subtitle=[" "],  # room for the label of the margin
    )


def kl_distribution(divergence: Divergence, bins: int = BINS) -> str:
    """How many held-out documents have which mean KL, with the pooled mean, its upper bound and the limit."""
    values = [value for value in divergence.documents if math.isfinite(value)]
    absent = len(divergence.documents) - len(values)
    _require_finite("KL", (divergence.mean, divergence.upper, divergence.bound))
    note = f"; {absent} documents without a finite KL are not drawn" if absent else ""
    high = 1.08 * max(divergence.bound, divergence.upper, *values, 0)
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, max(0, int(value / high * bins)))] += 1
    edges = [high * i / bins for i in range(bins + 1)]
    values = [
        (low, up, count, f"{count} documents from {low:.4f} to {up:.4f} nats")
        for (low, up), count in zip(pairwise(edges), counts, strict=True)
    ]
    x = alt.X("low:Q", bin="binned", title=f"nats per token{note}").axis(grid=False)
    y = alt.Y("count:Q", title="documents").axis(tickMinStep=1)
    bar = alt.Chart(rows("low up count tip", values), height=150).mark_bar(color=CANDIDATE, binSpacing=1)
    drawn = alt.layer(
        bar.encode(x, y, alt.X2("up"), description="tip:N"),
        rule(divergence.mean, INK),
        rule(divergence.upper, INK),
        limit(divergence.bound, f"limit {divergence.bound:g}"),
    )
    figures = f"mean {divergence.mean:.4f} and its upper bound {divergence.upper:.4f}"
    return draw(
        drawn,
        "KL from the float engine, by document",
        f"{len(values)} documents{note}; mean {divergence.mean:.4f} nats per token, upper bound "
        f"{divergence.upper:.4f}, limit {divergence.bound:g}.",
        subtitle=[figures, " "],
    )


def layer_error(layers: Sequence[LayerRow], unit: str) -> str:
    """Squared output error over squared output of every linear of one unit (qkv, o, ...): nearest, and as kept."""
    found = [row for row in layers if row.unit == unit and row.layer is not None]
    if not found:
        raise EvidenceError(f"no layer of the plan has a unit {unit!r}", expected="a unit named in the plan")
    _require_finite("layer error", (v for row in found for v in (row.error_before, row.error_after)))
    worst = max(found, key=lambda row: row.error_after)
    values = [
        (
            *(row.layer, row.error_before, row.error_after),
            f"{row.group} {row.format}: {row.error_before:.3g} before, {row.error_after:.3g} after",
        )
        for row in found
    ]
    base = alt.Chart(rows("layer before after tip", values), height=140).encode(
        alt.X("layer:Q").axis(grid=False).scale(nice=False, padding=8)
    )
    fill, stroke = (alt.Scale(domain=["before", "after"], range=[color, CANDIDATE]) for color in (PAGE, BASELINE))
    legend = alt.Legend(labelExpr="{before: 'before: round to nearest', after: 'after: as kept'}[datum.label]")
    dots = base.transform_fold(["before", "after"]).mark_point(size=40, strokeWidth=1.5)
    drawn = base.mark_rule(color=SOFT, strokeWidth=1).encode(alt.Y("before:Q"), alt.Y2("after")) + dots.encode(
        alt.Y("value:Q", title=None),
        alt.Fill("key:N", scale=fill, legend=legend),
        alt.Stroke("key:N", scale=stroke, legend=legend),
        description="tip:N",
    )
    return draw(
        drawn,
        f"{unit}: squared error over squared output",
        f"{len(found)} linears in {len({row.layer for row in found})} layers; the largest kept error is "
        f"{worst.error_after:.3g} in {worst.group}, {worst.error_before:.3g} before.",
    )


def bits_by_layer(layers: Sequence[LayerRow]) -> str:
    """The plan as a strip: a column per layer, a row per unit, the cell says and shows the bits."""
    present = sorted({row.bits for row in layers})
    names = {bits: f"{bits} bits" if bits < 32 else "float" for bits in present}
    styles = ["b4" if bits <= 4 else "b8" if bits <= 8 else "b32" for bits in present]
    digits = {"b4": "var(--on-b4)", "b8": "var(--on-b8)", "b32": INK}
    cells: dict[tuple[int, str, int], list[str]] = {}
    for row in layers:
        if row.layer is not None:
            cells.setdefault((row.layer, row.unit, row.bits), []).append(f"{row.group}: {row.format}")
    values = [(layer, unit, bits, names[bits], "; ".join(tips)) for (layer, unit, bits), tips in cells.items()]
    columns = sorted({layer for layer, _, _ in cells})
    shown = columns[:: math.ceil(len(columns) / 8)]
    base = alt.Chart(rows("layer unit bits kind tip", values), height=alt.Step(22)).encode(
        alt.X("layer:O").axis(labelAngle=0, values=shown), alt.Y("unit:N", sort=None, title=None).axis(labelColor=INK)
    )

    def kind(colors: list[str]) -> alt.Color:
        return alt.Color("kind:N", scale=alt.Scale(domain=[*names.values()], range=colors))

    strip = base.mark_rect(stroke=PAGE).encode(kind([f"var(--{style})" for style in styles]), description="tip:N")
    text = base.mark_text(fontSize=10).encode(kind([digits[style] for style in styles]).legend(None), text="bits:N")
    share = ", ".join(f"{sum(row.bits == bits for row in layers)} linears in {bits} bits" for bits in present)
    return draw(
        alt.layer(strip, *[text] * (len(columns) <= 48)).resolve_scale(color="independent"),
        "Bits by layer",
        f"{share}.",
        subtitle=[f"{row.group}: {row.format}" for row in layers if row.layer is None],
    )


def bars(chart: Bars) -> str:
    """Baseline and candidate side by side for each label, with the values on the bars."""
    title, unit, pairs = chart.title, chart.unit, chart.pairs
    _require_finite(title, (value for _, *values in pairs for value in values))
    shown = "; ".join(f"{name}: baseline {number(base)}, candidate {number(cand)} {unit}" for name, base, cand in pairs)
    values = [
        (label, engine, value, number(value), f"{label} {engine}: {number(value)} {unit}")
        for label, *both in pairs
        for engine, value in zip(("baseline", "candidate"), both, strict=True)
    ]
    base = alt.Chart(rows("label engine value text tip", values), height=150).encode(
        alt.X("label:N", sort=None, title=chart.axis or None).axis(labelAngle=0),
        alt.Y("value:Q", title=None),
        alt.XOffset("engine:N", sort=None),
    )
    bar = base.mark_bar().encode(alt.Color("engine:N", scale=ENGINES), description="tip:N")
    better = "higher" if chart.higher_is_better else "lower"
    return draw(
        bar + base.mark_text(dy=-6).encode(text="text:N"),
        title,
        f"{better.title()} is better. {shown}.",
        subtitle=[f"{unit}, {better} is better"],
    )


def roofline(roof: Roofline) -> str:
    """Bytes of weights and states moved per second at batch 1, against what this machine can read."""
    _require_finite("roofline", (roof.bandwidth_gb_s, roof.baseline_gb_s, roof.candidate_gb_s))
    values = [
        (name, rate, f"{name}: {rate:.1f} GB/s, {share:.0%}")
        for name, rate, share in (
            ("baseline", roof.baseline_gb_s, roof.baseline_share),
            ("candidate", roof.candidate_gb_s, roof.candidate_share),
        )
    ]
    bar = alt.Chart(rows("engine rate label", values), height=alt.Step(34)).mark_bar(size=24)
    drawn = bar.encode(
        alt.X("rate:Q", title="GB/s"),
        alt.Y("label:N", sort=None, title=None).axis(grid=False, labelColor=INK),
        alt.Color("engine:N", scale=ENGINES, legend=None),
        description="label:N",
    ) + rule(roof.bandwidth_gb_s, INK)
    return draw(
        drawn,
        "Single-stream decode against read bandwidth",
        f"The candidate reads {roof.candidate_gb_s:.1f} GB/s, {roof.candidate_share:.0%} of the measured "
        f"{roof.bandwidth_gb_s:.1f} GB/s; the baseline {roof.baseline_gb_s:.1f} GB/s, {roof.baseline_share:.0%}.",
        subtitle=[f"line: the measured {roof.bandwidth_gb_s:.1f} GB/s"],
    )


def frontier(found: Frontier) -> str:
    """What was looked for against predicted KL, from no KL to twice the limit, with the chosen plan marked."""
    unit, title, field = ("MB", "Bytes", "megabytes") if found.by_bytes else ("µs per token", "Time", "microseconds")
    chosen = next(point for point in found.points if point.chosen)
    values = [
        (
            *(point.kl, getattr(point, field), point.chosen),
            f"KL {point.kl:.4f}: {number(point.microseconds)} µs per token, {number(point.megabytes)} MB",
        )
        for point in sorted(found.points, key=lambda point: point.chosen)
        if point.kl <= max(2 * found.limit, chosen.kl)
    ]
    points = alt.Chart(rows("kl value chosen tip", values), height=170).mark_point()
    drawn = limit(found.limit, f"limit {found.limit:g}") + points.encode(
        alt.X("kl:Q", title="KL, nats per token, summed over units").axis(grid=False),
        alt.Y("value:Q", title=None).scale(zero=False),
        color=alt.condition("datum.chosen", alt.value(CANDIDATE), alt.value(BASELINE)),
        size=alt.condition("datum.chosen", alt.value(120), alt.value(25)),
        description="tip:N",
    )
    value = number(getattr(chosen, field))
    return draw(
        drawn,
        f"{title} against quality",
        f"The chosen plan: {value} {unit} at a predicted KL of {chosen.kl:.4f}; the limit is {found.limit:g}.",
        subtitle=[unit, " "],
    )


def _points(fraction: float) -> str:
    return f"{fraction * 100:+.2f}"


def _require_finite(what: str, values: Iterable[float]) -> None:
    bad = [value for value in values if not math.isfinite(value)]
    if bad:
        raise EvidenceError(f"{what} holds {bad[0]}", expected="finite numbers", remedy="find the stage that wrote it")
