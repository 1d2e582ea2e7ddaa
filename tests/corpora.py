"""Small Sources with tables of text, and texts in many scripts."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.sources.corpus import calibration_and_heldout
from pipeline.sources.source import FOLDERS, Source
from tapeout.artifact import Artifact, create, load
from tapeout.recipe import Calibrate

SCRIPTS = {
    "Latin": ("a", "z"),
    "Cyrillic": ("а", "я"),
    "Greek": ("α", "ω"),
    "Arabic": ("ا", "ي"),
    "Hebrew": ("א", "ת"),
    "Devanagari": ("अ", "ह"),
    "Thai": ("ก", "ฮ"),
    "Khmer": ("ក", "អ"),
    "Han": ("一", "龥"),
    "Hiragana": ("ぁ", "ん"),
    "Hangul": ("가", "힣"),
}


def make_source(folder: Path, tables: dict[str, dict[str, list[Any]]]) -> Artifact[Source]:
    """A Source whose data sets are ``{name: columns}``."""
    from datasets import Dataset

    with create(folder, Source) as draft:
        for name, columns in tables.items():
            Dataset.from_dict(columns).save_to_disk(draft.folder / "data" / FOLDERS.get(name, name) / "validation")
        (draft.folder / "model").mkdir()
        record = Source(
            model_source="file:x",
            model_sha256=None,
            model_revision=None,
            model_kind="gguf",
            model_entry="model/x",
            model_licenses=(),
            data_source="file:y",
            data_sha256=None,
            data_revision=None,
            data_entry="data",
            data_licenses=(),
            datasets=tuple(sorted(FOLDERS.get(name, name) for name in tables)),
        )
        draft.finish(record, parents={})
    return load(folder, Source)


@cache
def bytes_tokenizer() -> Tokenizer:
    """A token for each byte, so that tests can count."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer: Any = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def choose(
    source: Artifact[Source],
    samples: int,
    heldout: int,
    seed: int = 0,
    column: str = "passage",
    document_tokens: int = 1000,
    **fields: Any,
) -> tuple[list[str], list[str]]:
    """``fields``: of section ``calibrate``. Tests take fewer samples and shorter texts than a recipe may."""
    wanted = Calibrate().model_copy(update={"column": column, "samples": samples, "min_tokens": 1, **fields})
    return calibration_and_heldout(source, wanted, heldout, seed, bytes_tokenizer(), document_tokens=document_tokens)


def article(script: str, length: int, seed: int, *, spaces: bool = False) -> str:
    """So many random signs of a script."""
    first, last = map(ord, SCRIPTS[script])
    draw = random.Random(f"{script} {seed}")
    signs = [chr(draw.randint(first, last)) for _ in range(length)]
    return "".join(sign + (" " if spaces and draw.random() < 0.2 else "") for sign in signs)
