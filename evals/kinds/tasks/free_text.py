"""Questions of a generative task over one local table, and what both engines answer to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from statistics import fmean

from lm_eval.api.instance import Instance

from evals.kinds.tasks import AnswerItem
from evals.kinds.tasks.generative import generative_tasks
from evals.kinds.tasks.generative_task import GenerativeTask, Row
from evals.kinds.tasks.harness import EngineLM
from tapeout.errors import EvidenceError


class FreeTextTask:
    """``rows``: the questions. ``examples``: rows that stand solved before each of them."""

    def __init__(self, name: str, definition: GenerativeTask, rows: Sequence[Row], examples: Sequence[Row]) -> None:
        self.name, self.definition, self.rows = name, definition, rows
        solved = (f"{definition.prompt(row)} {definition.target(row)}\n\n" for row in examples)
        self._solved = "".join(solved)

    def contents(self) -> list[str]:
        """What each row asks."""
        return [self.definition.prompt(row) for row in self.rows]

    def prompt(self, number: int) -> str:
        return self._solved + self.definition.prompt(self.rows[number])

    def require_room(self, numbers: Sequence[int], lm: EngineLM) -> None:
        """:class:`EvidenceError` for a question that does not fit the engine together with its answer."""
        room = lm.engine.max_tokens - self.definition.max_new_tokens
        for number in numbers:
            tokens = len(lm.tok_encode(self.prompt(number)))
            if tokens > room:
                raise EvidenceError(
                    f"question {number} of task {self.name} has {tokens} tokens",
                    expected=f"at most {room}: the engine holds {lm.engine.max_tokens} positions, "
                    f"{self.definition.max_new_tokens} of them for the answer",
                    remedy="lower its number of examples in `evaluate.shots`, or raise `export.max_positions`",
                )


def answer_items(
    task: FreeTextTask, numbers: Sequence[int], baseline: EngineLM, candidate: EngineLM
) -> list[AnswerItem]:
    """Both engines' answers to the questions ``numbers`` of a task, with their scores."""
    left, right = (_answers(task, numbers, lm) for lm in (baseline, candidate))
    return [_item(task, *each) for each in zip(numbers, left, right, strict=True)]


def other_scores(task: str, items: Sequence[AnswerItem]) -> dict[str, float]:
    """Mean scores of both engines by the scorers of a task that are not judged."""
    if not items:
        return {}
    definition = generative_tasks()[task]
    return {
        f"{role}_{task}_{scorer}": fmean(
            definition.score(getattr(item, f"{role}_answer"), item.target, scorer) for item in items
        )
        for scorer in definition.scorers
        if scorer != definition.metric
        for role in ("baseline", "candidate")
    }


def _answers(task: FreeTextTask, numbers: Sequence[int], lm: EngineLM) -> list[str]:
    lm.task = task.name
    settings = {"until": list(task.definition.until), "max_gen_toks": task.definition.max_new_tokens}
    requests = [
        Instance("generate_until", dict(task.rows[number]), (task.prompt(number), settings), number)
        for number in numbers
    ]
    return lm.generate_until(requests)


def _item(task: FreeTextTask, number: int, baseline: str, candidate: str) -> AnswerItem:
    row, target = task.rows[number], task.definition.target(task.rows[number])
    return AnswerItem(
        task=task.name,
        doc_id=number,
        doc_hash=_sha256(json.dumps(dict(row), sort_keys=True, default=str)),
        prompt_hash=_sha256(task.prompt(number)),
        target_hash=_sha256(target),
        metric=task.definition.metric,
        target=target,
        baseline_answer=baseline,
        candidate_answer=candidate,
        baseline_score=task.definition.score(baseline, target),
        candidate_score=task.definition.score(candidate, target),
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
