"""A task whose answers are generated and then scored, such as GSM8K."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.errors import EvidenceError

Row = Mapping[str, Any]  # of the task's table, by column
Scorer = Callable[[str, str], float]  # of an answer and the target of its question: 0 (wrong) to 1 (right)


@dataclass(frozen=True)
class GenerativeTask:
    """``dataset`` and ``configuration``: as the Hugging Face hub names them; the table lies in a folder of that name.

    ``split`` holds the questions. ``examples_split`` holds solved examples, of which the first ``shots`` stand before
    each question, unless ``evaluate.shots`` says how many. ``prompt``: a question up to where its answer begins.
    ``target``: what an answer is compared with, and the answer of an example; any error refuses the row. An answer ends
    before one of the strings ``until``, at a stop token of the model, or after ``max_new_tokens``. Of the ``scorers``
    the first is judged; ``metrics.json`` has all of them.
    """

    dataset: str
    configuration: str
    split: str
    prompt: Callable[[Row], str]
    target: Callable[[Row], str]
    scorers: Mapping[str, Scorer]
    until: tuple[str, ...]
    max_new_tokens: int
    examples_split: str = ""
    shots: int = 0

    @property
    def folder(self) -> str:
        """Of its table, below the data source.

        >>> from evals.kinds.tasks.generative.gsm8k import TASK
        >>> TASK.folder
        'gsm8k/main'
        """
        return f"{self.dataset.rpartition('/')[2]}/{self.configuration}"

    @property
    def metric(self) -> str:
        """The scorer that is judged."""
        return next(iter(self.scorers))

    def score(self, answer: str, target: str, scorer: str = "") -> float:
        """Of the scorer that is judged, unless another is named; :class:`EvidenceError` if it is not in [0, 1]."""
        name = scorer or self.metric
        score = float(self.scorers[name](answer, target))
        if not 0 <= score <= 1:
            raise EvidenceError(
                f"scorer {name!r} of {self.dataset} gives {score} to the answer {answer!r}, target {target!r}",
                expected="a score from 0 to 1",
                remedy="correct the scorer",
            )
        return score
