"""The frontier of precision plans: the best one at every KL, as a table with the chosen plan marked."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FrontierPoint:
    """``kl``: predicted, in nats per token. ``microseconds`` per token of the workload, of all units."""

    kl: float
    microseconds: float
    megabytes: float
    chosen: bool


@dataclass(frozen=True)
class Frontier:
    """``points`` in order of KL, the chosen plan among them; ``limit`` is the budget of KL."""

    points: tuple[FrontierPoint, ...]
    limit: float
    by_bytes: bool  # fewest bytes were looked for, not least time


HEADER = ("kl", "microseconds", "megabytes", "chosen")


def table(points: Sequence[FrontierPoint]) -> str:
    """The points as CSV."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(cells(point) for point in points)
    return stream.getvalue()


def cells(point: FrontierPoint) -> tuple[object, ...]:
    """One row of the table."""
    return (f"{point.kl:.6g}", f"{point.microseconds:.6g}", f"{point.megabytes:.6g}", int(point.chosen))


def read(text: str) -> tuple[FrontierPoint, ...]:
    """The inverse of :func:`table`, up to its digits."""
    rows = csv.DictReader(io.StringIO(text))
    return tuple(
        FrontierPoint(float(r["kl"]), float(r["microseconds"]), float(r["megabytes"]), r["chosen"] == "1") for r in rows
    )
