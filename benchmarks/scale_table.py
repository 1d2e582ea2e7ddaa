"""Time and memory of stages against parameters, from results of `benchmarks.scale`: a table, exponents and a plot.

python -m benchmarks.scale_table scratch/run-0.5b/results.jsonl scratch/run-1b/results.jsonl --plot scale.svg

The last result of a stage and a size counts. The exponent is the slope of a line through the logarithms: 1 is linear.
Exponents are of processor seconds, which other work on the machine changes least.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import altair as alt

from benchmarks.scale import Measured
from pipeline.report.vega import draw, rows, standalone

Results = Mapping[tuple[str, int], Measured]  # by stage and parameters
Points = Sequence[tuple[float, float]]
PANEL_HEIGHT = 220
COLORS = ("#1f66d0", "#d97706", "#0f9f7a", "#b42318", "#8b5cf6", "#667389")  # readable on light and on dark


def read(paths: Sequence[Path]) -> Results:
    """What ended well."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    found = [Measured(**line) for line in lines]
    return {(m.stage, m.parameters): m for m in found if m.exit_code == 0}


def exponent(points: Points) -> float | None:
    """Of ``y ~ x ** exponent``, by least squares of logarithms; None for fewer than two sizes.

    >>> exponent([(1.0, 3.0), (2.0, 12.0), (4.0, 48.0)])
    2.0
    """
    if len({x for x, _ in points}) < 2:
        return None
    xs, ys = [math.log2(x) for x, _ in points], [math.log2(y) for _, y in points]
    middle, level = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - middle) * (y - level) for x, y in zip(xs, ys, strict=True)) / sum((x - middle) ** 2 for x in xs)
    return round(slope, 2)


def exponents(results: Results) -> dict[str, tuple[float, float]]:
    """Of processor seconds and of peak memory, for each stage that was measured at two sizes."""
    found: dict[str, tuple[float, float]] = {}
    for stage in dict.fromkeys(stage for stage, _ in results):
        of_stage = [m for m in results.values() if m.stage == stage]
        time = exponent([(m.parameters, m.processor_seconds) for m in of_stage])
        memory = exponent([(m.parameters, m.peak_anonymous_bytes) for m in of_stage])
        if time is not None and memory is not None:
            found[stage] = time, memory
    return found


def table(results: Results) -> str:
    """Markdown."""
    lines = [
        "| stage | parameters | seconds | processor s | peak anonymous | peak resident | artifact | load |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (stage, parameters), m in results.items():
        sizes = [m.peak_anonymous_bytes, m.peak_resident_bytes, m.artifact_bytes]
        times = [f"{m.seconds:,.0f}", f"{m.processor_seconds:,.0f}"]
        cells = [stage, f"{parameters / 1e9:.2f} B", *times, *(f"{size / 1e9:.2f} GB" for size in sizes)]
        lines.append(f"| {' | '.join(cells)} | {m.load} |")
    found = exponents(results)
    if found:
        lines += ["", "| stage | exponent of processor seconds | exponent of peak memory |", "|---|--:|--:|"]
        lines += [f"| {stage} | {time} | {memory} |" for stage, (time, memory) in found.items()]
    return "\n".join(lines)


def plot(results: Results) -> str:
    """SVG: processor seconds and peak anonymous memory against parameters, on logarithmic axes."""
    measured = [
        (m.stage, m.parameters / 1e9, m.processor_seconds, m.peak_anonymous_bytes / 1e9) for m in results.values()
    ]
    data = rows("stage parameters seconds memory", measured)
    panels = [
        _panel(data, "seconds:Q", "processor seconds"),
        _panel(data, "memory:Q", "peak anonymous memory, GB"),
    ]
    said = "; ".join(f"{stage} {time} and {memory}" for stage, (time, memory) in exponents(results).items())
    return standalone(
        draw(
            alt.vconcat(*panels, autosize="pad"),
            "Time and memory of stages by model size",
            f"Exponents of processor seconds and of peak memory: {said or 'one size only'}",
        )
    )


def _panel(data: alt.InlineData, column: str, title: str) -> alt.LayerChart | alt.FacetChart:
    x = alt.X("parameters:Q", title="parameters, billions").scale(type="log")
    y = alt.Y(column, title=title).scale(type="log")
    stage = alt.Color("stage:N", scale=alt.Scale(range=list(COLORS)))
    base = alt.Chart(data, height=PANEL_HEIGHT).encode(x, y, stage)
    return alt.layer(base.mark_line(strokeWidth=1), base.mark_point(size=50).encode(description="stage:N"))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG file to write")
    given = parser.parse_args(words)
    results = read(given.results)
    print(table(results))
    if given.plot:
        given.plot.write_text(plot(results))


if __name__ == "__main__":
    main()
