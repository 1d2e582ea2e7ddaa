"""A task whose answers are generated and scored: say the words of a question again."""

from __future__ import annotations

import json
from pathlib import Path

from tests.drills.checkout import Checkout

MODULE = '''"""Echo: questions of nq_open, to be said again. The score is the share of their words in an answer."""

from __future__ import annotations

from evals.kinds.tasks.generative_task import GenerativeTask


def share(answer: str, target: str) -> float:
    wanted = target.split()
    return sum(word in answer.split() for word in wanted) / len(wanted)


TASK = GenerativeTask(
    dataset="nq_open",
    configuration="none",
    split="validation",
    prompt=lambda row: f"Say it again: {row['question']}\\nAgain:",
    target=lambda row: row["question"],
    scorers={"share": share},
    until=("\\n",),
    max_new_tokens=12,
    examples_split="validation",
    shots=2,
)
'''
MOST_EDITED = 1


def test_a_generative_task(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "checkout")
    checkout.add("evals/kinds/tasks/generative/echo.py", MODULE)
    checkout.edit("docs/extending.md", "Generative tasks: ", "Generative tasks: `echo`, ")
    assert len(checkout.edited) <= MOST_EDITED
    checkout.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_extending.py")
    project = tmp_path / "project"
    found = checkout.stages(project, {"evaluate": {"tasks": ["piqa", "echo"], "items": 80, "shots": {"echo": 1}}})
    assert found["items"] == {"echo": 40, "piqa": 40}
    assert {found["checks"][name] for name in ("accuracy", "accuracy_worst_task", "flips")} <= {"PASS", "INCONCLUSIVE"}
    lines = (project / "artifacts/evaluation/task_items.jsonl").read_text().splitlines()
    answered = [item for item in map(json.loads, lines) if item["task"] == "echo"]
    assert any(0 < item["baseline_score"] < 1 for item in answered), "the tiny llama repeats some words, not all"
    assert all(item["baseline_answer"].count("\n") == 0 for item in answered)
