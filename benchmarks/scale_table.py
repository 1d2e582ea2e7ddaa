"""Time and memory of stages against parameters, from results of `benchmarks.scale`, with the exponent of each.

python -m benchmarks.scale_table scratch/run-0.5b/results.jsonl scratch/run-1b/results.jsonl

The last result of a stage and a size counts. The exponent is the slope of a line through the logarithms: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.scale import Measured

Results = Mapping[tuple[str, int], Measured]  # by stage and parameters


def read(paths: Sequence[Path]) -> Results:
    """What ended well."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    found = [Measured(**line) for line in lines]
    return {(m.stage, m.parameters): m for m in found if m.exit_code == 0}


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
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


def table(results: Results) -> str:
    """Markdown."""
    rows = [
        "| stage | parameters | seconds | peak anonymous | peak resident | artifact | load |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (stage, parameters), m in sorted(results.items()):
        sizes = [m.peak_anonymous_bytes, m.peak_resident_bytes, m.artifact_bytes]
        cells = [stage, f"{parameters / 1e9:.2f} B", f"{m.seconds:.0f}", *(f"{size / 1e9:.2f} GB" for size in sizes)]
        rows.append(f"| {' | '.join(cells)} | {m.load} |")
    for stage in sorted({stage for stage, _ in results}):
        points = [(float(n), m) for (name, n), m in results.items() if name == stage]
        time, memory = (
            exponent([(n, value) for n, value in each])
            for each in ([(n, m.seconds) for n, m in points], [(n, float(m.peak_anonymous_bytes)) for n, m in points])
        )
        if time is not None:
            rows.append(
                f"\n{stage}: time grows with parameters to the power {time}, peak memory to the power {memory}."
            )
    return "\n".join(rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    print(table(read(parser.parse_args(words).results)))


if __name__ == "__main__":
    main()
