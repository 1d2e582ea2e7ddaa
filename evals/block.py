"""What a kind shows in the HTML report: rows, charts and metrics as plain data. ``pipeline/report`` draws them.

Fractions are 0..1 (never percent), KL is in nats per token, sizes are in MB (10^6 bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["fraction", "nats", "ratio", "number"]
Cell = str | float | None  # numbers are formatted by the page
QUALITY, SPEED, QUANTIZATION = "Quality against the float engine", "Speed, memory and cost", "Quantization"


@dataclass(frozen=True)
class FactRow:
    """A number with its explanation, already a fraction, count or text."""

    name: str
    title: str
    value: float | str
    unit: Unit = "number"
    note: str = ""


@dataclass(frozen=True)
class Table:
    """The first column names the rows; the others are numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Interval:
    label: str
    value: float
    lower: float
    upper: float
    n: int
    pooled: bool = False  # of all the others together


@dataclass(frozen=True)
class Intervals:
    """Differences with their confidence bounds, each one-sided at ``confidence``, and the margin that may be lost."""

    title: str
    rows: tuple[Interval, ...]
    margin: float
    confidence: float


@dataclass(frozen=True)
class Divergence:
    """KL(baseline || candidate), one mean per held-out document, with the pooled mean and its upper bound."""

    documents: tuple[float, ...]
    mean: float
    upper: float
    bound: float


@dataclass(frozen=True)
class Bars:
    """Baseline and candidate side by side, ``(label, baseline, candidate)``; ``axis`` says what the labels are."""

    title: str
    unit: str
    pairs: tuple[tuple[str, float, float], ...]
    higher_is_better: bool
    axis: str = ""


@dataclass(frozen=True)
class Roofline:
    """Single-stream decode against the machine's measured read bandwidth.

    ``*_gb_s``: weight bytes read per second at batch 1. A share is achieved over measured bandwidth, 0..1.
    """

    bandwidth_gb_s: float
    baseline_gb_s: float
    candidate_gb_s: float

    @property
    def baseline_share(self) -> float:
        return self.baseline_gb_s / self.bandwidth_gb_s

    @property
    def candidate_share(self) -> float:
        return self.candidate_gb_s / self.bandwidth_gb_s


Chart = Intervals | Divergence | Bars | Roofline


@dataclass(frozen=True)
class Rows:
    """A CSV file for ``dvc plots``."""

    header: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class Block:
    """``section``: the heading it stands under, with the charts of all its blocks first. ``heading``: its own, if any.

    ``missing``: what the page says where something of it was not measured. ``machine``: what it knows of the machine,
    for the head of the page. ``metrics``: under dotted names, for an MLflow run.
    """

    section: str
    heading: str = ""
    charts: Mapping[str, Chart] = field(default_factory=dict[str, Chart])
    facts: tuple[FactRow, ...] = ()
    table: Table | None = None
    missing: str = ""
    machine: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    plots: Mapping[str, Rows] = field(default_factory=dict[str, Rows])


def fact_metrics(prefix: str, facts: tuple[FactRow, ...]) -> dict[str, float | None]:
    """The facts that are numbers, under ``prefix``."""
    return {f"{prefix}.{fact.name}": fact.value for fact in facts if not isinstance(fact.value, str)}
