"""The frontier of kernel plans: the best one at every KL, as a table and as a chart with the chosen plan marked."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.svg import Canvas, Scale, label, ticks

WIDTH, HEIGHT = 480.0, 260.0


@dataclass(frozen=True)
class FrontierPoint:
    """``kl``: predicted, in nats per token. ``microseconds`` per token of the workload, in products."""

    kl: float
    microseconds: float
    megabytes: float
    chosen: bool


def table(points: Sequence[FrontierPoint]) -> str:
    """CSV for ``dvc plots``, in order of KL."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["kl", "microseconds", "megabytes", "chosen"])
    for p in points:
        writer.writerow([f"{p.kl:.6g}", f"{p.microseconds:.6g}", f"{p.megabytes:.6g}", int(p.chosen)])
    return stream.getvalue()


def chart(points: Sequence[FrontierPoint], limit: float, *, by_bytes: bool) -> str:
    """SVG: what is made least against predicted KL, from no KL to twice ``limit``, the budget."""
    unit, title = ("MB", "Bytes") if by_bytes else ("µs per token", "Time in products")
    chosen = next(p for p in points if p.chosen)
    shown = [p for p in points if p.kl <= max(2 * limit, chosen.kl)]

    def value(point: FrontierPoint) -> float:
        return point.megabytes if by_bytes else point.microseconds

    canvas = Canvas(
        WIDTH,
        HEIGHT,
        f"{title} against quality",
        f"The chosen plan: {label(value(chosen))} {unit} at a predicted KL of {chosen.kl:.4f}; the limit is {limit:g}.",
    )
    top, bottom, left = 46.0, 212.0, 58.0
    x = Scale(0, max(limit * 1.1, *(p.kl for p in shown)), left, WIDTH - 8)
    low, high = min(value(p) for p in shown), max(value(p) for p in shown)
    y = Scale(low - (high - low or low) * 0.06, high + (high - low or low) * 0.06, bottom, top)
    for tick in ticks(y.low, y.high, 4):
        canvas.line(left, y(tick), WIDTH, y(tick), "grid")
        canvas.text(left - 6, y(tick) + 4, label(tick), "soft", "end")
    for tick in ticks(x.low, x.high):
        canvas.text(x(tick), bottom + 18, label(tick), "soft", "middle")
    canvas.text(WIDTH - 8, bottom + 38, "KL, nats per token, summed over units", "soft", "end")
    canvas.text(left, 36, unit, "soft")
    canvas.line(x(limit), top, x(limit), bottom, "limit")
    canvas.text(x(limit) - 5, top + 10, f"limit {limit:g}", "soft limit-text", "end")
    for point in shown:
        tip = f"KL {point.kl:.4f}: {label(value(point))} {unit}, {label(point.megabytes)} MB"
        canvas.circle(x(point.kl), y(value(point)), 2.5, "baseline", tip)
    canvas.circle(x(chosen.kl), y(value(chosen)), 6, "candidate", f"chosen: {label(value(chosen))} {unit}")
    return canvas.render()
