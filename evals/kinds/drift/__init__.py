"""Drift: how far live traffic is from the calibration samples. No verdict has it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from evals.block import Block, FactRow, fact_metrics
from evals.check import JudgedVerdict
from evals.kind import Bounds, EvidenceKind
from evals.kinds.online import LIVE
from tapeout.artifact import Frozen, ParentTypes, Record, load
from tapeout.recipe import Count, Section

MOST_P = 0.01  # of a permutation test, for what is called drift


class DriftSettings(Section):
    """Section ``drift`` of a recipe: what counts as drift."""

    max_lengths: float = Field(default=0.25, gt=0)  # Wasserstein distance, as a share of the mean calibration length
    max_tokens: float = Field(default=0.2, gt=0, le=1)  # Jensen-Shannon distance of token histograms
    # At 0.0016 the KL of an int8 cache to one of floats was 2.3 times that of the calibrated scales (docs/online.md).
    max_kv_clipped: float = Field(default=0.001, gt=0, le=1)  # share of values beyond that of the calibration samples
    # At 0.0008 the KL to the float model was 3.5 times that of the calibrated scales, at 0.0002 1.3 times.
    max_activations_clipped: float = Field(default=0.0005, gt=0, le=1)  # the same of linears with static int8 inputs
    min_exchanges: Count = 100
    exchanges: Count = 1000  # that are compared at most: the latest


class Distance(Frozen):
    """``value``: without what samples of this size differ by anyway. ``p_value``: of a permutation test."""

    name: str
    title: str
    value: float
    p_value: float
    bound: float

    @property
    def drifted(self) -> bool:
        return self.value > self.bound and self.p_value <= MOST_P


class DriftReport(Record):
    """``live``: hash of the token ids that were compared, in order."""

    artifact_type: ClassVar[str] = "DriftReport"
    remedy: ClassVar[str] = "run `tapeout drift`"
    schema_version: ClassVar[int] = 1
    parent_types: ClassVar[ParentTypes] = {"calibration": ("Calibration",)}

    exchanges: int
    samples: int
    live: str
    enough: bool  # exchanges, by the recipe
    distances: tuple[Distance, ...]

    @property
    def recalibrate(self) -> bool:
        return self.enough and any(distance.drifted for distance in self.distances)

    @property
    def advice(self) -> str:
        if not self.enough:
            return f"{self.exchanges} exchanges are too few to tell"
        drifted = [distance.title for distance in self.distances if distance.drifted]
        if not drifted:
            return "live traffic is like the calibration samples"
        return f"recalibrate: {' and '.join(drifted)} drifted"


class DriftKind(EvidenceKind[DriftReport, Frozen, Bounds]):
    order, name, folder, needed = 91, "drift", "drift", "never"
    artifact_types = ("DriftReport",)
    report, item, bounds = DriftReport, Frozen, Bounds

    def block(self, folder: Path, verdict: JudgedVerdict) -> Block:
        found = load(folder, DriftReport).record
        facts = (
            FactRow("advice", "Advice", found.advice, note=f"{found.exchanges} exchanges, {found.samples} samples"),
            *(
                FactRow(d.name, d.title.capitalize(), d.value, note=f"at most {d.bound:g}; p = {d.p_value:.3g}")
                for d in found.distances
            ),
        )
        return Block(LIVE, "DriftKind from the calibration samples", facts=facts, metrics=fact_metrics("drift", facts))


KIND = DriftKind()
