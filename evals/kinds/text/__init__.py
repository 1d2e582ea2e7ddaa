"""Text: perplexity, KL and top-token agreement of both engines on held-out documents.

It is measured in one stage with the tasks (``evals/kinds/text/measure.py``), and its items lie in the same report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from evals.block import QUALITY, Block, Divergence, Rows
from evals.check import Findings, JudgedVerdict
from evals.items import read_items
from evals.kind import Bounds, CountTexts, Evidence, EvidenceKind, Report
from evals.kinds.tasks import EvalReport
from evals.limits import at_most
from evals.rules import (
    Rule,
    broken,
    copies,
    counted,
    differing,
    mean_above_largest,
    same_numbers,
    short,
    sum_of_nats,
    token_rules,
)
from tapeout.artifact import Frozen
from tapeout.errors import EvidenceError, SourceError
from tapeout.progress import ProgressBar
from tapeout.recipe import BaseRecipe, Count, Section

if TYPE_CHECKING:
    from engines.sequences import Sequences


RANGE_TOKENS = 256


class TextItem(Frozen):
    """One held-out document scored by both engines; the document is the cluster of the statistics.

    ``kl_sum``: summed KL(baseline || candidate) in nats over ``tokens`` predicted positions.
    ``nll``: summed negative log-likelihood in nats of the document's own next tokens.
    ``ranges``: mean KL in nats over each of equal ranges of about ``RANGE_TOKENS`` positions.
    ``long``: it fills every position of the engines. Such documents are too few and too large to be clusters.
    """

    doc_hash: str
    tokens: int
    kl_sum: float
    kl_max: float
    agree: int  # positions where both engines rank the same token first
    baseline_nll: float
    candidate_nll: float
    ranges: tuple[float, ...]
    long: bool = False


class HeldOutSettings(Section):
    documents: Count = 300  # one in a hundred is in such a sample with 95 %
    document_tokens: Count = 96
    long_documents: Count = 2  # joined from the others, as long as the engines have positions


class TextBounds(Bounds):
    min_text_documents: Count = 300
    max_kl: float = Field(default=0.03, gt=0, le=1)
    min_top_token: float = Field(default=0.91, ge=0.5, lt=1)
    max_perplexity_ratio: float = Field(default=1.05, gt=1, le=2)
    max_document_kl: float = Field(default=0.1, gt=0, le=2)  # of the worst range of positions of any document


class TextKind(EvidenceKind[EvalReport, TextItem, TextBounds]):
    order, name, folder = 40, "text", "evaluation"
    artifact_types, items_file = ("EvalReport",), "text_items.jsonl"
    sections: ClassVar = {"evaluate": HeldOutSettings}
    report, item, bounds = EvalReport, TextItem, TextBounds
    absent = Block(QUALITY, missing="No held-out text was scored.")

    def conflicts(self, recipe: BaseRecipe) -> list[str]:
        return recipe.too_long({"evaluate.document_tokens": recipe.section(HeldOutSettings).document_tokens})

    def check_data(self, recipe: BaseRecipe, data: Path, count: CountTexts) -> None:
        asked, documents = recipe.calibrate, recipe.section(HeldOutSettings).documents
        texts = count(asked.dataset, asked.column)
        if texts < asked.samples + documents:
            raise SourceError(
                f"{asked.dataset}.{asked.column} has {texts} different texts",
                expected=f"{asked.samples} to calibrate on and {documents} others to evaluate on",
                remedy="lower calibrate.samples or evaluate.documents, or choose a larger calibrate.dataset",
            )

    def deviations(self, report: Report[EvalReport, TextItem], recipe: BaseRecipe) -> list[str]:
        documents = sum(not item.long for item in report.items)
        return differing("EvalReport", {"documents": (documents, recipe.section(HeldOutSettings).documents)})

    def problems(self, report: Report[EvalReport, TextItem], evidence: Evidence) -> list[str]:
        return [
            *counted("EvalReport", "text items", len(report.items), report.record.documents),
            *text_problems(report.items),
            *_too_short(report),
        ]

    def judge(self, report: Report[EvalReport, TextItem], evidence: Evidence, bounds: TextBounds) -> Findings:
        from evals.conditions import Condition, divergence_checks, perplexity_check

        items, highest = [item for item in report.items if not item.long], bounds.max_perplexity_ratio
        minimum = bounds.min_text_documents
        condition = partial(Condition, units="documents", minimum=minimum, confidence=bounds.confidence)
        tokens = [item.tokens for item in items]
        baseline, candidate = ([item.baseline_nll for item in items], [item.candidate_nll for item in items])
        return Findings(
            (
                *divergence_checks(
                    items,
                    tokens,
                    condition("kl", "mean KL on held-out text, nats", "at_most", bounds.max_kl),
                    condition("top_token", "same top token on held-out text", "at_least", bounds.min_top_token),
                ),
                perplexity_check(
                    baseline,
                    candidate,
                    tokens,
                    condition("perplexity", "perplexity, candidate / baseline", "at_most", highest),
                ),
                at_most(
                    "document_kl",
                    "mean KL on the worst range of positions of a document, nats",
                    dict(_ranges(report.items)),
                    bounds.max_document_kl,
                    "ranges",
                ),
            )
        )

    def block(self, folder: Path, verdict: JudgedVerdict) -> Block | None:
        kl = verdict.check("kl")
        if kl.value is None or kl.upper is None or kl.bound is None:
            return self.absent
        items = read_items(folder / self.items_file, TextItem)
        means = tuple(item.kl_sum / item.tokens for item in items if not item.long)
        return divergence_block(Divergence(means, kl.value, kl.upper, kl.bound))


TEXT_RULES: tuple[Rule[TextItem], ...] = (
    *token_rules(lambda item: item.tokens),
    (
        "have a non-finite or negative log-likelihood",
        lambda i: not all(sum_of_nats(nll, i.tokens) for nll in (i.baseline_nll, i.candidate_nll)),
    ),
    ("have a mean KL above their largest", mean_above_largest),
    (
        "have ranges that do not give their mean KL",
        lambda i: (
            not (i.ranges and max(i.ranges) >= i.kl_sum / max(i.tokens, 1) - 1e-6 and math.isfinite(sum(i.ranges)))
        ),
    ),
)


def _too_short(report: Report[EvalReport, TextItem]) -> list[str]:
    longest, positions = max((i.tokens for i in report.items if i.long), default=0), report.record.max_tokens
    return [f"EvalReport scores {longest} positions of a long document, of {positions}"] if longest < positions else []


def _ranges(items: Sequence[TextItem]) -> Iterator[tuple[str, float]]:
    for item in items:
        for number, kl in enumerate(item.ranges):
            first, last = (item.tokens * n // len(item.ranges) for n in (number, number + 1))
            yield f"positions {first} to {last} of document {short(item.doc_hash)}", kl


def text_problems(items: tuple[TextItem, ...]) -> list[str]:
    problems = broken("text item", items, lambda i: i.doc_hash, TEXT_RULES, key="document")
    return problems + copies("text item", items, lambda i: i.doc_hash, lambda i: same_numbers(i.kl_sum, i.baseline_nll))


def divergence_block(kl: Divergence) -> Block:
    documents = sorted(kl.documents)
    shares = tuple((value, (i + 1) / len(documents)) for i, value in enumerate(documents))
    return Block(
        QUALITY,
        charts={"kl": kl},
        metrics={"kl.mean": kl.mean, "kl.upper": kl.upper},
        plots={"kl.csv": Rows(("kl", "share_of_documents"), shares)},
    )


def text_items(
    baseline: Sequences, candidate: Sequences, documents: Sequence[Sequence[int]], *, long: bool = False
) -> list[TextItem]:
    """Score held-out documents (token ids, at least two each), one at a time, through both engines."""
    import numpy as np

    from evals.text import compare, token_hash

    items: list[TextItem] = []
    for number, tokens in enumerate(ProgressBar(documents, title="held-out text", unit="document")):
        if len(tokens) < 2:
            raise EvidenceError(
                f"held-out document {number} has {len(tokens)} token(s)",
                expected="at least 2: one to read and one to predict",
                remedy="choose longer documents",
            )
        result = compare(baseline, candidate, tokens)
        items.append(
            TextItem(
                doc_hash=token_hash(tokens),
                tokens=len(result.kl),
                kl_sum=float(result.kl.sum()),
                kl_max=float(result.kl.max()),
                agree=int(result.agree.sum()),
                baseline_nll=float(result.baseline_nll.sum()),
                candidate_nll=float(result.candidate_nll.sum()),
                ranges=tuple(
                    float(part.mean())
                    for part in np.array_split(result.kl, max(1, round(len(result.kl) / RANGE_TOKENS)))
                ),
                long=long,
            )
        )
    return items


def text_metrics(items: Sequence[TextItem]) -> dict[str, float]:
    """Means over all predicted positions: KL in nats, top-token agreement, perplexities and their ratio."""
    items = [item for item in items if not item.long]
    metrics: dict[str, float] = {"documents": len(items)}
    if not items:
        return metrics
    tokens = sum(item.tokens for item in items)
    baseline_nll = sum(item.baseline_nll for item in items) / tokens
    candidate_nll = sum(item.candidate_nll for item in items) / tokens
    return metrics | {
        "kl_mean": sum(item.kl_sum for item in items) / tokens,
        "kl_max": max(item.kl_max for item in items),
        "top_token_agreement": sum(item.agree for item in items) / tokens,
        "baseline_perplexity": math.exp(baseline_nll),
        "candidate_perplexity": math.exp(candidate_nll),
        "perplexity_ratio": math.exp(candidate_nll - baseline_nll),
    }


KIND = TextKind()
