"""What the HTML report, the plots and the MLflow run show: plain rows, filled from the artifacts by the stages.

Plain numbers only, so that the report can be drawn, tested and compared without any engine. Fractions are
0..1 (never percent), KL is in nats per token, sizes in MB (10^6 bytes), times as the field name says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from evals.verdict import Verdict
from quantization.frontier import Frontier

Unit = Literal["fraction", "nats", "ratio", "number"]


@dataclass(frozen=True)
class Divergence:
    """KL(baseline || candidate), one mean per held-out document, with the pooled mean and its upper bound."""

    documents: tuple[float, ...]
    mean: float
    upper: float
    bound: float


@dataclass(frozen=True)
class Planned:
    """The kernel plan as it is read: how it came about, a row a unit, and, of a chosen one, what else there was."""

    summary: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    frontier: Frontier | None = None


@dataclass(frozen=True)
class LayerRow:
    """One linear group of the plan: its format and its relative output error, plain rounding and as kept.

    ``layer`` is None outside the blocks (embeddings, lm_head). ``bits`` is 32 for a linear left in float.
    """

    group: str
    layer: int | None
    unit: str
    format: str
    bits: int
    bits_per_weight: float
    error_before: float
    error_after: float


@dataclass(frozen=True)
class BatchRow:
    """Decode speed at one batch size: all rows together in tokens/s, and the time between tokens of one row."""

    batch: int
    baseline_tokens_s: float
    candidate_tokens_s: float
    baseline_itl_ms: float
    candidate_itl_ms: float


@dataclass(frozen=True)
class SpeedRow:
    """Any other measured number of both engines."""

    name: str
    title: str
    unit: str
    baseline: float
    candidate: float
    better: Literal["lower", "higher"]

    @property
    def ratio(self) -> float | None:
        """How many times better the candidate is; None where the measure is zero."""
        top, bottom = (self.baseline, self.candidate) if self.better == "lower" else (self.candidate, self.baseline)
        return top / bottom if bottom else None


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


@dataclass(frozen=True)
class FactRow:
    """A number with its explanation, already a fraction, count or text."""

    name: str
    title: str
    value: float | str
    unit: Unit = "number"
    note: str = ""


@dataclass(frozen=True)
class LineageRow:
    """One artifact: where it lies, its digest, the digests of what it was made from, and library versions."""

    noun: str
    folder: str
    digest: str
    parents: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class ReportData:
    """Everything the report shows, in the order it is shown. Empty tuples and None say "not measured"."""

    model_name: str
    verdict: Verdict
    divergence: Divergence | None = None
    plan: Planned | None = None
    layers: tuple[LayerRow, ...] = ()
    weights: tuple[FactRow, ...] = ()
    batches: tuple[BatchRow, ...] = ()
    speed: tuple[SpeedRow, ...] = ()
    roofline: Roofline | None = None
    shadow: tuple[FactRow, ...] = ()
    kernels: Mapping[str, int] = field(default_factory=dict[str, int])
    lineage: tuple[LineageRow, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    machine: Mapping[str, str] = field(default_factory=dict[str, str])


def flat_metrics(data: ReportData) -> dict[str, float]:
    """Every number of the report under a dotted name, for an MLflow run; what is not finite or absent is left out.

    A missing number is visible there as a missing name and in the report as "not measured"; MLflow would store
    NaN as 0.
    """
    return {name: float(value) for name, value in _numbers(data) if value is not None and math.isfinite(value)}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested recipe as dotted names and plain text.

    >>> flatten({"gate": {"max_kl": 0.03}, "tasks": ["piqa", "sciq"], "rules": [{"bits": 4}]})
    {'gate.max_kl': '0.03', 'tasks': 'piqa, sciq', 'rules.0.bits': '4'}
    """
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
            flat |= flatten({str(i): part for i, part in enumerate(value)}, f"{name}.")
        elif isinstance(value, list | tuple):
            flat[name] = ", ".join(str(part) for part in value)
        else:
            flat[name] = str(value)
    return flat


def _numbers(data: ReportData) -> Iterator[tuple[str, float | None]]:
    for name, value in data.verdict.metrics().items():
        yield f"verdict.{name}", value
    for part in data.verdict.slices:
        yield f"accuracy.{part.task}.baseline", part.baseline_accuracy
        yield f"accuracy.{part.task}.candidate", part.candidate_accuracy
        yield f"accuracy.{part.task}.difference", part.difference
    if data.divergence:
        yield "kl.mean", data.divergence.mean
        yield "kl.upper", data.divergence.upper
    for batch in data.batches:
        yield f"decode.batch_{batch.batch}.baseline_tokens_s", batch.baseline_tokens_s
        yield f"decode.batch_{batch.batch}.candidate_tokens_s", batch.candidate_tokens_s
        yield f"decode.batch_{batch.batch}.baseline_itl_ms", batch.baseline_itl_ms
        yield f"decode.batch_{batch.batch}.candidate_itl_ms", batch.candidate_itl_ms
    for row in data.speed:
        yield f"speed.{row.name}.baseline", row.baseline
        yield f"speed.{row.name}.candidate", row.candidate
    if data.roofline:
        yield "roofline.bandwidth_gb_s", data.roofline.bandwidth_gb_s
        yield "roofline.baseline_share", data.roofline.baseline_share
        yield "roofline.candidate_share", data.roofline.candidate_share
    for prefix, facts in (("weights", data.weights), ("shadow", data.shadow)):
        for fact in facts:
            if not isinstance(fact.value, str):
                yield f"{prefix}.{fact.name}", fact.value
