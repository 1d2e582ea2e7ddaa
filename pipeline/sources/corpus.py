"""Text for calibration, evaluation and shadow replay, read from the Arrow tables a Source holds."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.sources.source import FOLDERS, Source, folder_of
from tapeout.artifact import Artifact
from tapeout.errors import SourceError

if TYPE_CHECKING:
    from datasets import Dataset


QUESTION = "question"  # the column of nq_open and trivia_qa that a user would type
OVERLAP_WORDS = 13  # texts that share a run this long count as the same: Brown et al. 2020 (GPT-3), appendix C


def read_split(source: Artifact[Source], dataset: str, split: str = "validation") -> Dataset:
    """One split of one data set, memory-mapped. :class:`SourceError` when the source does not hold it."""
    from datasets import Dataset

    folder = source.folder / source.record.data_entry / folder_of(dataset) / split
    if not (folder / "state.json").is_file():
        raise SourceError(
            f"no {split} split of {dataset!r} in {folder.parent}",
            expected=_held(source, dataset),
            remedy="choose one of those in the recipe, or a data source that holds it, and run `dvc repro fetch`",
        )
    return Dataset.load_from_disk(str(folder))


def calibration_and_heldout(
    source: Artifact[Source], dataset: str, column: str, samples: int, heldout: int, seed: int, min_chars: int = 200
) -> tuple[list[str], list[str]]:
    """``samples`` texts to calibrate on and ``heldout`` others to evaluate on, from one column.

    Repeated texts count once and those under ``min_chars`` not at all; the rest is shuffled by ``seed``. The
    calibration texts are its beginning, the held-out texts come from its end, so that neither set changes when the
    other's count does, except for held-out texts that share ``OVERLAP_WORDS`` words in a row with a calibration text:
    those are skipped (BoolQ cuts several passages from one article). :class:`SourceError` if too few remain.
    """
    texts = [text for text in _texts(source, dataset, column) if len(text) >= min_chars]
    random.Random(seed).shuffle(texts)
    calibration = texts[:samples]
    seen = {run for text in calibration for run in _word_runs(text)}
    judged: list[str] = []
    for text in reversed(texts[samples:]):
        if len(judged) == heldout:
            break
        if seen.isdisjoint(_word_runs(text)):
            judged.append(text)
    if len(calibration) < samples or len(judged) < heldout:
        raise SourceError(
            f"{dataset}.{column} has {len(texts)} different texts of at least {min_chars} characters, "
            f"enough for {len(calibration)} calibration and {len(judged)} held-out texts",
            expected=f"{samples} and {heldout}",
            remedy="lower calibrate.samples or evaluate.documents, or choose a larger calibrate.dataset",
        )
    return calibration, judged


def chat_prompts(source: Artifact[Source], datasets: Sequence[str], count: int, seed: int) -> list[str]:
    """``count`` different questions, taken from the data sets in turn, each shuffled by ``seed``.

    A data set that runs out is skipped. :class:`SourceError` if all of them are too few.
    """
    queues: list[list[str]] = []
    for dataset in datasets:
        questions = _texts(source, dataset, QUESTION)
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


def _texts(source: Artifact[Source], dataset: str, column: str) -> list[str]:
    """The different texts of a column, stripped, in the order of their first occurrence."""
    table = read_split(source, dataset)
    if column not in table.column_names:
        raise SourceError(
            f"{dataset} has no column {column!r}",
            expected="one of " + ", ".join(table.column_names),
            remedy="correct the column or the data set in the recipe",
        )
    values = table.select_columns([column])[:][column]
    if wrong := next((v for v in values if not isinstance(v, str)), None):
        raise SourceError(f"{dataset}.{column} holds {type(wrong).__name__}", expected="text")
    return list(dict.fromkeys(text for value in values if (text := value.strip())))


def _word_runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(max(1, len(words) - OVERLAP_WORDS + 1))}


def _held(source: Artifact[Source], dataset: str) -> str:
    folder = source.folder / source.record.data_entry / folder_of(dataset)
    splits = sorted(p.parent.name for p in folder.glob("*/state.json"))
    if splits:
        return "one of its splits " + ", ".join(splits)
    names = {folder: name for name, folder in FOLDERS.items()}
    return "one of " + ", ".join(names.get(held, held) for held in source.record.datasets)
