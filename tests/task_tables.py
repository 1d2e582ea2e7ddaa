"""Tables in the columns of sciq (shared context) and winogrande (a context per choice), of held-out text."""

from __future__ import annotations

import random
from pathlib import Path

from datasets import Dataset

from tests.tiny import tiny_texts


def write_tables(root: Path) -> None:
    """24 questions each, where `evals.kinds.tasks.questions.load_task` finds them."""
    rng = random.Random(5)
    science, schemas = [], []
    for text in tiny_texts(24, 7):
        source = text.split()
        options = [" ".join(rng.sample(source, rng.choice([1, 1, 2]))) for _ in range(4)]
        names = ("distractor1", "distractor2", "distractor3", "correct_answer")
        science.append(
            {"support": " ".join(source[:30]), "question": " ".join(source[30:36])}
            | dict(zip(names, options, strict=True))
        )
        schemas.append(
            {
                "sentence": " ".join([*source[:12], "_", *source[13:20]]),
                "option1": source[12],
                "option2": options[0],
                "answer": rng.choice("12"),
            }
        )
    Dataset.from_list(science).save_to_disk(str(root / "sciq/none/validation"))
    Dataset.from_list(schemas).save_to_disk(str(root / "winogrande/winogrande_xl/validation"))
