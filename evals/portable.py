"""Portable evidence: a lowered graph, precision and all, against the float engine, with none of the target's hardware.

It shows what lowering and precision do to the answers. It cannot show what a compiler makes of the graph, so it never
stands in for a run on the target: a verdict about an engine that was only compiled stays INCONCLUSIVE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from engines.bundle import EngineBundle, PortableEvidence
from engines.lowered import LoweredGraph
from engines.protocol import Engine
from evals.evidence import Evidence, ProofSummary
from evals.gate import gate
from evals.reports import write_items
from evals.text import text_items
from evals.verdict import Verdict
from tapeout import artifact
from tapeout.artifact import Artifact, Record
from tapeout.errors import EvidenceError
from tapeout.recipe import Gate

ITEMS_FILE = "text_items.jsonl"


class PortableReport(Record):
    """Means over every predicted position of the documents; the items lie in ``text_items.jsonl``."""

    noun: ClassVar[str] = "PortableReport"
    remedy: ClassVar[str] = "run `tapeout build`"

    lowered: str  # digest of the LoweredGraph that was run on ONNX Runtime's CPU kernels
    baseline: str  # digest of the float engine it was compared with
    documents: int
    tokens: int
    kl: float  # nats
    top_token: float
    perplexity_ratio: float  # lowered / baseline


def portable_report(
    baseline: Engine,
    lowered: Engine,
    documents: Sequence[Sequence[int]],
    folder: Path,
    *,
    parents: Mapping[str, str],
) -> Artifact[PortableReport]:
    """Compare on held-out ``documents`` (token ids) and write the report. :class:`EvidenceError` without documents."""
    if not documents:
        raise EvidenceError("no documents to compare", expected="at least one", remedy="raise --documents")
    items = text_items(baseline, lowered, documents)
    tokens = sum(item.tokens for item in items)
    drift = sum(item.candidate_nll - item.baseline_nll for item in items) / tokens
    with artifact.create(folder, PortableReport) as draft:
        write_items(draft.folder / ITEMS_FILE, items)
        record = PortableReport(
            lowered=lowered.digest,
            baseline=baseline.digest,
            documents=len(items),
            tokens=tokens,
            kl=sum(item.kl_sum for item in items) / tokens,
            top_token=sum(item.agree for item in items) / tokens,
            perplexity_ratio=float(np.exp(drift)),
        )
        draft.finish(record, parents=parents)
    return artifact.load(folder, PortableReport)


def recorded(report: Artifact[PortableReport]) -> PortableEvidence:
    """The report in short, as the bundle's record holds it."""
    found = report.record
    return PortableEvidence(
        report=report.digest,
        documents=found.documents,
        tokens=found.tokens,
        kl=found.kl,
        top_token=found.top_token,
        perplexity_ratio=found.perplexity_ratio,
    )


def portable_verdict(
    lowered: Artifact[LoweredGraph],
    bundle: Artifact[EngineBundle],
    report: Artifact[PortableReport],
    bounds: Gate,
    folder: Path,
) -> Artifact[Verdict]:
    """The gate's verdict on a compiled engine without evidence from its hardware: at best INCONCLUSIVE.

    The candidate was built from the QuantizedModel among its parents; a 16-bit or FP8 build has none, and what it was
    built from is the lowered graph itself.
    """
    compiled = bundle.record.compiled
    assert compiled is not None
    reasons = _unproven(lowered.record)
    quantized = lowered.parents.get("QuantizedModel", lowered.digest)
    evidence = Evidence(
        baseline=report.record.baseline,
        candidate=bundle.digest,
        quantized=quantized,
        target=compiled.capability,
        executed_on=compiled.executed_on,
        proof=ProofSummary(
            quantized=quantized, ok=not reasons, reasons=reasons, bits_per_weight=lowered.record.bits_per_weight
        ),
        digests={"QuantizedModel": quantized, "LoweredGraph": lowered.digest, "PortableReport": report.digest},
    )
    return gate(evidence, bounds, folder)


def _unproven(lowered: LoweredGraph) -> tuple[str, ...]:
    """Linears inside the layers that are not in the precision the bundle is named after; 16-bit builds claim none."""
    if lowered.precision in ("fp16", "bf16"):
        return ()
    left = sorted(name for name, how in lowered.plan.items() if lowered.precision not in how and name != "lm_head")
    return (f"{len(left)} linears are not in {lowered.precision}: {', '.join(left[:3])}",) if left else ()
