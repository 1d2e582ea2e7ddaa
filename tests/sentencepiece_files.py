"""Small files of sentencepiece, trained as Llama's are: byte fallback, digits apart, text as it is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from tests.tiny import tiny_texts

SIZE = 800


def write_sentencepiece(path: Path, kind: str, **options: Any) -> None:
    """``kind``: bpe or unigram. ``options``: of sentencepiece's trainer, instead of Llama's."""
    from sentencepiece import SentencePieceTrainer

    llama = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
    }
    written, lines = io.BytesIO(), [line for text in tiny_texts(60, 1) for line in text.split("\n")]
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        model_type=kind,
        vocab_size=SIZE,
        byte_fallback=True,
        minloglevel=2,
        **{**llama, **options},
    )
    path.write_bytes(written.getvalue())
