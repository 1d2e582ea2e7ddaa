"""A task whose answers are generated and scored: passages are continued."""

from __future__ import annotations

import json
from pathlib import Path

from tests.drills.checkout import Checkout

MODULE = '''"""Passages of BoolQ, to be continued. Scored by the share of words that are in the rest of the passage."""

from __future__ import annotations

from evals.kinds.tasks.generative_task import GenerativeTask, Row

SHOWN = 20  # words of a passage


def words(row: Row, shown: slice) -> str:
    return " ".join(row["passage"].split()[shown])


def share(answer: str, target: str) -> float:
    said = answer.split()
    return sum(word in target.split() for word in said) / max(len(said), 1)


TASK = GenerativeTask(
    dataset="google/boolq",
    configuration="none",
    split="validation",
    prompt=lambda row: words(row, slice(SHOWN)),
    target=lambda row: words(row, slice(SHOWN, None)),
    scorers={"share": share},
    until=(".",),
    max_new_tokens=12,
    examples_split="validation",
    shots=2,
)
'''
MOST_EDITED = 1


def test_a_generative_task(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "checkout")
    checkout.add("evals/kinds/tasks/generative/continued.py", MODULE)
    checkout.edit("docs/extending.md", "Generative tasks: ", "Generative tasks: `continued`, ")
    assert len(checkout.edited) <= MOST_EDITED
    checkout.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_extending.py")
    project = tmp_path / "project"
    found = checkout.stages(
        project, {"evaluate": {"tasks": ["piqa", "continued"], "items": 80, "shots": {"continued": 1}}}
    )
    assert found["items"] == {"continued": 40, "piqa": 40}
    assert {found["checks"][name] for name in ("accuracy", "accuracy_worst_task", "flips")} <= {"PASS", "INCONCLUSIVE"}
    lines = (project / "artifacts/evaluation/task_items.jsonl").read_text().splitlines()
    answered = [item for item in map(json.loads, lines) if item["task"] == "continued"]
    assert any(0 < item["baseline_score"] < 1 for item in answered)
    assert not any("." in item["baseline_answer"] for item in answered)
