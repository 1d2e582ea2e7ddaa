"""Evidence: all the gate may look at, gathered in one frozen value. Which of it is refused says evals/soundness.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from evals.reports import (
    EvalReport,
    ParityItem,
    ParityReport,
    ShadowItem,
    ShadowReport,
    SpeedSample,
    TaskItem,
    TextItem,
    read_items,
)
from tapeout.artifact import Artifact, Frozen, Record, load

Item = TypeVar("Item", bound=Frozen)
Report = TypeVar("Report", bound=Record)


class SpeedSummary(Frozen):
    """What a benchmark says to the gate: which bundles (digests) it timed, and the samples.

    ``batches``: at which the recipe wants decoding timed. Prefill is timed once, one prompt at a time.
    """

    baseline: str
    candidate: str
    batches: tuple[int, ...]
    samples: tuple[SpeedSample, ...]


class ProofSummary(Frozen):
    """Proof of quantization of the QuantizedModel with digest ``quantized``; ``reasons`` say why it is not ok."""

    quantized: str
    ok: bool
    reasons: tuple[str, ...]
    bits_per_weight: float


@dataclass(frozen=True)
class Evidence:
    """``digests`` maps the noun of every report given to its digest. Reports are None only if nothing was executed."""

    baseline: str  # bundle digests
    candidate: str
    quantized: str  # digest of the QuantizedModel the candidate was built from
    target: str  # hardware the candidate was built for, such as "sm89" or a CPU's fingerprint
    executed_on: str | None  # the hardware it ran on; None: compiled only
    proof: ProofSummary
    quality: EvalReport | None = None
    task_items: tuple[TaskItem, ...] = ()
    text_items: tuple[TextItem, ...] = ()
    shadow: ShadowReport | None = None
    shadow_items: tuple[ShadowItem, ...] = ()
    parity: ParityReport | None = None
    parity_items: tuple[ParityItem, ...] = ()
    speed: SpeedSummary | None = None
    digests: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def reports(self) -> dict[str, EvalReport | ShadowReport | ParityReport | SpeedSummary | None]:
        """By noun; None for what is missing."""
        return {
            "EvalReport": self.quality,
            "ShadowReport": self.shadow,
            "ParityReport": self.parity,
            "Benchmark": self.speed,
        }

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(noun for noun, report in self.reports.items() if report is None)


def load_evidence(
    *,
    baseline: str,
    candidate: str,
    quantized: str,
    target: str,
    executed_on: str | None,
    proof: ProofSummary,
    speed: SpeedSummary | None,
    digests: Mapping[str, str],
    evaluation: Path | None,
    shadow: Path | None,
    parity: Path | None,
) -> Evidence:
    """Read the reports' folders, hashing every file again. A folder that is not given is missing evidence.

    ``digests``: of the nouns read by the caller (``Benchmark``, ``QuantizedModel``).
    """
    quality_report = _report(evaluation, EvalReport)
    shadow_report = _report(shadow, ShadowReport)
    parity_report = _report(parity, ParityReport)
    given = [report for report in (quality_report, shadow_report, parity_report) if report]
    return Evidence(
        baseline=baseline,
        candidate=candidate,
        quantized=quantized,
        target=target,
        executed_on=executed_on,
        proof=proof,
        quality=quality_report.record if quality_report else None,
        task_items=_items(quality_report, "task_items.jsonl", TaskItem),
        text_items=_items(quality_report, "text_items.jsonl", TextItem),
        shadow=shadow_report.record if shadow_report else None,
        shadow_items=_items(shadow_report, "shadow_items.jsonl", ShadowItem),
        parity=parity_report.record if parity_report else None,
        parity_items=_items(parity_report, "parity_items.jsonl", ParityItem),
        speed=speed,
        digests={**digests, **{report.record.noun: report.digest for report in given}},
    )


def _report(folder: Path | None, noun: type[Report]) -> Artifact[Report] | None:
    if folder is None:
        return None
    report = load(folder, noun)
    report.verify()
    return report


def _items(report: Artifact[Report] | None, name: str, kind: type[Item]) -> tuple[Item, ...]:
    return read_items(report.folder / name, kind) if report else ()
