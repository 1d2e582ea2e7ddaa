"""Parity: the engine against the quantized torch model that it was built from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from evals.block import QUALITY, Block, Table
from evals.check import Check, Findings, JudgedVerdict, Outcome
from evals.items import read_items
from evals.kind import DocumentBounds, Evidence, EvidenceKind, EvidenceRecord, Report
from evals.kinds.text import HeldOutSettings
from evals.limits import at_least, at_most
from evals.rules import Rule, broken, copies, counted, differing, mean_above_largest, same_numbers, short, token_rules
from tapeout.artifact import Frozen, ParentTypes, load
from tapeout.recipe import BaseRecipe, Count, Section

if TYPE_CHECKING:
    from evals.conditions import Condition


DOCUMENT_CHECK = "parity_document_kl"  # its ``n`` is the number of documents


class ParityItem(Frozen):
    """One document scored by the engine and by the quantized torch model it was built from.

    ``kl_sum``, ``kl_max`` and ``agree`` are of logits with every linear locked to the engine's output. ``errors``: of
    each of those linears, relative, over the document. ``position_error``: the largest one at any one position, of
    ``position_linear``. ``attention_errors``: of what attention gave, by the linear that reads it, relative, where the
    engine computes it in 16 bits; ``attention_position_error``: the largest one at any one position. ``state_errors``:
    of the recurrent state that the document leaves, relative. ``free_*`` are of both running freely; None where that
    was not measured. ``state_kl_sum``: of the quantized model with states in float32 and in bfloat16, activations in
    float; None where states are in float32. ``visits``: of each layer with experts, by its down projection, how many
    tokens chose each expert. ``routed``: for how many tokens engine and model chose the same experts, likewise, with
    every linear locked; ``free_routed``: of both running freely, empty where that was not measured.
    """

    doc_hash: str
    tokens: int
    kl_sum: float
    kl_max: float
    agree: int
    errors: dict[str, float]
    position_error: float
    position_linear: str
    attention_errors: dict[str, float] = Field(default_factory=dict[str, float])
    attention_position_error: float = 0.0
    state_errors: dict[str, float] = Field(default_factory=dict[str, float])
    state_kl_sum: float | None = None
    visits: dict[str, tuple[int, ...]] = Field(default_factory=dict[str, tuple[int, ...]])
    routed: dict[str, int] = Field(default_factory=dict[str, int])
    free_routed: dict[str, int] = Field(default_factory=dict[str, int])
    free_kl_sum: float | None = None
    free_agree: int | None = None

    @property
    def worst_linear(self) -> str:
        return max(self.errors, key=lambda name: self.errors[name])

    @property
    def mean_error(self) -> float:
        return math.fsum(self.errors.values()) / len(self.errors)

    @property
    def worst_error(self) -> float:
        return self.errors[self.worst_linear]


class TableError(Frozen):
    """How far the rows of a table of token ids are off: of the embedding, or of the output head.

    Every row was compared; ``worst`` is the token id of the one with the largest relative error.
    """

    rows: int
    error: float
    worst: int


class ParityReport(EvidenceRecord):
    artifact_type: ClassVar[str] = "ParityReport"
    remedy: ClassVar[str] = "run `dvc repro parity`"
    schema_version: ClassVar[int] = 8
    parent_types: ClassVar[ParentTypes] = {"candidate": ("EngineBundle",), "quantized": ("QuantizedModel",)}

    candidate: str
    built_from: str  # digest of the QuantizedModel
    documents: int
    vocabulary: int  # of the candidate
    max_tokens: int  # of the candidate
    attention: tuple[str, ...] = ()  # linears of the candidate behind attention that is judged on its own
    states: tuple[str, ...] = ()  # recurrent state of the candidate, LAYER.TENSOR
    half_states: tuple[str, ...] = ()  # of these, the ones in bfloat16
    experts: dict[str, int] = Field(default_factory=dict[str, int])  # of each layer with experts, as ``visits``
    embedding: TableError
    head: TableError  # by the logits of all documents


class ParitySettings(Section):
    parity_documents: Count = 32  # of the documents of held-out text, besides one of all positions


class ParityBounds(DocumentBounds):
    max_parity_kl: float = Field(default=1e-3, gt=0, le=0.1)
    min_parity_top_token: float = Field(default=0.995, ge=0.9, lt=1)
    max_parity_error: float = Field(default=0.01, gt=0, le=0.5)  # relative, of any one linear on any document
    max_parity_mean_error: float = Field(default=3e-4, gt=0, le=0.1)  # of all linears together
    max_parity_position_error: float = Field(default=0.05, gt=0, le=0.5)  # of any one linear at any one position
    # Of attention in 16 bits, where it is judged on its own, of any one layer on any document; at any one position.
    max_parity_attention_error: float = Field(default=0.002, gt=0, le=0.1)
    max_parity_attention_position_error: float = Field(default=0.01, gt=0, le=0.5)
    max_parity_row_error: float = Field(default=0.01, gt=0, le=0.5)  # of any one row of embedding and head
    max_parity_state_error: float = Field(default=1e-4, gt=0, le=0.1)  # relative, of any one state a document leaves
    # Of one in bfloat16: a number between two of them may fall on either side, and stays there while little decays.
    max_parity_half_state_error: float = Field(default=0.03, gt=0, le=0.1)
    max_parity_state_kl: float = Field(default=0.002, gt=0, le=0.1)  # that bfloat16 costs, mean over any one document
    max_parity_document_kl: float = Field(default=0.01, gt=0, le=0.5)  # mean over any one document
    # Share of the experts of any one layer that some token chose: what is wrong with others does not show in logits.
    min_parity_experts: float = Field(default=0.9, ge=0.5, le=1)
    min_parity_routing: float = Field(default=0.99, ge=0.9, le=1)  # tokens of one layer that choose the same experts


class ParityKind(EvidenceKind[ParityReport, ParityItem, ParityBounds]):
    order, name, folder, stage = 60, "parity", "parity", "parity"
    measure_module = "evals.kinds.parity.measure"
    artifact_types, items_file = ("ParityReport",), "parity_items.jsonl"
    sections: ClassVar = {"evaluate": ParitySettings}
    report, item, bounds = ParityReport, ParityItem, ParityBounds

    def conflicts(self, recipe: BaseRecipe) -> list[str]:
        wanted, there = recipe.section(ParitySettings).parity_documents, recipe.section(HeldOutSettings).documents
        return [f"evaluate.parity_documents is {wanted} of {there} documents"] if wanted > there else []

    def deviations(self, report: Report[ParityReport, ParityItem], recipe: BaseRecipe) -> list[str]:
        asked = recipe.section(ParitySettings).parity_documents + 1  # one of all positions
        return differing("ParityReport", {"documents": (report.record.documents, asked)})

    def block(self, folder: Path, verdict: JudgedVerdict) -> Block | None:
        """Which experts the documents reach. None for a model without experts: the checks say everything."""
        experts = load(folder, ParityReport).record.experts
        if not experts:
            return None
        items = read_items(folder / self.items_file, ParityItem)
        tokens = {name: [sum(item.visits[name][e] for item in items) for e in range(n)] for name, n in experts.items()}
        reached = {name: 1 - counts.count(0) / len(counts) for name, counts in tokens.items()}
        never = [
            f"{name}: {', '.join(str(expert) for expert, count in enumerate(counts) if not count)}"
            for name, counts in tokens.items()
            if 0 in counts
        ]
        routed, freely = _same_choice(items), _same_choice(items, freely=True)
        table = Table(
            (
                *("Experts", "Of a layer", "Reached", "Tokens of the rarest", "Of the median", "Of the most frequent"),
                *("Same choice, from the same inputs", "Running freely"),
            ),
            tuple(
                (name, len(counts), reached[name], min(counts), median(counts), max(counts), routed[name], freely[name])
                for name, counts in tokens.items()
            ),
            f"No token chose {'; '.join(never)}." if never else "Every expert was chosen by some token.",
        )
        metrics = {f"experts.{name}.reached": share for name, share in reached.items()}
        metrics |= {f"experts.{name}.routed": share for name, share in routed.items()}
        return Block(QUALITY, "Experts that the documents of parity reach", table=table, metrics=metrics)

    def problems(self, report: Report[ParityReport, ParityItem], evidence: Evidence) -> list[str]:
        return [
            *counted("ParityReport", "documents", len(report.items), report.record.documents),
            *_incomplete(report),
            *broken("parity item", report.items, lambda i: i.doc_hash, RULES, key="parity document"),
            *copies(
                "parity item", report.items, lambda i: i.doc_hash, lambda i: same_numbers(i.kl_sum, i.position_error)
            ),
        ]

    def judge(self, report: Report[ParityReport, ParityItem], evidence: Evidence, bounds: ParityBounds) -> Findings:
        from evals.conditions import Condition, divergence_checks

        condition = partial(Condition, units="documents", minimum=bounds.min_documents, confidence=bounds.confidence)
        error = "largest relative error of one linear, engine against quantized model"
        tables = {"embedding": report.record.embedding, "output head": report.record.head}
        kl, top = "mean KL, engine against quantized model, nats", "same top token, engine and quantized model"
        return Findings(
            (
                _worst(report.items, condition("parity_error", error, "at_most", bounds.max_parity_error)),
                at_most(
                    "parity_mean_error",
                    "relative error of all linears together, engine against quantized model",
                    {f"document {short(i.doc_hash)}": i.mean_error for i in report.items},
                    bounds.max_parity_mean_error,
                    "documents",
                ),
                at_most(
                    "parity_position_error",
                    "largest relative error of one linear at one position, engine against quantized model",
                    {f"{i.position_linear} on document {short(i.doc_hash)}": i.position_error for i in report.items},
                    bounds.max_parity_position_error,
                    "documents",
                ),
                at_most(
                    "parity_row_error",
                    "largest relative error of one row of embedding or output head",
                    {f"token {table.worst} of the {name}": table.error for name, table in tables.items()},
                    bounds.max_parity_row_error,
                    "tables",
                ),
                *_attention_checks(report, bounds),
                *_state_checks(report, bounds),
                *_expert_checks(report, bounds),
                at_most(
                    DOCUMENT_CHECK,
                    "mean KL of the worst document, engine against quantized model, nats",
                    {f"document {short(i.doc_hash)}": i.kl_sum / i.tokens for i in report.items},
                    bounds.max_parity_document_kl,
                    "documents",
                ),
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
    (
        "have no finite error",
        lambda i: (
            not i.errors
            or not all(
                0 <= error < math.inf
                for errors in (i.errors, i.attention_errors, i.state_errors)
                for error in (*errors.values(), i.position_error, i.attention_position_error)
            )
            or not 0 <= (i.state_kl_sum or 0) < math.inf
        ),
    ),
    (
        "have experts that more or fewer tokens chose than there are",
        lambda i: any(
            min(visits, default=0) < 0 or max(visits, default=0) > i.tokens or not sum(visits) or sum(visits) % i.tokens
            for visits in i.visits.values()
        ),
    ),
    (
        "have more or fewer tokens that choose the same experts than there are",
        lambda i: any(not 0 <= n <= i.tokens for counts in (i.routed, i.free_routed) for n in counts.values()),
    ),
)


def _same_choice(items: Sequence[ParityItem], *, freely: bool = False) -> dict[str, float]:
    """Share of tokens for which engine and quantized model chose the same experts, by layer."""
    counted = [(item.tokens, item.free_routed if freely else item.routed) for item in items]
    counted = [(tokens, routed) for tokens, routed in counted if routed]
    total = sum(tokens for tokens, _ in counted)
    return {name: sum(routed[name] for _, routed in counted) / total for name in (counted[0][1] if counted else {})}


def _incomplete(report: Report[ParityReport, ParityItem]) -> list[str]:
    record, items = report.record, report.items
    problems = [
        f"ParityReport compares {table.rows} rows of the {name}, of {record.vocabulary} tokens"
        for name, table in (("embedding", record.embedding), ("output head", record.head))
        if table.rows != record.vocabulary
    ]
    problems += [
        f"ParityReport has no finite error of the {name}"
        for name, table in (("embedding", record.embedding), ("output head", record.head))
        if not 0 <= table.error < math.inf
    ]
    if items and (longest := max(item.tokens for item in items)) < record.max_tokens:
        problems.append(f"ParityReport reaches {longest} positions, of {record.max_tokens}")
    if any(item.attention_errors.keys() != set(record.attention) for item in items):
        problems.append("ParityReport does not compare every attention on every document")
    if not set(record.attention) <= {name for item in items for name in item.errors}:
        problems.append("ParityReport names attention before linears whose outputs it does not compare")
    if any(item.state_errors.keys() != set(record.states) for item in items):
        problems.append("ParityReport does not compare every recurrent state on every document")
    if not set(record.half_states) <= set(record.states):
        problems.append("ParityReport names states in bfloat16 that are none of its states")
    if record.half_states and any(item.state_kl_sum is None for item in items):
        problems.append("ParityReport does not measure on every document what states in bfloat16 cost")
    if not record.half_states and any(item.state_kl_sum is not None for item in items):
        problems.append("ParityReport measures what states in bfloat16 cost, of an engine that has none")
    if any({n: len(found) for n, found in item.visits.items()} != record.experts for item in items):
        problems.append("ParityReport does not count the visits of every expert on every document")
    if any(item.routed.keys() != record.experts.keys() for item in items):
        problems.append("ParityReport does not compare on every document which experts were chosen")
    if any(item.free_routed.keys() != record.experts.keys() for item in items if item.free_kl_sum is not None):
        problems.append("ParityReport does not compare which experts were chosen where both run freely")
    if not record.experts.keys() <= {name for item in items for name in item.errors}:
        problems.append("ParityReport names experts whose outputs it does not compare")
    if len({frozenset(item.errors) for item in items}) > 1:
        problems.append("ParityReport compares other linears on some documents than on others")
    return problems


def _attention_checks(report: Report[ParityReport, ParityItem], bounds: ParityBounds) -> list[Check]:
    """None where the error of the linear that reads attention tells what is wrong with it."""
    if not report.record.attention:
        return []
    return [
        at_most(
            "parity_attention_error",
            "largest relative error of attention, engine against quantized model",
            {
                f"attention before {name} on document {short(item.doc_hash)}": error
                for item in report.items
                for name, error in item.attention_errors.items()
            },
            bounds.max_parity_attention_error,
            "layers",
        ),
        at_most(
            "parity_attention_position_error",
            "largest relative error of attention at one position, engine against quantized model",
            {f"document {short(item.doc_hash)}": item.attention_position_error for item in report.items},
            bounds.max_parity_attention_position_error,
            "documents",
        ),
    ]


def _state_checks(report: Report[ParityReport, ParityItem], bounds: ParityBounds) -> list[Check]:
    """None for a model without recurrent state."""
    half = set(report.record.half_states)
    kinds = {
        "parity_state_error": (set(report.record.states) - half, "recurrent state", bounds.max_parity_state_error),
        "parity_half_state_error": (half, "recurrent state in bfloat16", bounds.max_parity_half_state_error),
    }
    checks = [
        at_most(
            check,
            f"largest relative error of a {kind}, engine against quantized model",
            {
                f"state {name} after {item.tokens} tokens of document {short(item.doc_hash)}": item.state_errors[name]
                for item in report.items
                for name in names
            },
            bound,
            "states",
        )
        for check, (names, kind, bound) in kinds.items()
        if names
    ]
    costs = {f"document {short(i.doc_hash)}": (i.state_kl_sum or 0.0) / i.tokens for i in report.items if half}
    title = "mean KL of the worst document, states in float32 against bfloat16, nats"
    return checks + (
        [at_most("parity_state_kl", title, costs, bounds.max_parity_state_kl, "documents")] if half else []
    )


def _expert_checks(report: Report[ParityReport, ParityItem], bounds: ParityBounds) -> list[Check]:
    """None for a model without experts. Too few are missing evidence: more documents can only reach more."""
    reached = {
        name: sum(any(item.visits[name][expert] for item in report.items) for expert in range(count)) / count
        for name, count in report.record.experts.items()
    }
    title = "share of the experts of one layer that the documents of parity reach"
    if not reached:
        return []
    check = at_least("parity_experts", title, reached, bounds.min_parity_experts, "layers")
    if check.outcome is Outcome.FAIL:
        remedy = "raise `evaluate.parity_documents`, or lower `gate.min_parity_experts` if the router starves experts"
        check = check.model_copy(update={"outcome": Outcome.INCONCLUSIVE, "reason": f"{check.reason}: {remedy}"})
    title = "share of tokens of one layer that choose the same experts, engine and quantized model"
    return [
        check,
        at_least("parity_routing", title, _same_choice(report.items), bounds.min_parity_routing, "layers"),
    ]


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


KIND = ParityKind()
