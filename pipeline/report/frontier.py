"""The chart of a plan's frontier: the best plan at every KL, with the chosen one marked."""

from __future__ import annotations

from pipeline.report.svg import Canvas, Scale, label, ticks
from quantization.frontier import Frontier, FrontierPoint

WIDTH, HEIGHT = 480.0, 260.0


def chart(frontier: Frontier) -> str:
    """SVG: what was looked for against predicted KL, from no KL to twice the limit."""
    unit, title = ("MB", "Bytes") if frontier.by_bytes else ("µs per token", "Time")
    limit = frontier.limit
    chosen = next(p for p in frontier.points if p.chosen)
    shown = [p for p in frontier.points if p.kl <= max(2 * limit, chosen.kl)]

    def value(point: FrontierPoint) -> float:
        return point.megabytes if frontier.by_bytes else point.microseconds

    canvas = Canvas(
        WIDTH,
        HEIGHT,
        f"{title} against quality",
        f"The chosen plan: {label(value(chosen))} {unit} at a predicted KL of {chosen.kl:.4f}; the limit is {limit:g}.",
    )
    top, bottom, left = 46.0, 212.0, 58.0
    x = Scale(0, max(limit * 1.1, *(p.kl for p in shown)), left, WIDTH - 8)
    low, high = min(value(p) for p in shown), max(value(p) for p in shown)
    pad = (high - low or high) * 0.06
    y = Scale(low - pad, high + pad, bottom, top)
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
        tip = f"KL {point.kl:.4f}: {label(point.microseconds)} µs per token, {label(point.megabytes)} MB"
        canvas.circle(x(point.kl), y(value(point)), 2.5, "baseline", tip)
    canvas.circle(x(chosen.kl), y(value(chosen)), 6, "candidate", f"chosen: {label(value(chosen))} {unit}")
    return canvas.render()
