"""Generative tasks: prompts, stop strings and scores as lm-eval's, and the statistics of scores between 0 and 1."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from pydantic import ValidationError
from tokenizers import Tokenizer

from evals.check import Outcome
from evals.kinds.tasks import AnswerItem, TaskItem, TaskSettings, discordant
from evals.kinds.tasks.free_text import FreeTextTask, answer_items
from evals.kinds.tasks.generative import generative_tasks
from evals.kinds.tasks.generative.gsm8k import TASK
from evals.kinds.tasks.harness import EngineLM
from evals.kinds.tasks.questions import definition_path, load_generative_task
from evals.kinds.text.measure import questions, task_metrics
from evals.statistics import paired_difference, proportion
from pipeline.recipe import Recipe
from tapeout.errors import EvidenceError, RecipeError
from tests.fake_engine import History
from tests.unit.test_gate import DEFAULT, SOURCES, judge, make, task_items
from tests.unit.test_harness import answerer, words

DRAWN = 300


def sums(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows in GSM8K's columns."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        one, other = draw.randrange(10, 9999), draw.randrange(10, 9999)
        worked = (
            f"Together that is {one} + {other} = <<{one}+{other}={one + other}>>{one + other}.\n#### {one + other:,}"
        )
        rows.append({"question": f"Ann has {one} pens and Bob has {other}. How many?", "answer": worked})
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables")
    for split, rows in (("train", sums(8, 1)), ("test", sums(12, 2))):
        Dataset.from_list(rows).save_to_disk(str(root / "gsm8k/main" / split))
    return root


def lm_evals(data: Path, shots: int) -> Any:
    """lm-eval's own task over the same tables, with the first examples for every question."""
    from datasets import load_from_disk
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    class Local(ConfigurableTask):
        def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
            self.dataset: Any = {split: load_from_disk(str(data / "gsm8k/main" / split)) for split in ("train", "test")}

    definition = load_yaml(definition_path("gsm8k"), resolve_func=True, recursive=True)
    config = {name: value for name, value in definition.items() if name != "tag"}
    return Local(config=config | {"num_fewshot": shots, "fewshot_config": {"sampler": "first_n", "split": "train"}})


@pytest.mark.parametrize("shots", [0, 3])
def test_prompts_are_lm_evals(data: Path, shots: int) -> None:
    ours, theirs = load_generative_task("gsm8k", TASK, data, shots), lm_evals(data, shots)
    for number, row in enumerate(theirs.task_docs):
        assert ours.prompt(number) == theirs.fewshot_context(row, shots)
        assert ours.definition.target(ours.rows[number]) == theirs.doc_to_target(row)
    settings = theirs.config.generation_kwargs
    assert list(TASK.until) == settings["until"] and theirs.config.num_fewshot == shots
    assert TASK.shots == load_definition()["num_fewshot"] and not settings["do_sample"]


def load_definition() -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(definition_path("gsm8k"), resolve_func=True, recursive=True)


ENDINGS: tuple[Callable[[str], str], ...] = (
    lambda n: f"#### {n}",
    lambda n: f" so #### {n}.\n\n#### 7",
    lambda n: f"#### ${n}",
    lambda n: f"####{n}",
    lambda n: f"The answer is ${n}.",
    lambda n: f"It is -{n}",
    lambda n: f"{n} pens, not 12",
    lambda n: f"12, no {n}",
    lambda n: n.replace(",", ""),
    lambda _: "I do not know.",
    lambda _: "",
    lambda _: ".,",
)


def test_scores_are_lm_evals(data: Path) -> None:
    """Of answers with the right and a wrong number, by both of its filters."""
    from lm_eval.api.instance import Instance

    theirs, seen = lm_evals(data, 0), set[tuple[float, ...]]()
    docs = list(theirs.task_docs)
    for number, row in enumerate(docs):
        right, wrong = row["answer"].rpartition("#### ")[2], docs[number - 1]["answer"].rpartition("#### ")[2]
        for answer in (ending(each) for ending in ENDINGS for each in (right, wrong)):
            instance = Instance("generate_until", row, ("", {}), 0)
            instance.resps = [answer]
            theirs._instances = [instance]
            theirs.apply_filters()
            expected = {
                name: float(theirs.process_results(row, [found])["exact_match"])
                for name, found in ((name, instance.filtered_resps[name]) for name in TASK.scorers)
            }
            assert {name: TASK.score(answer, row["answer"], name) for name in TASK.scorers} == expected, answer
            seen.add(tuple(expected.values()))
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1)}  # strict and flexible differ both ways


def spoken(engine: History, tokens: list[int], count: int) -> list[str]:
    """The words that an engine says behind these tokens."""
    for _ in range(count):
        tokens = [*tokens, int(engine.engine.logits_after(tokens).argmax())]
    return [f"w{token}" for token in tokens[-count:]]


def test_answers_are_generated_cut_scored_and_paired() -> None:
    engines = [History(max_tokens=32, noise=noise) for noise in (0.0, 2.0)]
    left, right = (EngineLM(engine, words(), stop_tokens=[31], bos_token=None, answerer=answerer) for engine in engines)
    rows = [{"question": f"w{n} w{n + 1}", "answer": spoken(engines[0], [3, 4, n, n + 1], 6)[2]} for n in range(8)]
    toy = replace(
        TASK,
        prompt=lambda row: row["question"],
        target=lambda row: row["answer"],
        scorers={"has": lambda answer, target: float(target in answer.split()), "none": lambda *_: 0.25},
        until=(rows[0]["answer"],),
        max_new_tokens=6,
    )
    task = FreeTextTask("toy", toy, rows, [{"question": "w3", "answer": "w4"}])
    assert task.prompt(0) == "w3 w4\n\nw0 w1"
    items = answer_items(task, [0, 2, 5], left, right)
    assert [item.doc_id for item in items] == [0, 2, 5]
    assert len({item.doc_hash for item in items}) == len({item.prompt_hash for item in items}) == 3
    for item in items:
        answer = spoken(engines[0], [3, 4, item.doc_id, item.doc_id + 1], 6)
        stop = answer.index(toy.until[0]) if toy.until[0] in answer else len(answer)
        assert item.baseline_answer.split() == answer[:stop]
        assert item.baseline_score == float(item.target in answer[:stop]) and item.metric == "has"
    assert any(item.changed for item in items)
    assert answer_items(task, [0, 2, 5], left, right) == items
    assert items[0].baseline_score == 0 and items[1].baseline_score == 1  # cut before the word that was wanted
    with pytest.raises(EvidenceError, match=r"question 0 of task toy has 4 tokens(.|\n)*at most 2"):
        replaced = EngineLM(History(max_tokens=8), words(), stop_tokens=[31], bos_token=None)
        task.require_room([0], replaced)
    with pytest.raises(EvidenceError, match="score from 0 to 1"):
        replace(toy, scorers={"wild": lambda *_: 1.5}).score("a", "b")


def test_all_scorers_are_in_the_metrics() -> None:
    items = [answer(0, "#### 5", "5"), answer(1, "no", "#### 5")]
    metrics = task_metrics(items)
    assert (metrics["baseline_gsm8k"], metrics["candidate_gsm8k"], metrics["flips"]) == (0.5, 0.5, 1.0)
    assert metrics["baseline_gsm8k_flexible-extract"] == 0.5 and metrics["candidate_gsm8k_flexible-extract"] == 1.0


def test_what_a_task_cannot_read_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"has 8 examples in its split 'train'(.|\n)*evaluate.shots"):
        load_generative_task("gsm8k", TASK, data, 9)
    for number, (rows, found) in enumerate(
        (
            ([*sums(1, 0), {"question": "q", "answer": "7"}], "no number behind"),
            ([*sums(1, 0), {"question": None, "answer": "#### 7"}], "null"),
            ([{"question": "q", "solution": "#### 7"}], "KeyError"),
        )
    ):
        Dataset.from_list(rows).save_to_disk(str(tmp_path / f"{number}/gsm8k/main/test"))
        with pytest.raises(EvidenceError, match=found):
            load_generative_task("gsm8k", TASK, tmp_path / f"{number}", 0)
    Dataset.from_list(sums(2, 0)).save_to_disk(str(tmp_path / "gsm8k/main/test"))
    assert len(load_generative_task("gsm8k", TASK, tmp_path, 0).rows) == 2
    with pytest.raises(EvidenceError, match="gsm8k/main/train"):
        load_generative_task("gsm8k", TASK, tmp_path, 1)


def test_recipes_name_generative_tasks() -> None:
    def recipe(**evaluate: Any) -> Recipe:
        return Recipe.model_validate({**SOURCES, "evaluate": evaluate})

    both = recipe(tasks=["piqa", "gsm8k"], shots={"gsm8k": 2})
    assert "gsm8k/main" in both.datasets and both.conflicts() == []
    assert both.section(TaskSettings).examples == {"gsm8k": 2}
    assert recipe(tasks=["gsm8k"]).section(TaskSettings).examples == {"gsm8k": 5}
    with pytest.raises(ValidationError, match="piqa is no generative task"):
        recipe(tasks=["piqa"], shots={"piqa": 1})
    with pytest.raises(ValidationError, match="an answer of task gsm8k, with a prompt of one: 257 positions"):
        Recipe.model_validate({**SOURCES, "evaluate": {"tasks": ["gsm8k"]}, "export": {"max_positions": 256}})


def test_questions_are_drawn_as_those_of_choices(data: Path) -> None:
    ((task, numbers),) = questions(TaskSettings(tasks=("gsm8k",), items=5, shots={"gsm8k": 1}), data, 3)
    assert isinstance(task, FreeTextTask) and len(numbers) == 5 and numbers == sorted(numbers)


# --- the gate --------------------------------------------------------------------------------------------------------


def answer(number: int, baseline: str, candidate: str, right: str = "5") -> AnswerItem:
    target = f"#### {right}"
    return AnswerItem(
        task="gsm8k",
        doc_id=number,
        doc_hash=f"sum {number}",
        prompt_hash=f"prompt {number}",
        target_hash=f"target {number}",
        metric=TASK.metric,
        target=target,
        baseline_answer=baseline,
        candidate_answer=candidate,
        baseline_score=TASK.score(baseline, target),
        candidate_score=TASK.score(candidate, target),
    )


def answers(count: int, lost: int, gained: int = 0) -> tuple[TaskItem, ...]:
    right, wrong = "#### 5", "#### 6"
    pairs = [(right, wrong)] * lost + [(wrong, right)] * gained + [(right, right)] * (count - lost - gained)
    return tuple(answer(number, *pair) for number, pair in enumerate(pairs))


def test_answers_are_judged_with_choices_by_the_same_bounds() -> None:
    """Lost answers count as lost choices do: the pooled check is that of as many items of multiple choice."""
    choices = task_items(2000, 10, 10)
    for lost, outcome in ((20, Outcome.PASS), (250, Outcome.FAIL)):
        verdict = judge(make((*choices, *answers(500, lost))), DEFAULT)
        alike = judge(make(task_items(2500, 10 + lost, 10)), DEFAULT)
        for name in ("accuracy", "flips"):
            assert verdict.check(name).model_dump() == alike.check(name).model_dump()
        assert verdict.check("accuracy").outcome is outcome
        (own,) = (each for each in verdict.slices if each.task == "gsm8k")
        assert (own.items, own.lost, own.gained, own.baseline_accuracy) == (500, lost, 0, 1.0)
    assert verdict.check("accuracy_worst_task").reason.startswith("gsm8k: ")


def test_answers_that_are_scored_otherwise_are_refused() -> None:
    items = answers(500, 20)
    edited = (items[0].model_copy(update={"candidate_score": 1.0}), *items[1:])
    with pytest.raises(EvidenceError, match="1 of 500 answers are scored otherwise than the task scores their own"):
        judge(make((*task_items(2000, 10, 10), *edited)), DEFAULT)
    other = tuple(item.model_copy(update={"task": "unknown"}) for item in items)
    with pytest.raises(EvidenceError, match="500 of 500 answers are scored otherwise"):
        judge(make((*task_items(2000, 10, 10), *other)), DEFAULT)
    twice = (*items[:-1], items[-1].model_copy(update={"doc_hash": items[0].doc_hash}))
    with pytest.raises(EvidenceError, match="copies, with the same document"):
        judge(make((*task_items(2000, 10, 10), *twice)), DEFAULT)


def test_scores_in_part_keep_the_promise_of_the_bounds() -> None:
    """An engine on the margin passes in at most 5 % of runs, also where scores lie between 0 and 1."""
    rng, n, margin = np.random.default_rng(0), 400, 0.05
    passes = flips = 0
    for _ in range(DRAWN):
        worse = np.where(rng.random(n) < 0.2, rng.uniform(0, 1, n), 0)  # mean 0.1
        better = np.where(worse == 0, np.where(rng.random(n) < 0.125, rng.uniform(0, 1, n), 0), 0)  # mean 0.05
        passes += paired_difference(float(worse.sum()), float(better.sum()), n, 0.95).lower > -margin
        flips += proportion(float(worse.sum() + better.sum()), n, 0.95).upper < 0.15
    assert passes <= 0.05 * DRAWN + 2 and flips <= 0.05 * DRAWN + 2
    half = [answer(number, "", "").model_copy(update={"baseline_score": 0.75}) for number in range(4)]
    assert discordant(half) == (3.0, 0.0)


def test_tasks_that_only_lm_eval_has_are_refused_with_a_remedy(data: Path) -> None:
    with pytest.raises(RecipeError, match=r"generate_until(.|\n)*gsm8k(.|\n)*docs/extending.md"):
        questions(TaskSettings(tasks=("gsm8k_cot",)), data, 0)
    assert generative_tasks()["gsm8k"] is TASK


def test_prompts_are_read_as_they_are_written(tiny_checkpoint: Path) -> None:
    """The tokenizer of the tiny llama reads a prompt with its examples back as it was written."""
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    task = FreeTextTask("gsm8k", TASK, sums(2, 3), sums(2, 4))
    lm = EngineLM(History(1024, max_tokens=4096), tokenizer, stop_tokens=[2], bos_token=None)
    assert tokenizer.decode(lm.tok_encode(task.prompt(0))) == task.prompt(0)
