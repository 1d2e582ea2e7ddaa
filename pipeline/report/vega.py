"""Draws Altair charts as SVG text whose colours follow the reader's light or dark scheme.

``vl-convert`` computes the marks offline. Colours are CSS variables, texts stay texts, and what a mark is called
(``description``) becomes the tooltip that browsers show.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

import altair as alt
import vl_convert

WIDTH = 480  # units: charts beside each other on a desk and below each other on a phone stay readable

# Contrast (WCAG): text at least 4.5:1 on what is behind it, marks 3:1 on the page; cells of the bit strip carry digits.
STYLE = """
:root{--ink:#1c2430;--soft:#566173;--rule:#d5dae2;--page:#ffffff;--baseline:#667389;--candidate:#1f66d0;
--pass:#1a7f37;--fail:#b42318;--unsure:#8a5a00;--b4:#1f66d0;--b8:#6496de;--b32:#c9d3e0;--on-b4:#ffffff;--on-b8:#0d1117}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#a3adbb;--rule:#343c49;--page:#12161d;--baseline:#8c98ab;
--candidate:#6aaeff;--pass:#4cc365;--fail:#ff8379;--unsure:#e6b54a;--b4:#6aaeff;--b8:#2f64ad;--b32:#3b4554;
--on-b4:#0d1117;--on-b8:#ffffff}}
svg.chart{display:block;width:100%;height:auto}
"""
INK, SOFT, RULE, PAGE, FAIL = (f"var(--{name})" for name in ("ink", "soft", "rule", "page", "fail"))
BASELINE, CANDIDATE = "var(--baseline)", "var(--candidate)"
_FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,sans-serif'
MEASURED, SHOWN = 14, 12  # text sizes: room for readers whose font is wider than the one that texts are measured in
_TEXT: dict[str, Any] = {
    "labelColor": SOFT,
    "labelFontSize": MEASURED,
    "titleColor": SOFT,
    "titleFontSize": MEASURED,
    "titleFontWeight": "normal",
}
_CONFIG: dict[str, Any] = {
    "axis": {**_TEXT, "domain": False, "ticks": False, "gridColor": RULE, "labelPadding": 6, "tickCount": 5},
    "axisX": {"titleAnchor": "end"},
    "axisY": {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleY": -8},
    "background": None,
    "font": "Liberation Sans",  # comes with vl-convert, so that texts are measured alike everywhere
    "legend": {**_TEXT, "orient": "top", "title": None, "symbolOpacity": 1},
    "point": {"filled": True, "opacity": 1},
    "rule": {"aria": False, "strokeWidth": 1.5},
    "text": {"aria": False, "color": SOFT, "fontSize": MEASURED},
    "title": {"anchor": "start", "frame": "bounds", "color": INK, "fontSize": 13, "subtitleColor": SOFT,
              "subtitleFontSize": MEASURED},
    "view": {"stroke": None},
}  # fmt: skip

# Of what vl-convert writes: names of marks become tooltips, what nobody sees goes, a tenth of a unit is exact enough.
_COMPACT = {
    r'<path class="(?:background|foreground)"[^>]*/>': "",
    r' (?:class|aria-hidden|pointer-events|font-family)="[^"]*"| font-weight="normal"| opacity="1"': "",
    r'<(\w+) aria-label="([^"]*)" role="graphics-symbol"([^>]*)/>': r"<\1\3><title>\2</title></\1>",
    r' (?:role|aria-label|aria-roledescription)="[^"]*"': "",
    r"(\.\d)\d+(?=[^<>]*>)": r"\1",
    f'font-size="{MEASURED}px"': f'font-size="{SHOWN}px"',
}


def draw(chart: alt.TopLevelMixin, title: str, description: str, *, subtitle: Sequence[str] = ()) -> str:
    """SVG text for a page. ``description`` is what a screen reader says; make it hold the result."""
    head = {"text": title, "subtitle": list(subtitle)}
    fit = {"width": WIDTH, "autosize": {"type": "fit-x", "contains": "padding"}}
    spec = fit | chart.to_dict() | {"config": _CONFIG, "title": head, "padding": 4}
    drawn = vl_convert.vegalite_to_svg(spec, allowed_base_urls=[])
    size = re.search(r'viewBox="[^"]*"', drawn)
    assert size is not None
    body = drawn[drawn.index(">") + 1 :]
    for pattern, replacement in _COMPACT.items():
        body = re.sub(pattern, replacement, body)
    label = escape(f"{title}. {description}")
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" {size[0]} role="img" aria-label="{label}" '
        f"font-family='{_FONT}'>\n{body}\n"
    )


def standalone(svg: str) -> str:
    """An inline chart as a file of its own: the same marks with the style sheet and page colour inside."""
    head, body = svg.split(">\n", 1)
    return f'{head}>\n<style>{STYLE}</style>\n<rect width="100%" height="100%" fill="var(--page)"/>\n{body}'


def rows(columns: str, values: Sequence[Sequence[Any]]) -> alt.InlineData:
    return alt.InlineData([dict(zip(columns.split(), row, strict=True)) for row in values])


def rule(value: float, color: str, **mark: Any) -> alt.Chart:
    """A vertical line through the whole chart at a value."""
    return alt.Chart(alt.InlineData([{}])).mark_rule(color=color, **mark).encode(x=alt.datum(value))


def limit(value: float, text: str) -> alt.LayerChart | alt.FacetChart:
    """A line that must not be crossed, with its label above."""
    label = alt.Chart(alt.InlineData([{}])).mark_text(color=FAIL, baseline="bottom", dy=-3, text=text)
    return rule(value, FAIL, strokeDash=[5, 4]) + label.encode(x=alt.datum(value), y=alt.value(0))


def number(value: float) -> str:
    """A short label.

    >>> [number(v) for v in (0, 0.0125, 3.14159, 1302.4, 0.00004)]
    ['0', '0.0125', '3.14', '1,302', '4e-05']
    """
    if value and abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
