"""Measures portable evidence (evals/kinds/portable/), and judges an engine that was only compiled by it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.bundle import EngineBundle, LoweredGraph, PortableEvidence
from engines.sequences import Sequences
from evals.gate import gate
from evals.items import read_items
from evals.kind import Bounds, Evidence, Report
from evals.kinds import portable, proof
from evals.kinds.portable import PortableReport
from evals.kinds.proof import ProofSummary
from evals.kinds.text import TextItem, text_items, text_metrics
from evals.verdict import Verdict
from tapeout.artifact import Artifact, Parents
from tapeout.errors import EvidenceError


def portable_report(
    baseline: Sequences,
    lowered: Sequences,
    documents: Sequence[Sequence[int]],
    folder: Path,
    *,
    parents: Parents,
) -> Artifact[PortableReport]:
    """Compare on held-out ``documents`` (token ids) and write the report. :class:`EvidenceError` without documents."""
    if not documents:
        raise EvidenceError("no documents to compare", expected="at least one", remedy="raise --documents")
    items = text_items(baseline, lowered, documents)
    means = text_metrics(items)
    record = PortableReport(
        built_from=lowered.digest,
        baseline=baseline.digest,
        documents=len(items),
        tokens=sum(item.tokens for item in items),
        kl=means["kl_mean"],
        top_token=means["top_token_agreement"],
        perplexity_ratio=means["perplexity_ratio"],
    )
    return portable.KIND.write(folder, record, parents=parents, items=items)


def recorded(report: Artifact[PortableReport]) -> PortableEvidence:
    """The report in short, as the bundle's record holds it."""
    shared = PortableEvidence.model_fields.keys() - {"report"}
    return PortableEvidence(report=report.digest, **report.record.model_dump(include=shared))


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
        hardware=bundle.record.hardware,
        reports={
            proof.KIND.name: Report(lowered.ref, summary),
            portable.KIND.name: Report(report.ref, report.record, items),
        },
    )
    return gate(evidence, bounds, folder)


def _unproven(lowered: LoweredGraph) -> tuple[str, ...]:
    """Linears inside the layers that are not in the precision the bundle is named after.

    16-bit builds claim none, and a plan's are compared with the plan when the graph is lowered.
    """
    if lowered.precision != "int4":
        return ()
    left = sorted(name for name, how in lowered.plan.items() if lowered.precision not in how and name != "lm_head")
    return (f"{len(left)} linears are not in {lowered.precision}: {', '.join(left[:3])}",) if left else ()
