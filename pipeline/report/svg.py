"""A small SVG canvas for charts: axes, marks and text whose colours follow the reader's light or dark scheme.

Hand-written rather than drawn by matplotlib, because its SVG fixes the colours, turns text into outlines a screen
reader cannot read, and weighs some 40 KB a chart; these weigh about 4 KB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape

# Contrast (WCAG): text at least 4.5:1 on what is behind it, marks 3:1 on the page; cells of the bit strip carry digits.
STYLE = """
:root{--ink:#1c2430;--soft:#566173;--rule:#d5dae2;--page:#ffffff;--baseline:#667389;--candidate:#1f66d0;
--pass:#1a7f37;--fail:#b42318;--unsure:#8a5a00;--b4:#1f66d0;--b8:#6496de;--b32:#c9d3e0;--on-b4:#ffffff;--on-b8:#0d1117}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#a3adbb;--rule:#343c49;--page:#12161d;--baseline:#8c98ab;
--candidate:#6aaeff;--pass:#4cc365;--fail:#ff8379;--unsure:#e6b54a;--b4:#6aaeff;--b8:#2f64ad;--b32:#3b4554;
--on-b4:#0d1117;--on-b8:#ffffff}}
svg.chart{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;display:block;width:100%;height:auto}
svg.chart text{fill:var(--ink)}svg.chart .soft{fill:var(--soft);font-size:12px}svg.chart .tiny{font-size:10px}
svg.chart .title{font-weight:600}svg.chart .grid{stroke:var(--rule);stroke-width:1}
svg.chart .axis{stroke:var(--soft);stroke-width:1}
svg.chart .baseline{fill:var(--baseline);stroke:var(--baseline)}
svg.chart .candidate{fill:var(--candidate);stroke:var(--candidate)}
svg.chart .baseline-stroke{stroke:var(--baseline)}svg.chart text.on-bar{fill:var(--page)}
svg.chart .hollow{fill:var(--page);stroke-width:1.5}
svg.chart .bar{stroke:none}svg.chart .whisker{stroke-width:2}
svg.chart .limit{stroke:var(--fail);stroke-width:1.5;stroke-dasharray:5 4}svg.chart text.limit-text{fill:var(--fail)}
svg.chart .mean{stroke:var(--ink);stroke-width:1.5}
svg.chart .b4{fill:var(--b4)}svg.chart .b8{fill:var(--b8)}svg.chart .b32{fill:var(--b32)}
svg.chart text.on-b4{fill:var(--on-b4)}svg.chart text.on-b8{fill:var(--on-b8)}svg.chart text.on-b32{fill:var(--ink)}
"""


@dataclass(frozen=True)
class Scale:
    """A linear map from data to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2 or 5 times a power of ten apart) that lie within ``low..high``.

    >>> ticks(0, 0.035)
    [0.0, 0.01, 0.02, 0.03]
    """
    if not high > low:
        raise ValueError(f"an axis from {low} to {high} has no length")
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.75)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step)) + 1)
    return [round(i * step, digits) + 0.0 for i in range(first, last + 1)]


def label(value: float) -> str:
    """A short axis or bar label.

    >>> [label(v) for v in (0, 0.0125, 3.14159, 1302.4, 0.00004)]
    ['0', '0.0125', '3.14', '1,302', '4e-05']
    """
    if value and abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass
class Canvas:
    """A chart being drawn. ``description`` is what a screen reader says; make it hold the result."""

    width: float
    height: float
    title: str
    description: str
    marks: list[str] = field(default_factory=list[str], init=False)

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self.marks.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>')

    def rect(self, x: float, y: float, width: float, height: float, style: str, tip: str = "") -> None:
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self.marks.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" '
            f'class="{style}">{inside}</rect>'
        )

    def circle(self, x: float, y: float, radius: float, style: str, tip: str = "") -> None:
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self.marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{style}">{inside}</circle>')

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        self.marks.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>')

    def legend(self, entries: list[tuple[str, str]], x: float, y: float) -> None:
        """Swatches ``(class, text)`` in a row from ``x``: a square for bars, a dot for everything else."""
        for style, text in entries:
            if style.startswith("bar "):
                self.rect(x, y - 9, 11, 11, style)
            else:
                self.circle(x + 5, y - 4, 4, style)
            self.text(x + 16, y, text, "soft")
            x += 32 + 6.6 * len(text)

    def render(self) -> str:
        body = "\n".join(self.marks)
        return (
            f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'role="img" aria-label="{escape(f"{self.title}. {self.description}")}">\n'
            f'<text x="0" y="15" class="title">{escape(self.title)}</text>\n{body}\n</svg>'
        )


def standalone(svg: str) -> str:
    """An inline chart as a file of its own: the same marks with the style sheet and page colour inside."""
    head, body = svg.split(">\n", 1)
    return f'{head}>\n<style>{STYLE}</style>\n<rect width="100%" height="100%" fill="var(--page)"/>\n{body}\n'
