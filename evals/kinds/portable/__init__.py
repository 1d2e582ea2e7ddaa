"""Portable: a lowered graph, precision and all, against the float engine, without the target's hardware.

It shows what lowering and precision do to the answers. It cannot show what a compiler makes of the graph, so it decides
nothing: a verdict about an engine that was only compiled stays INCONCLUSIVE. ``evals/portable.py`` measures it.
"""

from __future__ import annotations

from typing import ClassVar

from evals.check import Fact, Findings
from evals.kind import Bounds, Evidence, EvidenceKind, Report
from evals.kinds.text import TextItem, text_problems
from evals.rules import counted
from tapeout.artifact import ParentTypes, Record


class PortableReport(Record):
    """Means over every predicted position of the documents; the items lie in ``text_items.jsonl``."""

    artifact_type: ClassVar[str] = "PortableReport"
    remedy: ClassVar[str] = "run `tapeout build`"
    schema_version: ClassVar[int] = 3
    parent_types: ClassVar[ParentTypes] = {"baseline": ("EngineBundle",), "lowered": ("LoweredGraph",)}

    built_from: str  # digest of the LoweredGraph that was run on ONNX Runtime's CPU kernels
    baseline: str  # digest of the float engine it was compared with
    documents: int
    tokens: int
    kl: float  # nats
    top_token: float
    perplexity_ratio: float  # lowered / baseline


class PortableKind(EvidenceKind[PortableReport, TextItem, Bounds]):
    order, name, folder, needed = 80, "portable", "portable", "never"
    artifact_types, items_file = ("PortableReport",), "text_items.jsonl"
    report, item, bounds = PortableReport, TextItem, Bounds

    def problems(self, report: Report[PortableReport, TextItem], evidence: Evidence) -> list[str]:
        claimed = counted("PortableReport", "text items", len(report.items), report.record.documents)
        return claimed + text_problems(report.items)

    def judge(self, report: Report[PortableReport, TextItem], evidence: Evidence, bounds: Bounds) -> Findings:
        found = report.record
        facts = {
            "portable_kl": ("mean KL of the lowered graph on a CPU, nats", found.kl),
            "portable_top_token": ("same top token, lowered graph on a CPU", found.top_token),
            "portable_perplexity_ratio": ("perplexity, lowered graph on a CPU / baseline", found.perplexity_ratio),
        }
        return Findings(facts=tuple(Fact(name=n, title=title, value=value) for n, (title, value) in facts.items()))


KIND = PortableKind()
