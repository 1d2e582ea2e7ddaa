"""GSM8K: grade-school sums in words (Cobbe et al. 2021, arXiv:2110.14168).

Prompt, stop strings and scores are those of lm-eval's task ``gsm8k``, version 3.0. Its examples are drawn for each
question; here they are the first of the split for all, which lm-eval calls ``first_n``, so that their KV cache is
shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from evals.kinds.tasks.generative_task import GenerativeTask, Row

MARKED = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))


def prompt(row: Row) -> str:
    return f"Question: {row['question']}\nAnswer:"


def target(row: Row) -> str:
    """The worked answer; its number stands behind ``####``."""
    if not MARKED.search(row["answer"]):
        raise ValueError(f"answer {row['answer']!r} has no number behind '#### '")
    return row["answer"]


def number(text: str) -> str:
    """What is compared of a text, as in lm-eval's exact_match.

    >>> number("5 * 200 = 1,000 #### $1,000."), number("18")
    ('1000', '18')
    """
    for pattern in IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def matches(pattern: re.Pattern[str], place: int) -> Callable[[str, str], float]:
    """1 if the number that ``pattern`` finds at ``place`` (0: the first, -1: the last) of an answer is the target's."""

    def score(answer: str, target: str) -> float:
        found = pattern.findall(answer)
        return float(bool(found) and number(found[place].strip()) == number(target))

    return score


TASK = GenerativeTask(
    dataset="openai/gsm8k",
    configuration="main",
    split="test",
    prompt=prompt,
    target=target,
    scorers={"strict-match": matches(MARKED, 0), "flexible-extract": matches(NUMBER, -1)},
    until=("Question:", "</s>", "<|im_end|>"),
    max_new_tokens=256,
    examples_split="train",
    shots=5,
)
