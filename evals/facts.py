"""Numbers of a verdict that are worth reading and decide nothing: accuracy by task, changed answers, lengths."""

from __future__ import annotations

from collections.abc import Sequence

from evals.conditions import finite
from evals.reports import ShadowItem, TaskItem
from evals.statistics import paired_difference, proportion, ratio_of_sums
from evals.verdict import Fact, Slice


def discordant(items: Sequence[TaskItem]) -> tuple[int, int]:
    """How many items only the baseline answers rightly, and only the candidate."""
    lost = sum(item.baseline_correct and not item.candidate_correct for item in items)
    gained = sum(item.candidate_correct and not item.baseline_correct for item in items)
    return lost, gained


def task_slices(items: Sequence[TaskItem], confidence: float) -> tuple[Slice, ...]:
    slices: list[Slice] = []
    for task in sorted({item.task for item in items}):
        of_task = [item for item in items if item.task == task]
        lost, gained = discordant(of_task)
        difference = paired_difference(lost, gained, len(of_task), confidence)
        slices.append(
            Slice(
                task=task,
                items=len(of_task),
                baseline_accuracy=sum(item.baseline_correct for item in of_task) / len(of_task),
                candidate_accuracy=sum(item.candidate_correct for item in of_task) / len(of_task),
                difference=difference.value,
                lower=difference.lower,
                upper=difference.upper,
                lost=lost,
                gained=gained,
            )
        )
    return tuple(slices)


def task_facts(items: Sequence[TaskItem], confidence: float) -> list[Fact]:
    shares = {
        "baseline_accuracy": ("baseline accuracy, pooled", sum(item.baseline_correct for item in items)),
        "candidate_accuracy": ("candidate accuracy, pooled", sum(item.candidate_correct for item in items)),
        "changed_choices": (
            "answers changed, right or wrong",
            sum(item.baseline_choice != item.candidate_choice for item in items),
        ),
    }
    return [_share(name, title, count, len(items), confidence) for name, (title, count) in shares.items()]


def shadow_facts(items: Sequence[ShadowItem], confidence: float) -> list[Fact]:
    length = ratio_of_sums(
        [item.candidate_tokens for item in items], [item.champion_tokens for item in items], confidence
    )
    same_end = sum(item.champion_stopped == item.candidate_stopped for item in items)
    return [
        _share("exact_match", "answers identical", sum(item.exact_match for item in items), len(items), confidence),
        _share("same_ending", "answers that both stop, or both do not", same_end, len(items), confidence),
        Fact(
            name="length_ratio",
            title="answer length, candidate / champion",
            value=length.value,
            lower=finite(length.lower),
            upper=finite(length.upper),
        ),
    ]


def _share(name: str, title: str, count: int, n: int, confidence: float) -> Fact:
    share = proportion(count, n, confidence)
    return Fact(name=name, title=title, value=share.value, lower=share.lower, upper=share.upper)
