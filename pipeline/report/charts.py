"""The charts of a release: rows in, SVG text out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from evals.block import Bars, Chart, Divergence, Intervals, Roofline
from pipeline.report.data import LayerRow, ReportData
from pipeline.report.vega import BASELINE, CANDIDATE, INK, PAGE, SOFT, Spec, draw, limit, number, rule
from quantization.frontier import Frontier
from tapeout.errors import EvidenceError

BINS = 24  # of a histogram
ENGINES: Spec = {"domain": ["baseline", "candidate"], "range": [BASELINE, CANDIDATE]}
TIP: Spec = {"description": {"field": "tip"}}


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
    rows, margin = chart.rows, chart.margin
    _require_finite(chart.title, (number for row in rows for number in (row.value, row.lower, row.upper)))
    said = rows[-1] if rows[-1].pooled else min(rows, key=lambda row: row.value)
    values = [
        {
            "label": f"{row.label} {_points(row.value)}",
            "value": 100 * row.value,
            "lower": 100 * row.lower,
            "upper": 100 * row.upper,
            "size": 120 if row.pooled else 60,
            "tip": f"{row.label}: {_points(row.value)}, n={row.n}",
        }
        for row in rows
    ]
    x: Spec = {"type": "quantitative", "title": "points", "scale": {"nice": False, "padding": 12}}
    y: Spec = {"field": "label", "sort": None, "title": None, "axis": {"grid": False, "labelColor": INK}}
    spec: Spec = {
        "data": {"values": values},
        "height": {"step": 28},
        "layer": [
            rule(0, SOFT, strokeWidth=1),
            *limit(-100 * margin, f"margin {-100 * margin:g}"),
            {
                "mark": {"type": "errorbar", "ticks": {"size": 10, "thickness": 2}, "color": CANDIDATE, "thickness": 2},
                "encoding": {"x": x | {"field": "lower"}, "x2": {"field": "upper"}, "y": y},
            },
            {
                "mark": {"type": "point", "color": CANDIDATE},
                "encoding": {"x": x | {"field": "value"}, "y": y, "size": {"field": "size", "scale": None}, **TIP},
            },
        ],
    }
    return draw(
        spec,
        chart.title,
        f"{said.label}: {_points(said.value)} points, bounds {_points(said.lower)} to {_points(said.upper)} at "
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
    shown = [
        {"low": low, "high": up, "count": count, "tip": f"{count} documents from {low:.4f} to {up:.4f} nats"}
        for (low, up), count in zip(pairwise(edges), counts, strict=True)
    ]
    x: Spec = {"field": "low", "type": "quantitative", "title": f"nats per token{note}", "axis": {"grid": False}}
    y: Spec = {"field": "count", "type": "quantitative", "title": "documents", "axis": {"tickMinStep": 1}}
    spec: Spec = {
        "height": 150,
        "layer": [
            {
                "data": {"values": shown},
                "mark": {"type": "bar", "color": CANDIDATE, "binSpacing": 1},
                "encoding": {"x": x | {"bin": "binned"}, "x2": {"field": "high"}, "y": y, **TIP},
            },
            *(rule(value, INK) for value in (divergence.mean, divergence.upper)),
            *limit(divergence.bound, f"limit {divergence.bound:g}"),
        ],
    }
    figures = f"mean {divergence.mean:.4f} and its upper bound {divergence.upper:.4f}"
    return draw(
        spec,
        "KL from the float engine, by document",
        f"{len(values)} documents{note}; mean {divergence.mean:.4f} nats per token, upper bound "
        f"{divergence.upper:.4f}, limit {divergence.bound:g}.",
        subtitle=[figures, " "],
    )


def layer_error(layers: Sequence[LayerRow], unit: str) -> str:
    """Squared output error over squared output of every linear of one unit (qkv, o, ...): nearest, and as kept."""
    rows = [row for row in layers if row.unit == unit and row.layer is not None]
    if not rows:
        raise EvidenceError(f"no layer of the plan has a unit {unit!r}", expected="a unit named in the plan")
    _require_finite("layer error", (v for row in rows for v in (row.error_before, row.error_after)))
    worst = max(rows, key=lambda row: row.error_after)
    before, after = "before: round to nearest", "after: as kept"
    values = [
        {
            "layer": row.layer,
            "kind": kind,
            "error": error,
            "after": row.error_after,
            "tip": f"{row.group} {row.format}: {row.error_before:.3g} before, {row.error_after:.3g} after",
        }
        for row in rows
        for kind, error in ((before, row.error_before), (after, row.error_after))
    ]
    kinds: Spec = {"domain": [before, after]}
    y: Spec = {"field": "error", "type": "quantitative", "title": None}
    spec: Spec = {
        "data": {"values": values},
        "height": 140,
        "encoding": {
            "x": {
                "field": "layer",
                "type": "quantitative",
                "title": "layer",
                "axis": {"grid": False},
                "scale": {"nice": False, "padding": 8},
            }
        },
        "layer": [
            {
                "transform": [{"filter": f"datum.kind == '{before}'"}],
                "mark": {"type": "rule", "color": SOFT, "strokeWidth": 1},
                "encoding": {"y": y, "y2": {"field": "after"}},
            },
            {
                "mark": {"type": "point", "size": 40, "strokeWidth": 1.5},
                "encoding": {
                    "y": y,
                    "fill": {"field": "kind", "scale": kinds | {"range": [PAGE, CANDIDATE]}},
                    "stroke": {"field": "kind", "scale": kinds | {"range": [BASELINE, CANDIDATE]}},
                    **TIP,
                },
            },
        ],
    }
    return draw(
        spec,
        f"{unit}: squared error over squared output",
        f"{len(rows)} linears in {len({row.layer for row in rows})} layers; the largest kept error is "
        f"{worst.error_after:.3g} in {worst.group}, {worst.error_before:.3g} before.",
    )


def bits_by_layer(layers: Sequence[LayerRow]) -> str:
    """The plan as a strip: a column per layer, a row per unit, the cell says and shows the bits."""
    present = sorted({row.bits for row in layers})
    names = {bits: f"{bits} bits" if bits < 32 else "float" for bits in present}
    styles = ["b4" if bits <= 4 else "b8" if bits <= 8 else "b32" for bits in present]
    on = {"b4": "var(--on-b4)", "b8": "var(--on-b8)", "b32": INK}
    cells: dict[tuple[int, str, int], list[str]] = {}
    for row in layers:
        if row.layer is not None:
            cells.setdefault((row.layer, row.unit, row.bits), []).append(f"{row.group}: {row.format}")
    values = [
        {"layer": layer, "unit": unit, "bits": str(bits), "kind": names[bits], "tip": "; ".join(tips)}
        for (layer, unit, bits), tips in cells.items()
    ]
    columns = sorted({row.layer for row in layers if row.layer is not None})
    kind: Spec = {"field": "kind", "sort": None}
    domain: Spec = {"domain": list(names.values())}
    cell: Spec = {
        "mark": {"type": "rect", "stroke": PAGE},
        "encoding": {"color": kind | {"scale": domain | {"range": [f"var(--{style})" for style in styles]}}, **TIP},
    }
    digits: Spec = {
        "mark": {"type": "text", "fontSize": 10},
        "encoding": {
            "text": {"field": "bits"},
            "color": kind | {"scale": domain | {"range": [on[style] for style in styles]}, "legend": None},
        },
    }
    axis: Spec = {"labelAngle": 0, "values": columns[:: math.ceil(len(columns) / 8)]}
    spec: Spec = {
        "data": {"values": values},
        "height": {"step": 22},
        "encoding": {
            "x": {"field": "layer", "type": "ordinal", "title": "layer", "axis": axis},
            "y": {"field": "unit", "sort": None, "title": None, "axis": {"labelColor": INK}},
        },
        "layer": [cell, digits] if len(columns) <= 48 else [cell],
        "resolve": {"scale": {"color": "independent"}},
    }
    share = ", ".join(f"{sum(row.bits == bits for row in layers)} linears in {bits} bits" for bits in present)
    outside = [f"{row.group}: {row.format}" for row in layers if row.layer is None]
    return draw(spec, "Bits by layer", f"{share}.", subtitle=outside)


def bars(chart: Bars) -> str:
    """Baseline and candidate side by side for each label, with the values on the bars."""
    title, unit, pairs = chart.title, chart.unit, chart.pairs
    _require_finite(title, (value for _, *values in pairs for value in values))
    said = "; ".join(f"{name}: baseline {number(base)}, candidate {number(cand)} {unit}" for name, base, cand in pairs)
    values = [
        {
            "label": label,
            "engine": engine,
            "value": value,
            "text": number(value),
            "tip": f"{label} {engine}: {number(value)} {unit}",
        }
        for label, *both in pairs
        for engine, value in zip(ENGINES["domain"], both, strict=True)
    ]
    better = "higher" if chart.higher_is_better else "lower"
    spec: Spec = {
        "data": {"values": values},
        "height": 150,
        "encoding": {
            "x": {"field": "label", "sort": None, "title": chart.axis or None, "axis": {"labelAngle": 0}},
            "xOffset": {"field": "engine", "sort": None},
            "y": {"field": "value", "type": "quantitative", "title": None},
        },
        "layer": [
            {"mark": "bar", "encoding": {"color": {"field": "engine", "scale": ENGINES}, **TIP}},
            {"mark": {"type": "text", "dy": -6}, "encoding": {"text": {"field": "text"}}},
        ],
    }
    return draw(spec, title, f"{better.title()} is better. {said}.", subtitle=[f"{unit}, {better} is better"])


def roofline(roof: Roofline) -> str:
    """Weight bytes read per second at batch 1, against what this machine can read."""
    _require_finite("roofline", (roof.bandwidth_gb_s, roof.baseline_gb_s, roof.candidate_gb_s))
    measured = (
        ("baseline", roof.baseline_gb_s, roof.baseline_share),
        ("candidate", roof.candidate_gb_s, roof.candidate_share),
    )
    values = [
        {"engine": name, "rate": rate, "label": f"{name}: {rate:.1f} GB/s, {share:.0%}"}
        for name, rate, share in measured
    ]
    spec: Spec = {
        "data": {"values": values},
        "height": {"step": 34},
        "layer": [
            {
                "mark": {"type": "bar", "size": 24},
                "encoding": {
                    "x": {"field": "rate", "type": "quantitative", "title": "GB/s"},
                    "y": {"field": "label", "sort": None, "title": None, "axis": {"grid": False, "labelColor": INK}},
                    "color": {"field": "engine", "scale": ENGINES, "legend": None},
                    "description": {"field": "label"},
                },
            },
            rule(roof.bandwidth_gb_s, INK),
        ],
    }
    return draw(
        spec,
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
        {
            "kl": point.kl,
            "value": getattr(point, field),
            "size": 120 if point.chosen else 25,
            "kind": "chosen" if point.chosen else "other",
            "tip": f"KL {point.kl:.4f}: {number(point.microseconds)} µs per token, {number(point.megabytes)} MB",
        }
        for point in sorted(found.points, key=lambda point: point.chosen)
        if point.kl <= max(2 * found.limit, chosen.kl)
    ]
    spec: Spec = {
        "data": {"values": values},
        "height": 170,
        "layer": [
            *limit(found.limit, f"limit {found.limit:g}"),
            {
                "mark": "point",
                "encoding": {
                    "x": {
                        "field": "kl",
                        "type": "quantitative",
                        "title": "KL, nats per token, summed over units",
                        "axis": {"grid": False},
                    },
                    "y": {"field": "value", "type": "quantitative", "title": None, "scale": {"zero": False}},
                    "size": {"field": "size", "scale": None},
                    "color": {
                        "field": "kind",
                        "scale": {"domain": ["chosen", "other"], "range": [CANDIDATE, BASELINE]},
                        "legend": None,
                    },
                    **TIP,
                },
            },
        ],
    }
    value = number(getattr(chosen, field))
    return draw(
        spec,
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
