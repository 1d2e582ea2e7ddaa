"""Measures portable evidence (evals/kinds/portable.py), and judges an engine that was only compiled by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from engines.bundle import EngineBundle, PortableEvidence
from engines.lowered import LoweredGraph
from engines.protocol import Engine
from evals.gate import gate
from evals.items import read_items, write_items
from evals.kind import Bounds, Evidence, Report
from evals.kinds import portable, proof
from evals.kinds.portable import PortableReport
from evals.kinds.proof import ProofSummary
from evals.kinds.text import TextItem, text_items
from evals.verdict import Verdict
from tapeout import artifact
from tapeout.artifact import Artifact, Parents
from tapeout.errors import EvidenceError


def portable_report(
    baseline: Engine,
    lowered: Engine,
    documents: Sequence[Sequence[int]],
    folder: Path,
    *,
    parents: Parents,
) -> Artifact[PortableReport]:
    """Compare on held-out ``documents`` (token ids) and write the report. :class:`EvidenceError` without documents."""
    if not documents:
        raise EvidenceError("no documents to compare", expected="at least one", remedy="raise --documents")
    items = text_items(baseline, lowered, documents)
    tokens = sum(item.tokens for item in items)
    drift = sum(item.candidate_nll - item.baseline_nll for item in items) / tokens
    with artifact.create(folder, PortableReport) as draft:
        write_items(draft.folder / portable.KIND.items_file, items)
        record = PortableReport(
            built_from=lowered.digest,
            baseline=baseline.digest,
            documents=len(items),
            tokens=tokens,
            kl=sum(item.kl_sum for item in items) / tokens,
            top_token=sum(item.agree for item in items) / tokens,
            perplexity_ratio=math.exp(drift),
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
    bounds: Bounds,
    folder: Path,
) -> Artifact[Verdict]:
    """The gate's verdict on a compiled engine without evidence from its hardware: at best INCONCLUSIVE."""
    compiled, graph = bundle.record.compiled, lowered.record
    assert compiled is not None
    reasons = _unproven(graph)
    summary = ProofSummary(ok=not reasons, reasons=reasons, bits_per_weight=graph.bits_per_weight)
    items = read_items(report.folder / portable.KIND.items_file, TextItem)
    evidence = Evidence(
        baseline=report.record.baseline,
        candidate=bundle.digest,
        built_from=lowered.ref,
        target=compiled.capability,
        fingerprint=bundle.record.fingerprint,
        reports={
            proof.KIND.name: Report(lowered.ref, summary),
            portable.KIND.name: Report(report.ref, report.record, items),
        },
    )
    return gate(evidence, bounds, folder)


def _unproven(lowered: LoweredGraph) -> tuple[str, ...]:
    """Linears inside the layers that are not in the precision the bundle is named after; 16-bit builds claim none."""
    if lowered.precision not in ("int4", "fp8"):
        return ()
    left = sorted(name for name, how in lowered.plan.items() if lowered.precision not in how and name != "lm_head")
    return (f"{len(left)} linears are not in {lowered.precision}: {', '.join(left[:3])}",) if left else ()
