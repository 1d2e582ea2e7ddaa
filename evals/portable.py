"""Portable evidence: a lowered graph, precision and all, against the float engine, with none of the target's hardware.

It shows what lowering and precision do to the answers. It cannot show what a compiler makes of the graph, so it never
stands in for a run on the target: a verdict about an engine that was only compiled stays INCONCLUSIVE.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from engines.protocol import Engine
from evals.reports import write_items
from evals.text import text_items
from tapeout import artifact
from tapeout.artifact import Artifact, Parents, Record, Roles
from tapeout.errors import EvidenceError

ITEMS_FILE = "text_items.jsonl"


class PortableReport(Record):
    """Means over every predicted position of the documents; the items lie in ``text_items.jsonl``."""

    noun: ClassVar[str] = "PortableReport"
    remedy: ClassVar[str] = "run `tapeout build`"
    parent_roles: ClassVar[Roles] = {"baseline": ("EngineBundle",), "lowered": ("LoweredGraph",)}

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
    parents: Parents,
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
