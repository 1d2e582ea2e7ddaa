"""What the HTML report, the plots and the MLflow run show: plain rows, filled from the artifacts by the stages.

Plain numbers only, so that the report can be drawn, tested and compared without any engine. The rows of evidence are
blocks (evals/block.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from evals.block import Block
from evals.verdict import Verdict
from quantization.frontier import Frontier


@dataclass(frozen=True)
class Planned:
    """The precision plan: a summary, one row per unit and, where the plan was chosen, its frontier."""

    summary: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    frontier: Frontier | None = None


@dataclass(frozen=True)
class LayerRow:
    """One linear of the plan: its scheme and its relative output error, rounded to nearest and as kept.

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
class LineageRow:
    """One artifact: where it lies, its digest, the digests of what it was made from, and library versions."""

    artifact_type: str
    folder: str
    digest: str
    parents: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class ReportData:
    """Everything the report shows. ``blocks``: what each kind of evidence shows, in their order."""

    model_name: str
    verdict: Verdict
    blocks: tuple[Block, ...] = ()
    plan: Planned | None = None
    layers: tuple[LayerRow, ...] = ()
    notes: tuple[str, ...] = ()  # of the quantize stage
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
    for block in data.blocks:
        yield from block.metrics.items()
