"""Text for calibration, evaluation and shadow replay, read from the Arrow tables a Source holds."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.sources.overlap import Passages
from pipeline.sources.source import FOLDERS, Source, folder_of
from tapeout.artifact import Artifact
from tapeout.errors import SourceError

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer

    from tapeout.recipe import Calibrate

QUESTION = "question"  # the column of nq_open and trivia_qa that a user would type
CORRECT = "correct the column or the data set in the recipe, or the data source"


def calibration_and_heldout(
    source: Artifact[Source],
    wanted: Calibrate,
    heldout: int,
    seed: int,
    tokenizer: Tokenizer,
    *,
    document_tokens: int | None = None,
) -> tuple[list[str], list[str]]:
    """``wanted.samples`` texts to calibrate on and ``heldout`` others to evaluate on, from one column.

    The different texts are shuffled by ``seed``. The calibration texts are taken from their beginning, the held-out
    texts from their end, so that neither set changes when the other's count does. Left out are texts of less than
    ``wanted.min_tokens`` tokens, calibration texts whose first ``wanted.tokens`` tokens another has, held-out texts
    whose first ``document_tokens`` another has, and those that share a passage with a calibration text (BoolQ cuts
    several from one article). :class:`SourceError` if too few remain.
    """
    texts = _texts(data_folder(source), wanted.dataset, wanted.column)
    random.Random(seed).shuffle(texts)
    calibration: list[str] = []
    beginnings: set[tuple[int, ...]] = set()
    looked_at = short = 0
    for text in texts:
        if len(calibration) == wanted.samples:
            break
        looked_at += 1
        tokens: list[int] = tokenizer.encode(text).ids
        beginning = tuple(tokens[: wanted.tokens])
        short += len(tokens) < wanted.min_tokens
        if len(tokens) >= wanted.min_tokens and beginning not in beginnings:
            beginnings.add(beginning)
            calibration.append(text)
    passages, beginnings = Passages(calibration), set()
    judged: list[str] = []
    shared = 0
    for text in reversed(texts[looked_at:]):
        if len(judged) == heldout:
            break
        tokens = tokenizer.encode(text).ids
        beginning = tuple(tokens[:document_tokens])
        if len(tokens) < wanted.min_tokens:
            short += 1
        elif beginning in beginnings or passages.shared_with(text):
            shared += 1
        else:
            beginnings.add(beginning)
            judged.append(text)
    if len(calibration) < wanted.samples or len(judged) < heldout:
        raise SourceError(
            f"{wanted.dataset}.{wanted.column} has {len(texts)} different texts, enough for {len(calibration)} "
            f"calibration and {len(judged)} held-out texts: {short} have less than {wanted.min_tokens} tokens, "
            f"{shared} share a passage with another",
            expected=f"{wanted.samples} and {heldout}",
            remedy="lower calibrate.samples, evaluate.documents or calibrate.min_tokens, or choose a larger "
            "calibrate.dataset",
        )
    return calibration, judged


def chat_prompts(source: Artifact[Source], datasets: Sequence[str], count: int, seed: int) -> list[str]:
    """``count`` different questions, taken from the data sets in turn, each shuffled by ``seed``.

    A data set that runs out is skipped. :class:`SourceError` if all of them are too few.
    """
    queues: list[list[str]] = []
    for dataset in datasets:
        questions = _texts(data_folder(source), dataset, QUESTION)
        random.Random(f"{seed} {dataset}").shuffle(questions)
        queues.append(questions[::-1])
    prompts: dict[str, None] = {}  # ordered, and a question asked in two data sets counts once
    while len(prompts) < count and any(queues):
        for queue in queues:
            if queue and len(prompts) < count:
                prompts[queue.pop()] = None
    if len(prompts) < count:
        raise SourceError(
            f"{', '.join(datasets) or 'no data set'} has {len(prompts)} different questions",
            expected=f"{count}",
            remedy="lower shadow.prompts, or add to shadow.datasets",
        )
    return list(prompts)


def count_rows(data: Path, dataset: str, column: str) -> tuple[int, int, int]:
    """Rows of a column; of them those that are null or blank, which are left out; different texts in the others.

    :class:`SourceError` for a column that is missing, that holds no text, or where no text is left.
    """
    rows, texts = _column(data, dataset, column), _texts(data, dataset, column)
    blank = sum(1 for value in rows if not _stripped(value))
    if not texts:
        raise SourceError(
            f"{dataset}.{column} holds no text: of its {len(rows)} rows each is null or blank",
            expected="rows of text",
            remedy=CORRECT,
        )
    return len(rows), blank, len(texts)


def data_folder(source: Artifact[Source]) -> Path:
    return source.folder / source.record.data_entry


def _texts(data: Path, dataset: str, column: str) -> list[str]:
    """The different texts of a column, stripped, in the order of their first occurrence."""
    return list(dict.fromkeys(text for value in _column(data, dataset, column) if (text := _stripped(value))))


def _column(data: Path, dataset: str, column: str) -> list[str | None]:
    from datasets import Value

    table = _split(data, dataset, "validation")
    if column not in table.column_names:
        raise SourceError(
            f"{dataset} has no column {column!r}",
            expected="one of " + ", ".join(table.column_names),
            remedy="correct the column or the data set in the recipe",
        )
    held = table.features[column]
    if not isinstance(held, Value) or held.dtype not in ("string", "large_string", "string_view"):
        raise SourceError(
            f"{dataset}.{column} holds {held.dtype if isinstance(held, Value) else type(held).__name__}",
            expected="text",
            remedy="correct the column or the data set in the recipe, or store that column as text",
        )
    return table.select_columns([column])[:][column]


def _stripped(value: str | None) -> str:
    return (value or "").strip()


def _split(data: Path, dataset: str, split: str) -> Dataset:
    """One split of one data set, memory-mapped. :class:`SourceError` where there is none."""
    from datasets import Dataset

    folder = data / folder_of(dataset) / split
    if not (folder / "state.json").is_file():
        raise SourceError(
            f"no {split} split of {dataset!r} in {folder.parent}",
            expected=_held(data, dataset),
            remedy="choose one of those in the recipe, or a data source that holds it, and run `dvc repro fetch`",
        )
    try:
        if not json.loads((folder / "state.json").read_text())["_data_files"]:  # which `datasets` cannot open
            raise SourceError(f"{dataset} has no rows in its {split} split", expected="rows of text", remedy=CORRECT)
        return Dataset.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"the {split} split of {dataset!r} in {folder} cannot be read: {error}",
            expected="a folder as `datasets.Dataset.save_to_disk` writes it",
            remedy="store the data set again",
        ) from error


def _held(data: Path, dataset: str) -> str:
    splits = sorted(path.parent.name for path in (data / folder_of(dataset)).glob("*/state.json"))
    if splits:
        return "one of its splits " + ", ".join(splits)
    names = {folder: name for name, folder in FOLDERS.items()}
    held = sorted({path.relative_to(data).parents[1].as_posix() for path in data.rglob("state.json")})
    return "one of " + ", ".join(names.get(folder, folder) for folder in held)
