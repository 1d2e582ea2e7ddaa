"""Emulated: kernels of hardware that is not here, run on the processor, against the float engine run likewise.

It shows what the kernels compute, on a few held-out documents. It cannot show what the hardware does, so it decides
nothing: a verdict about an engine that was not executed on its hardware stays INCONCLUSIVE.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from evals.block import QUALITY, Block, FactRow, Rows, fact_metrics
from evals.check import Fact, Findings, JudgedVerdict
from evals.items import read_items
from evals.kind import Bounds, Evidence, EvidenceKind, Report
from evals.kinds.text import TextItem, text_problems
from evals.rules import counted
from tapeout.artifact import ParentTypes, Record, load_record

TITLES = {
    "kl": "mean KL of the emulated engine, nats",
    "top_token": "same top token, emulated engine",
    "perplexity_ratio": "perplexity, emulated engine / baseline",
}


class EmulatedReport(Record):
    """Means over every predicted position of the documents. ``reason``: why the engines were not executed."""

    artifact_type: ClassVar[str] = "EmulatedReport"
    remedy: ClassVar[str] = "run `dvc repro evaluate`"
    parent_types: ClassVar[ParentTypes] = {"baseline": ("EngineBundle",), "candidate": ("EngineBundle",)}

    baseline: str  # bundle digests
    candidate: str
    reason: str
    documents: int
    tokens: int
    kl: float  # nats
    top_token: float
    perplexity_ratio: float  # candidate / baseline


class EmulatedKind(EvidenceKind[EmulatedReport, TextItem, Bounds]):
    order, name, folder, needed = 85, "emulated", "evaluation", "never"
    artifact_types, items_file = ("EmulatedReport",), "text_items.jsonl"
    report, item, bounds = EmulatedReport, TextItem, Bounds

    def problems(self, report: Report[EmulatedReport, TextItem], evidence: Evidence) -> list[str]:
        claimed = counted("EmulatedReport", "text items", len(report.items), report.record.documents)
        return claimed + text_problems(report.items)

    def judge(self, report: Report[EmulatedReport, TextItem], evidence: Evidence, bounds: Bounds) -> Findings:
        facts = (
            Fact(name=f"emulated_{name}", title=title, value=getattr(report.record, name))
            for name, title in TITLES.items()
        )
        return Findings(facts=tuple(facts))

    def block(self, folder: Path, verdict: JudgedVerdict) -> Block:
        found = load_record(folder, EmulatedReport).record
        means = sorted(item.kl_sum / item.tokens for item in read_items(folder / self.items_file, TextItem))
        facts = (
            FactRow("documents", "Held-out documents", found.documents, note="run on the processor"),
            FactRow("tokens", "Tokens of them", found.tokens),
            *(FactRow(name, title.capitalize(), getattr(found, name)) for name, title in TITLES.items()),
        )
        shares = tuple((kl, (number + 1) / len(means)) for number, kl in enumerate(means))
        return Block(
            QUALITY,
            "Emulated, not executed",
            facts=facts,
            metrics=fact_metrics("emulated", facts),
            plots={"kl.csv": Rows(("kl", "share_of_documents"), shares)},
        )


KIND = EmulatedKind()
