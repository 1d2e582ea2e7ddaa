"""Tasks: questions that both engines answer, by choice or in free text. Accuracy is judged paired, pooled over all.

Choices are those of lm-eval's multiple-choice tasks; answers in free text are those of ``generative`` tasks.
``evals/kinds/text/measure.py`` measures it, together with held-out text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, TypeAdapter

from evals.block import QUALITY, Block, Interval, Intervals, Table
from evals.check import Check, Findings, JudgedVerdict, Outcome, Slice
from evals.kind import Bounds, CountTexts, Evidence, EvidenceKind, EvidenceRecord, Report
from evals.rules import Rule, broken, copies, differing
from tapeout.artifact import Frozen, ParentTypes
from tapeout.recipe import BaseRecipe, Count, Section

if TYPE_CHECKING:
    from evals.conditions import Condition
    from evals.kinds.tasks.generative_task import GenerativeTask


class TaskItem(Frozen):
    """One question answered by both engines. A score is of an answer, from 0 (wrong) to 1 (right).

    ``metric``: of the score, such as "acc", "acc_norm" or "strict-match".
    """

    task: str
    doc_id: int
    doc_hash: str
    prompt_hash: str
    target_hash: str
    metric: str
    baseline_score: float
    candidate_score: float

    @property
    def changed(self) -> bool:
        """The engines answer differently."""
        raise NotImplementedError

    @property
    def chance(self) -> float:
        """The score of guessing."""
        raise NotImplementedError


class ChoiceItem(TaskItem):
    """Of a multiple-choice task, by the task's own definition."""

    gold: int
    baseline_choice: int
    candidate_choice: int
    baseline_loglikelihoods: tuple[float, ...]
    candidate_loglikelihoods: tuple[float, ...]

    @property
    def changed(self) -> bool:
        return self.baseline_choice != self.candidate_choice

    @property
    def chance(self) -> float:
        return 1 / len(self.candidate_loglikelihoods)


class AnswerItem(TaskItem):
    """Of a generative task, with all that its score is computed from."""

    target: str
    baseline_answer: str
    candidate_answer: str

    @property
    def changed(self) -> bool:
        return self.baseline_answer != self.candidate_answer

    @property
    def chance(self) -> float:
        return 0.0


class EvalReport(EvidenceRecord):
    """Of tasks and of held-out text: the same engines score both in one stage."""

    artifact_type: ClassVar[str] = "EvalReport"
    remedy: ClassVar[str] = "run `dvc repro evaluate`"
    schema_version: ClassVar[int] = 5  # 5: generative tasks
    parent_types: ClassVar[ParentTypes] = {
        "baseline": ("EngineBundle",),
        "candidate": ("EngineBundle",),
        "source": ("Source",),
    }

    baseline: str  # bundle digests
    candidate: str
    tasks: dict[str, int]  # items per task
    shots: dict[str, int]  # examples before each question of the generative tasks
    documents: int
    max_tokens: int  # positions of the engines
    versions: dict[str, str]
    beginning_of_text: int | None = None  # the token put before every text; None: the tokenizer adds none


class TaskSettings(Section):
    tasks: Annotated[tuple[str, ...], Field(min_length=1)] = ("arc_easy", "piqa", "openbookqa", "social_iqa")
    items: Count = 2500  # pooled over the tasks, shared equally as far as each has enough
    # Of generative tasks, by name; a task that is not named takes as many as it says itself.
    shots: dict[str, Annotated[int, Field(ge=0)]] = Field(default={})

    @property
    def examples(self) -> dict[str, int]:
        """How many stand before each question of the generative tasks."""
        given = self.shots  # read whatever the tasks are: a stage says which parameters it reads
        return {name: given.get(name, task.shots) for name, task in generative_of(self).items()}


def generative_of(settings: TaskSettings) -> dict[str, GenerativeTask]:
    """The generative ones among the tasks."""
    from evals.kinds.tasks.generative import generative_tasks

    known = generative_tasks()
    return {name: known[name] for name in settings.tasks if name in known}


class TaskBounds(Bounds):
    accuracy_margin: float = Field(default=0.02, gt=0, le=0.1)
    task_margin: float = Field(default=0.06, gt=0, le=0.2)  # of any one task
    min_items: Count = 2500
    max_flips: float = Field(default=0.12, gt=0, le=0.5)


class TasksKind(EvidenceKind[EvalReport, TaskItem, TaskBounds]):
    order, name, folder, stage = 30, "tasks", "evaluation", "evaluate"
    measure_module = "evals.kinds.text.measure"
    emulated_module = "evals.kinds.emulated.measure"
    artifact_types, items_file = ("EvalReport",), "task_items.jsonl"
    sections: ClassVar = {"evaluate": TaskSettings}
    report, item, bounds = EvalReport, TypeAdapter[TaskItem](ChoiceItem | AnswerItem), TaskBounds
    absent = Block(QUALITY, missing="No accuracy evidence was recorded.")

    def conflicts(self, recipe: BaseRecipe) -> list[str]:
        settings = recipe.section(TaskSettings)
        generative = generative_of(settings)
        answers = {
            f"an answer of task {name}, with a prompt of one": task.max_new_tokens + 1
            for name, task in generative.items()
        }
        return [
            *recipe.too_long(answers),
            *(
                f"evaluate.shots: {name} is no generative task of evaluate.tasks; "
                f"expected one of {', '.join(generative) or 'none, as there is none'}"
                for name in settings.shots.keys() - generative.keys()
            ),
        ]

    def datasets(self, recipe: BaseRecipe) -> tuple[str, ...]:
        settings = recipe.section(TaskSettings)
        generative = generative_of(settings)
        return tuple(generative[name].folder if name in generative else name for name in settings.tasks)

    def check_data(self, recipe: BaseRecipe, data: Path, count: CountTexts) -> None:
        from evals.kinds.tasks.questions import load_tasks

        load_tasks(recipe.section(TaskSettings), data)

    def deviations(self, report: Report[EvalReport, TaskItem], recipe: BaseRecipe) -> list[str]:
        settings, record = recipe.section(TaskSettings), report.record
        asked, found = sorted(settings.tasks), sorted(record.tasks)
        problems = [] if asked == found else [f"EvalReport is of tasks {', '.join(found)}, not of {', '.join(asked)}"]
        shots = {task: (record.shots.get(task, 0), wanted) for task, wanted in settings.examples.items()}
        return problems + differing("EvalReport", {f"examples of task {task}": each for task, each in shots.items()})

    def problems(self, report: Report[EvalReport, TaskItem], evidence: Evidence) -> list[str]:
        items, claimed = report.items, report.record.tasks
        counts = Counter(item.task for item in items)
        problems = [] if items else ["EvalReport has no task items"]
        problems += [
            f"task {task}: {counts[task]} items, but EvalReport claims {claimed.get(task, 0)}"
            for task in sorted(counts.keys() | claimed.keys())
            if counts[task] != claimed.get(task, 0)
        ]
        problems += broken("task item", items, lambda i: f"{i.task}/{i.doc_id}", RULES)
        choices = [item for item in items if isinstance(item, ChoiceItem)]
        problems += broken("choice", choices, lambda i: f"{i.task}/{i.doc_id}", CHOICE_RULES)
        answers = [item for item in items if isinstance(item, AnswerItem)]
        problems += broken("answer", answers, lambda i: f"{i.task}/{i.doc_id}", ANSWER_RULES)
        return problems + copies("task item", items, lambda i: f"{i.task}/{i.doc_id}", _content)

    def judge(self, report: Report[EvalReport, TaskItem], evidence: Evidence, bounds: TaskBounds) -> Findings:
        from evals.conditions import Condition, share_fact
        from evals.statistics import null_variance, paired_difference, proportion

        items, confidence = report.items, bounds.confidence
        n, lost, gained = len(items), *discordant(items)
        margin, most = -bounds.accuracy_margin, bounds.max_flips
        condition = partial(Condition, units="items", minimum=bounds.min_items, confidence=confidence)
        accuracy = condition("accuracy", "accuracy, candidate - baseline, pooled", "at_least", margin)
        flips = condition("flips", "answers whose correctness changed", "at_most", most)
        scores = {
            "baseline": math.fsum(item.baseline_score for item in items),
            "candidate": math.fsum(item.candidate_score for item in items),
        }
        changed = sum(item.changed for item in items)
        return Findings(
            checks=(
                accuracy.check(
                    paired_difference(lost, gained, n, confidence), variance=null_variance(lost, gained, n, margin)
                ),
                _worst_task(
                    items,
                    condition("accuracy_worst_task", WORST_TASK, "at_least", -bounds.task_margin, minimum=1),
                ),
                flips.check(proportion(lost + gained, n, confidence), variance=most * (1 - most)),
            ),
            facts=(
                *(share_fact(f"{e}_accuracy", f"{e} accuracy, pooled", c, n, confidence) for e, c in scores.items()),
                share_fact("changed_choices", "answers changed, right or wrong", changed, n, confidence),
            ),
            slices=tuple(
                _slice(task, [item for item in items if item.task == task], confidence)
                for task in sorted({item.task for item in items})
            ),
        )

    def block(self, folder: Path, verdict: JudgedVerdict) -> Block | None:
        pooled = verdict.check("accuracy")
        if not verdict.slices or pooled.value is None or pooled.bound is None:
            return self.absent
        lower, upper = (pooled.value if limit is None else limit for limit in (pooled.lower, pooled.upper))
        rows = (
            *(Interval(s.task, s.difference, s.lower, s.upper, s.items) for s in verdict.slices),
            Interval("pooled", pooled.value, lower, upper, pooled.n or 0, pooled=True),
        )
        return Block(
            QUALITY,
            charts={
                "accuracy": Intervals("Accuracy: candidate minus baseline", rows, -pooled.bound, verdict.confidence)
            },
            table=slice_table(verdict.slices),
            metrics={
                f"accuracy.{s.task}.{name.removesuffix('_accuracy')}": getattr(s, name)
                for s in verdict.slices
                for name in ("baseline_accuracy", "candidate_accuracy", "difference")
            },
        )


RULES: tuple[Rule[TaskItem], ...] = (
    ("lack a pairing hash", lambda i: not (i.doc_hash and i.prompt_hash and i.target_hash)),
)
CHOICE_RULES: tuple[Rule[ChoiceItem], ...] = (
    (
        "have non-finite log-likelihoods",
        lambda i: not all(map(math.isfinite, (*i.baseline_loglikelihoods, *i.candidate_loglikelihoods))),
    ),
    (
        "have no log-likelihoods, or unequally many",
        lambda i: not len(i.baseline_loglikelihoods) == len(i.candidate_loglikelihoods) > 0,
    ),
    (
        "choose or want an answer that does not exist",
        lambda i: {i.gold, i.baseline_choice, i.candidate_choice} - set(range(len(i.baseline_loglikelihoods))) != set(),
    ),
    (
        "are marked right or wrong against their own choice",
        lambda i: (
            i.baseline_score != (i.baseline_choice == i.gold) or i.candidate_score != (i.candidate_choice == i.gold)
        ),
    ),
)


def _scored_otherwise(item: AnswerItem) -> bool:
    from evals.kinds.tasks.generative import generative_tasks

    task = generative_tasks().get(item.task)
    answers = ((item.baseline_answer, item.baseline_score), (item.candidate_answer, item.candidate_score))
    return task is None or any(task.score(answer, item.target) != score for answer, score in answers)


ANSWER_RULES: tuple[Rule[AnswerItem], ...] = (
    ("are scored otherwise than the task scores their own text", _scored_otherwise),
)


def _content(item: TaskItem) -> tuple[tuple[object, ...], ...]:
    """What no two questions have in common: the document, or else what it was given and answered.

    Answers in free text are short, and many questions have the same.
    """
    document = ("document", item.task, item.doc_hash)
    if not isinstance(item, ChoiceItem):
        return (document,)
    return (document, ("log-likelihoods", item.baseline_loglikelihoods, item.candidate_loglikelihoods))


def discordant(items: Sequence[TaskItem]) -> tuple[float, float]:
    """Summed over items, by how much the candidate scores lower than the baseline, and by how much higher.

    Where answers are right or wrong: how many only the baseline answers correctly, and only the candidate.
    """
    differences = [item.candidate_score - item.baseline_score for item in items]
    return math.fsum(-d for d in differences if d < 0), math.fsum(d for d in differences if d > 0)


WORST_TASK = "accuracy of the worst task, candidate - baseline"


def _worst_task(items: Sequence[TaskItem], condition: Condition) -> Check:
    """The check of the task that decides: of one that lost too much, else of the one that may have lost most.

    Each task is bounded at 1 - (1 - confidence) / tasks, so the bounds of all tasks hold together (Bonferroni).
    """
    from evals.statistics import null_variance, paired_difference

    tasks = sorted({item.task for item in items})
    together = replace(condition, confidence=1 - (1 - condition.confidence) / len(tasks))
    checks: list[Check] = []
    for task in tasks:
        own = [item for item in items if item.task == task]
        lost, gained = discordant(own)
        difference = paired_difference(lost, gained, len(own), together.confidence)
        variance = null_variance(lost, gained, len(own), condition.bound)
        check = together.check(difference, variance=variance)
        checks.append(check.model_copy(update={"reason": f"{task}: {check.reason}"}))
    failed = [check for check in checks if check.outcome is Outcome.FAIL]
    if failed:
        return min(failed, key=lambda check: -math.inf if check.upper is None else check.upper)
    return min(checks, key=lambda check: -math.inf if check.lower is None else check.lower)


def _slice(task: str, items: Sequence[TaskItem], confidence: float) -> Slice:
    from evals.statistics import paired_difference

    lost, gained = discordant(items)
    difference = paired_difference(lost, gained, len(items), confidence)
    return Slice(
        task=task,
        items=len(items),
        baseline_accuracy=math.fsum(item.baseline_score for item in items) / len(items),
        candidate_accuracy=math.fsum(item.candidate_score for item in items) / len(items),
        difference=difference.value,
        lower=difference.lower,
        upper=difference.upper,
        lost=sum(item.candidate_score < item.baseline_score for item in items),
        gained=sum(item.candidate_score > item.baseline_score for item in items),
    )


def slice_table(slices: Sequence[Slice]) -> Table:
    def cells(s: Slice) -> tuple[str, ...]:
        accuracies = (f"{share:.2%}" for share in (s.baseline_accuracy, s.candidate_accuracy))
        return (s.task, f"{s.items:,}", *accuracies, str(s.lost), str(s.gained))

    return Table(
        ("Task", "n", "Baseline", "Candidate", "Lost", "Gained"),
        tuple(map(cells, slices)),
        "Lost: questions that the baseline answers better. Gained: questions that the candidate does.",
    )


KIND = TasksKind()
