"""Tasks with their data, which is read from Arrow tables on disk.

Multiple choice is defined by lm-eval: prompts, choices, targets and metrics are its own, only the source of the rows is
replaced. Generative tasks are modules of ``evals/kinds/tasks/generative``. A data folder holds
``<dataset>/<configuration>/<split>`` folders that ``datasets.load_from_disk`` opens, where ``<dataset>`` is the
definition's ``dataset_path``, its last part or the data set's other name, and ``<configuration>`` its
``dataset_name``, or, where it has none, the only one there is. As in lm-eval, the definition's test split is taken, or
its validation split where the definition names no test split or the folder has none.
"""

from __future__ import annotations

import difflib
import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import lm_eval.api.task
import lm_eval.tasks
import lm_eval.utils
from datasets import Dataset, load_from_disk
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from tqdm import tqdm

from evals.kinds.tasks import TaskSettings, generative_of
from evals.kinds.tasks.free_text import FreeTextTask
from evals.kinds.tasks.generative import generative_tasks
from evals.kinds.tasks.generative_task import GenerativeTask, Row
from tapeout.errors import EvidenceError, RecipeError

# lm-eval's bar over the prompts of a task fills logs, and what takes long is answering them.
lm_eval.api.task.tqdm = partial(tqdm, disable=True)  # pyright: ignore[reportPrivateImportUsage]
# lm-eval compiles a task's templates again for every document and use: 50,000 times for the default recipe.
lm_eval.utils.env.from_string = lru_cache(256)(lm_eval.utils.env.from_string)  # pyright: ignore[reportAttributeAccessIssue]
# Data sets that lm-eval reads from a copy of another name.
OTHER_NAMES = {"siqa": "social_i_qa"}
COMPLETE = "store the data set again, or leave the task out of `evaluate.tasks`"
NULL = "<null of a row>"
TASK_LINE = re.compile(r"^task:[ \t]*[\"']?([\w.-]+)[\"']?[ \t]*$", re.MULTILINE)


class LocalTask(ConfigurableTask):
    """A task by lm-eval's definition over one local table, zero-shot."""

    def __init__(self, definition: Mapping[str, Any], split: str, rows: Dataset) -> None:
        self._rows = {split: rows}
        super().__init__(
            config={
                **{key: value for key, value in definition.items() if key not in ("tag", "group")},
                "training_split": None,
                "fewshot_split": None,
                "validation_split": split,
                "test_split": None,
                "num_fewshot": 0,
            }
        )

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.dataset: Any = self._rows

    @property
    def main_metric(self) -> str:
        """``acc_norm`` (log-likelihood by length of the choice) where the task defines it, else ``acc``."""
        names = {entry["metric"] for entry in self.config.metric_list or []}
        return "acc_norm" if "acc_norm" in names else "acc"

    def contents(self) -> list[str]:
        """What each document asks, without its name: equal where a data set asks the same question twice.

        The right answer is left out: social_iqa asks some questions twice and has another answer the second time.
        """
        return [self._asked(doc) for doc in self.task_docs]

    def _asked(self, doc: Any) -> str:
        if self.multiple_input:  # the text before the choices is the number of the right one
            return json.dumps([self.doc_to_choice(doc), self.doc_to_target(doc)])
        return json.dumps([self.doc_to_text(doc), self.doc_to_choice(doc)])

    def require_sound_rows(self) -> None:
        """:class:`EvidenceError` for a row without a right answer, and for one that asks null: a template writes
        ``None`` for it.
        """
        for number, doc in enumerate(self.task_docs):
            task = f"task {self.config.task!r}"
            remedy = f"correct the row of {self.config.dataset_path}, or remove it"
            try:
                if _holds_null(doc) and NULL in self._asked(_marked(doc)):
                    raise EvidenceError(f"{task}: it asks null: {doc}", expected="text", remedy=remedy)
                self.right_choice(doc)
            except EvidenceError as error:
                found = f"row {number} of {error.found}"
                raise EvidenceError(found, expected=error.expected, remedy=error.remedy) from error
            except Exception as error:  # definitions are arbitrary templates and functions over the columns
                raise EvidenceError(
                    f"row {number} of {task} cannot be read: {type(error).__name__}: {error}",
                    expected=f"a row as {self.config.dataset_path} has them; found {doc}",
                    remedy=remedy,
                ) from error

    def right_choice(self, doc: Any) -> int:
        """Index of the right answer. :class:`EvidenceError` where there is none: lm-eval would score it as wrong."""
        choices = self.doc_to_choice(doc)
        gold: Any = self.doc_to_text(doc) if self.multiple_input else self.doc_to_target(doc)
        index = choices.index(gold) if gold in choices else gold
        if not isinstance(index, int) or not 0 <= index < len(choices):
            raise EvidenceError(
                f"task {self.config.task!r}: the right answer reads {gold!r}, the choices {choices}",
                expected="one of the choices, or its index",
                remedy=f"bring the columns of {self.config.dataset_path}; found {', '.join(doc)}",
            )
        return index


def _holds_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_null(part) for part in value.values())
    return any(_holds_null(part) for part in value) if isinstance(value, list) else value is None


def _marked(value: Any) -> Any:
    """The row with ``NULL`` in the place of each null."""
    if isinstance(value, Mapping):
        return {name: _marked(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_marked(part) for part in value]
    return NULL if value is None else value


def load_tasks(settings: TaskSettings, data: Path) -> dict[str, LocalTask | FreeTextTask]:
    """The tasks of a recipe, by name; errors as of :func:`load_task`."""
    generative, examples = generative_of(settings), settings.examples
    return {
        name: load_generative_task(name, generative[name], data, examples[name])
        if name in generative
        else load_task(name, data)
        for name in settings.tasks
    }


def load_task(name: str, data: Path) -> LocalTask:
    """The multiple-choice task ``name`` of lm-eval over the tables under ``data``.

    :class:`RecipeError` for an unknown task or one that is not multiple choice with one right answer;
    :class:`EvidenceError` when its table is missing, lacks a column the definition reads, or has an unsound row.
    """
    path = definition_path(name)
    definition = load_yaml(path, resolve_func=True, recursive=True)
    if "class" in definition or definition.get("output_type") != "multiple_choice":
        raise RecipeError(
            f"task {name!r} is {definition.get('output_type', 'a Python class')}",
            expected=f"a multiple-choice task of lm-eval, or one of {', '.join(generative_tasks())}",
            remedy="choose another in `evaluate.tasks`, or add a generative task (docs/extending.md)",
        )
    split, table = find_table(data, name, definition)
    rows = _rows(table, name)
    try:
        task = LocalTask(definition, split, rows)
    except Exception as error:  # definitions are arbitrary templates and functions over the columns
        raise EvidenceError(
            f"task {name!r} cannot read {table}: {type(error).__name__}: {error}",
            expected=f"the columns of {definition['dataset_path']}; found {', '.join(rows.column_names)}",
            remedy="choose another task, or bring a table with the columns of the original data set",
        ) from error
    if task.multiple_target or "acc" not in {entry["metric"] for entry in task.config.metric_list or []}:
        raise RecipeError(
            f"task {name!r} has several right answers or no accuracy",
            expected="one right answer and `acc`, for pairing",
            remedy="choose another in `evaluate.tasks`",
        )
    task.require_sound_rows()
    return task


def load_generative_task(name: str, definition: GenerativeTask, data: Path, shots: int) -> FreeTextTask:
    """A task over the tables under ``data``, with so many solved examples before each question.

    :class:`EvidenceError` when a table is missing, holds too few examples, or has a row that the task cannot read.
    """
    rows = _readable_rows(name, definition, data, definition.split)
    examples = _readable_rows(name, definition, data, definition.examples_split)[:shots] if shots else []
    if len(examples) < shots:
        raise EvidenceError(
            f"task {name!r} has {len(examples)} examples in its split {definition.examples_split!r}",
            expected=f"{shots}",
            remedy="lower its number in `evaluate.shots`",
        )
    return FreeTextTask(name, definition, rows, examples)


def _readable_rows(name: str, definition: GenerativeTask, data: Path, split: str) -> list[Row]:
    """The rows of one split, each with text to ask and to compare with."""
    place = {"dataset_path": definition.dataset, "dataset_name": definition.configuration, "test_split": split}
    rows: list[Row] = _rows(find_table(data, name, place)[1], name).to_list()
    for number, row in enumerate(rows):
        try:
            text = definition.prompt(_marked(row)) + definition.target(_marked(row))
            if NULL in text:
                raise ValueError("null where text is read")
        except Exception as error:  # tasks are arbitrary functions over the columns
            raise EvidenceError(
                f"row {number} of task {name!r}, split {split!r}, cannot be read: {type(error).__name__}: {error}",
                expected=f"a row as {definition.dataset} has them; found {row}",
                remedy=f"correct the row of {definition.dataset}, or remove it",
            ) from error
    return rows


def _rows(table: Path, name: str) -> Dataset:
    """All rows of a table, at least one; :class:`EvidenceError` where it cannot be read."""
    # In memory: a definition's `process_docs` would else write its result beside the table.
    try:
        rows = load_from_disk(str(table), keep_in_memory=True)
    except (OSError, ValueError, KeyError, IndexError) as error:  # IndexError: no rows
        raise EvidenceError(
            f"{table} holds no rows, or cannot be read: {error}", expected=f"a table for task {name!r}", remedy=COMPLETE
        ) from error
    if not isinstance(rows, Dataset) or len(rows) == 0:
        raise EvidenceError(f"{table} holds no rows", expected=f"a table for task {name!r}", remedy=COMPLETE)
    return rows


def definition_path(name: str) -> Path:
    """The YAML file that defines a task."""
    known = _definitions()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3)
    raise RecipeError(
        f"lm-eval has no task {name!r}",
        expected=f"one of its tasks, such as {', '.join(near)}"
        if near
        else f"one of its tasks, or {', '.join(generative_tasks())}",
        remedy="correct `evaluate.tasks`",
    )


@cache
def _definitions() -> dict[str, Path]:
    """The file of each task, by its name. ``TaskManager`` parses all 13,000 files (15 s); this reads text (1 s)."""
    found: dict[str, Path] = {}
    for path in sorted(Path(lm_eval.tasks.__file__).parent.rglob("*.yaml")):
        for name in TASK_LINE.findall(path.read_text(errors="replace")):
            found.setdefault(name, path)
    return found


def find_table(data: Path, name: str, definition: Mapping[str, Any]) -> tuple[str, Path]:
    """(split, folder) of the table the definition of task ``name`` reads."""
    dataset, configuration = str(definition["dataset_path"]), definition.get("dataset_name")
    splits = [definition[key] for key in ("test_split", "validation_split") if definition.get(key)]
    short = dataset.rpartition("/")[2]
    for place in (data / dataset, data / short, data / OTHER_NAMES.get(short, short)):
        folders = [place / configuration] if configuration else sorted(p for p in place.glob("*") if p.is_dir())
        if len(folders) != 1:
            continue
        for split in splits:
            if (folders[0] / split / "state.json").is_file():
                return split, folders[0] / split
    raise EvidenceError(
        f"no table for task {name!r} in {data}",
        expected=" or ".join(f"{short}/{configuration or '<one folder>'}/{split}" for split in splits)
        + ", written by `datasets.save_to_disk`",
        remedy="add it to `data.source`, or leave the task out of `evaluate.tasks`",
    )


def share_out(sizes: Mapping[str, int], items: int) -> dict[str, int]:
    """Divide ``items`` evenly over the tasks: each is judged by itself, too. A task that has fewer gives all it has.

    >>> share_out({"a": 600, "b": 300, "c": 100}, 15)
    {'a': 5, 'b': 5, 'c': 5}
    >>> share_out({"a": 600, "b": 300, "c": 100}, 501)
    {'a': 201, 'b': 200, 'c': 100}
    """
    shares: dict[str, int] = {}
    for left, task in zip(range(len(sizes), 0, -1), sorted(sizes, key=lambda task: sizes[task]), strict=True):
        shares[task] = min(sizes[task], (items - sum(shares.values())) // left)
    return {task: shares[task] for task in sizes}


def choose_documents(contents: Mapping[str, Sequence[str]], items: int, seed: int) -> dict[str, list[int]]:
    """Document numbers per task, ascending, drawn without replacement; each task's draw depends on its name alone.

    ``contents``: what each document of a task asks; of equal ones the first is drawn, if any. Tasks whose share is 0
    are left out.
    """
    distinct = {task: _first_of_equals(asked) for task, asked in contents.items()}
    sizes = {task: len(numbers) for task, numbers in distinct.items()}
    return {
        task: sorted(random.Random(f"{seed}/{task}").sample(distinct[task], count))
        for task, count in share_out(sizes, items).items()
        if count
    }


def _first_of_equals(contents: Sequence[str]) -> list[int]:
    first: dict[str, int] = {}
    for number, content in enumerate(contents):
        first.setdefault(content, number)
    return list(first.values())
