"""Source: the float engine against the model of the checkpoint itself, so that a wrong baseline excuses nothing.

All other evidence compares the candidate with the baseline engine. Here transformers runs the checkpoint as it came,
and both engines are held against it. ``evals/kinds/source/measure.py`` measures it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from pydantic import Field

from evals.check import Check, Findings, Outcome
from evals.kind import DocumentBounds, Evidence, EvidenceKind, EvidenceRecord, Report
from evals.kinds.parity import TableError
from evals.kinds.tasks import ChoiceItem, TaskItem
from evals.limits import at_least, at_most
from evals.rules import Rule, broken, counted, mean_above_largest, short, sum_of_nats, token_rules
from tapeout.artifact import Frozen, ParentTypes
from tapeout.recipe import Fraction

FORMS = ("document", "long", "prompt")
ANSWERS_PER_TASK = 12  # of the source model to questions of each task


class SourceItem(Frozen):
    """One text scored by the source model and both engines.

    ``form``: a held-out document, one as long as the engines have positions, or a chat prompt. ``kl_sum``, ``kl_max``
    and ``agree``: the source model against the baseline. ``*_nll``: summed, in nats, of the text's own next tokens.
    """

    doc_hash: str
    form: str
    tokens: int
    kl_sum: float
    kl_max: float
    agree: int
    source_nll: float
    baseline_nll: float
    candidate_nll: float


class TextFile(Frozen):
    """Hashes of a file that shapes what users send or get, such as the tokenizer. None: there is no such file."""

    name: str
    graph: str | None
    baseline: str | None
    candidate: str | None


class SourceAnswer(Frozen):
    """The source model's answer to the question of a :class:`evals.kinds.tasks.ChoiceItem`; log-likelihoods in nats."""

    task: str
    doc_id: int
    doc_hash: str
    prompt_hash: str
    target_hash: str
    choice: int
    loglikelihoods: tuple[float, ...]


class SourceReport(EvidenceRecord):
    artifact_type: ClassVar[str] = "SourceReport"
    remedy: ClassVar[str] = "run `dvc repro source`"
    schema_version: ClassVar[int] = 2
    parent_types: ClassVar[ParentTypes] = {
        "baseline": ("EngineBundle",),
        "candidate": ("EngineBundle",),
        "graph": ("PortableGraph",),
        "source": ("Source",),
    }

    baseline: str
    candidate: str
    documents: int
    max_tokens: int  # positions of the engines
    vocabulary: int
    embedding: TableError  # of the candidate, against the source model
    answers: tuple[SourceAnswer, ...]
    files: tuple[TextFile, ...]
    stop_tokens: dict[str, tuple[int, ...]]  # of the source model, the exported one, and both engines


class SourceBounds(DocumentBounds):
    max_source_kl: float = Field(default=1e-4, gt=0, le=0.1)
    min_same_answers: Fraction = 0.9
    max_answer_error: float = Field(default=0.02, gt=0, le=0.5)
    max_source_perplexity_ratio: float = Field(default=1.05, gt=1, le=2)
    max_perplexity: float = Field(default=1000.0, gt=1)
    min_accuracy: Fraction = 0.0
    min_above_chance: float = Field(default=0.0, ge=-0.2, le=1)
    max_embedding_error: float = Field(default=0.3, gt=0, le=1)


class SourceKind(EvidenceKind[SourceReport, SourceItem, SourceBounds]):
    order, name, folder, stage = 65, "source", "source-model", "source"
    measure_module = "evals.kinds.source.measure"
    artifact_types, items_file = ("SourceReport",), "source_items.jsonl"
    report, item, bounds = SourceReport, SourceItem, SourceBounds

    def problems(self, report: Report[SourceReport, SourceItem], evidence: Evidence) -> list[str]:
        record, items = report.record, report.items
        problems = counted("SourceReport", "texts", len(items), record.documents)
        problems += broken("source item", items, lambda i: i.doc_hash, RULES, key="text")
        problems += [f"SourceReport has no {form}" for form in FORMS if all(item.form != form for item in items)]
        longest = max((item.tokens for item in items if item.form == "long"), default=0)
        if longest < record.max_tokens:
            problems.append(f"SourceReport scores {longest} positions of a long document, of {record.max_tokens}")
        if record.embedding.rows != record.vocabulary:
            problems.append(
                f"SourceReport compares {record.embedding.rows} rows of the embedding, of {record.vocabulary} tokens"
            )
        if not 0 <= record.embedding.error < math.inf:
            problems.append("SourceReport has no finite error of the embedding")
        if not record.files or set(record.stop_tokens) != {"source", "graph", "baseline", "candidate"}:
            problems.append("SourceReport does not compare tokenizers and stop tokens")
        return problems + _unpaired(record.answers, _asked(evidence))

    def judge(self, report: Report[SourceReport, SourceItem], evidence: Evidence, bounds: SourceBounds) -> Findings:
        from evals.conditions import Condition, perplexity_check

        items, highest, confidence = report.items, bounds.max_source_perplexity_ratio, bounds.confidence
        documents = [item for item in items if item.form == "document"]
        tokens = [item.tokens for item in documents]
        condition = partial(Condition, units="documents", minimum=bounds.min_documents, confidence=confidence)
        perplexity = math.exp(min(700.0, math.fsum(item.candidate_nll for item in documents) / sum(tokens)))
        embedding = report.record.embedding
        return Findings(
            (
                at_most(
                    "source_kl",
                    "mean KL of the worst text, float engine against the source model, nats",
                    {f"{i.form} {short(i.doc_hash)}": i.kl_sum / i.tokens for i in items},
                    bounds.max_source_kl,
                    "texts",
                ),
                *_same_answers(report.record.answers, _asked(evidence), bounds),
                perplexity_check(
                    [item.source_nll for item in documents],
                    [item.candidate_nll for item in documents],
                    tokens,
                    condition("source_perplexity", "perplexity, candidate / source model", "at_most", highest),
                ),
                at_most(
                    "perplexity_floor",
                    "candidate's perplexity",
                    {"held-out documents": perplexity},
                    bounds.max_perplexity,
                    "documents",
                ),
                at_most(
                    "embedding_rows",
                    "largest relative error of a token's embedding, candidate against the source model",
                    {f"token {embedding.worst}": embedding.error},
                    bounds.max_embedding_error,
                    "rows",
                ),
                _same_text(report.record),
                *_accuracy_floors(evidence, bounds),
            )
        )


RULES: tuple[Rule[SourceItem], ...] = (
    *token_rules(lambda item: item.tokens),
    ("have a mean KL above their largest", mean_above_largest),
    ("have an unknown form", lambda i: i.form not in FORMS),
    (
        "have a non-finite or negative log-likelihood",
        lambda i: not all(sum_of_nats(nll, i.tokens) for nll in (i.source_nll, i.baseline_nll, i.candidate_nll)),
    ),
)


ANSWER_RULES: tuple[Rule[SourceAnswer], ...] = (
    ("have no finite log-likelihoods", lambda a: not (a.loglikelihoods and all(map(math.isfinite, a.loglikelihoods)))),
    ("choose what does not exist", lambda a: a.choice not in range(len(a.loglikelihoods))),
)


def _asked(evidence: Evidence) -> dict[str, ChoiceItem]:
    """The multiple-choice questions that both engines answered, by name. The source model is asked only these."""
    report = evidence.reports.get("tasks")
    return {_question(item): item for item in report.items if isinstance(item, ChoiceItem)} if report else {}


def _question(item: ChoiceItem | SourceAnswer) -> str:
    return f"{item.task}/{item.doc_id}"


def _unpaired(answers: Sequence[SourceAnswer], asked: Mapping[str, ChoiceItem]) -> list[str]:
    """Why the source model's answers cannot be compared with the engines'."""

    def differs(answer: SourceAnswer) -> bool:
        item = asked.get(_question(answer))
        return item is None or (
            (item.doc_hash, item.prompt_hash, item.target_hash, len(item.baseline_loglikelihoods))
            != (answer.doc_hash, answer.prompt_hash, answer.target_hash, len(answer.loglikelihoods))
        )

    other: Rule[SourceAnswer] = ("are to another question than the engines were asked", differs)
    problems = broken("answer of the source model", answers, _question, (*ANSWER_RULES, other), key="question")
    sizes, found = (Counter(item.task for item in items) for items in (asked.values(), answers))
    return problems + [
        f"SourceReport answers {found[task]} questions of task {task}, not {min(size, ANSWERS_PER_TASK)}"
        for task, size in sizes.items()
        if found[task] < min(size, ANSWERS_PER_TASK)
    ]


def _same_answers(
    answers: Sequence[SourceAnswer], asked: Mapping[str, ChoiceItem], bounds: SourceBounds
) -> tuple[Check, ...]:
    """The float engine answers the questions as the source model does, with the same log-likelihoods."""
    pairs = [(answer, asked[_question(answer)]) for answer in answers if _question(answer) in asked]
    if not pairs:
        return ()
    same: dict[str, list[bool]] = {}
    for answer, item in pairs:
        same.setdefault(answer.task, []).append(answer.choice == item.baseline_choice)
    return (
        at_least(
            "source_answers",
            "same answers on the worst task, float engine and source model",
            {task: sum(own) / len(own) for task, own in same.items()},
            bounds.min_same_answers,
            "tasks",
        ),
        at_most(
            "source_loglikelihood",
            "largest difference of a choice's log-likelihood, float engine and source model, nats",
            {
                _question(answer): max(
                    abs(a - b) for a, b in zip(answer.loglikelihoods, item.baseline_loglikelihoods, strict=True)
                )
                for answer, item in pairs
            },
            bounds.max_answer_error,
            "questions",
        ),
    )


def _same_text(record: SourceReport) -> Check:
    """Tokenizer, chat template, generation settings and stop tokens are those of the model."""
    reasons = [
        f"{file.name} of the {role} is not that of the exported model"
        for file in record.files
        for role, found in (("baseline", file.baseline), ("candidate", file.candidate))
        if found != file.graph
    ]
    wanted = record.stop_tokens["graph"]
    reasons += [
        f"the {role} stops at {list(record.stop_tokens[role])}, the exported model at {list(wanted)}"
        for role in ("baseline", "candidate")
        if sorted(record.stop_tokens[role]) != sorted(wanted)
    ]
    if lost := set(record.stop_tokens["source"]) - set(wanted):
        reasons.append(f"the source model stops at {sorted(lost)}, and the exported one does not")
    return Check(
        name="text_files",
        title="tokenizer, chat template, generation settings and stop tokens of the model",
        outcome=Outcome.FAIL if reasons else Outcome.PASS,
        reason="; ".join(reasons) or f"{len(record.files)} files and {len(wanted)} stop tokens are the same",
    )


def _accuracy_floors(evidence: Evidence, bounds: SourceBounds) -> tuple[Check, ...]:
    """The candidate's accuracy itself, not its difference from the baseline's: above chance, and above the floor."""
    from evals.conditions import Condition
    from evals.statistics import proportion

    report = evidence.reports.get("tasks")
    items: Sequence[TaskItem] = report.items if report else ()
    if not items:
        return ()
    accuracy = proportion(math.fsum(item.candidate_score for item in items), len(items), bounds.confidence)
    chance = sum(item.chance for item in items) / len(items)
    above = replace(accuracy, **{name: getattr(accuracy, name) - chance for name in ("value", "lower", "upper")})
    condition = partial(Condition, direction="at_least", units="items", minimum=1, confidence=bounds.confidence)
    return (
        condition(
            "accuracy_above_chance", "candidate's accuracy, less that of guessing", bound=bounds.min_above_chance
        ).check(above),
        condition("accuracy_floor", "candidate's accuracy", bound=bounds.min_accuracy).check(accuracy),
    )


KIND = SourceKind()
