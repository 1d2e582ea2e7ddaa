"""Parity: the engine against the quantized torch model that it was built from (``evals/parity.py`` measures it)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from evals.check import Check, Findings, Outcome
from evals.kind import DocumentBounds, Evidence, EvidenceRecord, Kind, Report
from evals.kinds.text import TextSettings
from evals.rules import Rule, broken, copies, counted, differing, mean_above_largest, same_numbers, token_rules
from tapeout.artifact import Frozen, Roles
from tapeout.recipe import Count, Recipe, Section

if TYPE_CHECKING:
    from evals.conditions import Condition


class ParityItem(Frozen):
    """One document scored by the engine and by the quantized torch model it was built from.

    ``kl_sum``, ``kl_max`` and ``agree`` are of logits with every linear locked to the engine's output, ``worst_error``
    is the largest relative error among those linears, of ``worst_linear``. ``free_*`` are of both running freely.
    """

    doc_hash: str
    tokens: int
    kl_sum: float
    kl_max: float
    agree: int
    worst_error: float
    worst_linear: str
    free_kl_sum: float
    free_agree: int


class ParityReport(EvidenceRecord):
    noun: ClassVar[str] = "ParityReport"
    remedy: ClassVar[str] = "run `dvc repro parity`"
    schema_version: ClassVar[int] = 3
    parent_roles: ClassVar[Roles] = {"candidate": ("EngineBundle",), "quantized": ("QuantizedModel",)}

    candidate: str
    built_from: str  # digest of the QuantizedModel
    documents: int


class ParitySettings(Section):
    parity_documents: Count = 32  # of the documents of held-out text


class ParityBounds(DocumentBounds):
    max_parity_kl: float = Field(default=1e-3, gt=0, le=0.1)
    min_parity_top_token: float = Field(default=0.995, ge=0.9, lt=1)
    max_parity_error: float = Field(default=0.01, gt=0, le=0.5)  # relative, of any one linear on any document


class Parity(Kind[ParityReport, ParityItem, ParityBounds]):
    order, name, role, stage = 60, "parity", "parity", "parity"
    verb = "evals.parity"
    nouns, items_file = ("ParityReport",), "parity_items.jsonl"
    sections: ClassVar = {"evaluate": ParitySettings}
    report, item, bounds = ParityReport, ParityItem, ParityBounds

    def conflicts(self, recipe: Recipe) -> list[str]:
        wanted, there = recipe.section(ParitySettings).parity_documents, recipe.section(TextSettings).documents
        return [f"evaluate.parity_documents is {wanted} of {there} documents"] if wanted > there else []

    def deviations(self, report: Report[ParityReport, ParityItem], recipe: Recipe) -> list[str]:
        asked = recipe.section(ParitySettings).parity_documents
        return differing("ParityReport", {"documents": (report.record.documents, asked)})

    def problems(self, report: Report[ParityReport, ParityItem], evidence: Evidence) -> list[str]:
        return [
            *counted("ParityReport", "documents", len(report.items), report.record.documents),
            *broken("parity item", report.items, lambda i: i.doc_hash, RULES, key="parity document"),
            *copies("parity item", report.items, lambda i: i.doc_hash, lambda i: same_numbers(i.kl_sum, i.free_kl_sum)),
        ]

    def judge(self, report: Report[ParityReport, ParityItem], evidence: Evidence, bounds: ParityBounds) -> Findings:
        from evals.conditions import Condition, divergence_checks

        condition = partial(Condition, units="documents", minimum=bounds.min_documents, confidence=bounds.confidence)
        error = "largest relative error of one linear, engine against quantized model"
        kl, top = "mean KL, engine against quantized model, nats", "same top token, engine and quantized model"
        return Findings(
            (
                _worst(report.items, condition("parity_error", error, "at_most", bounds.max_parity_error)),
                *divergence_checks(
                    report.items,
                    [item.tokens for item in report.items],
                    condition("parity_kl", kl, "at_most", bounds.max_parity_kl),
                    condition("parity_top_token", top, "at_least", bounds.min_parity_top_token),
                ),
            )
        )


RULES: tuple[Rule[ParityItem], ...] = (
    *token_rules(lambda item: item.tokens),
    ("have a mean KL above their largest", mean_above_largest),
    ("have no finite error", lambda i: not 0 <= i.worst_error < math.inf),
)


def _worst(items: Sequence[ParityItem], condition: Condition) -> Check:
    """A largest value that is too large fails at once: further documents can only raise it."""
    worst = max(items, key=lambda item: item.worst_error)
    failed, too_few = worst.worst_error > condition.bound, condition.too_few(len(items))
    side = "more than" if failed else "within"
    found = f"{worst.worst_linear} is off by {worst.worst_error:.2g}, {side} {condition.bound:g}"
    return Check(
        name=condition.name,
        title=condition.title,
        outcome=Outcome.FAIL if failed else Outcome.INCONCLUSIVE if too_few else Outcome.PASS,
        reason=too_few if too_few and not failed else f"{found}; every other linear is off by less",
        direction=condition.direction,
        value=worst.worst_error,
        bound=condition.bound,
        unit=condition.units,
        n=len(items),
    )


KIND = Parity()
