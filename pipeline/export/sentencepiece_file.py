"""A tokenizer that is a file of sentencepiece alone: converted by transformers, and held against sentencepiece.

transformers takes the pieces over, but not all that sentencepiece does with white space: release 5.23 puts no space
before a text, which Llama's models were trained with. So forms of white space are tried in turn, and the one is taken
whose ids and texts are those of sentencepiece's own processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, normalizers

from tapeout.errors import ExportError, one_line

SPACE = "▁"
# What follows the normalizer that transformers makes, which writes each space as SPACE.
PREFIX: tuple[Any, ...] = (normalizers.Prepend(SPACE),)
SQUEEZED: tuple[Any, ...] = (
    normalizers.Replace(Regex(f"{SPACE}+"), SPACE),
    normalizers.Replace(Regex(f"^{SPACE}|{SPACE}$"), ""),
)
FORMS: tuple[tuple[Any, ...], ...] = (PREFIX, (*SQUEEZED, *PREFIX), (), SQUEEZED)


def converted(checkpoint: Path, name: str, texts: Sequence[str]) -> Any:
    """The tokenizer of the file ``name`` in a checkpoint folder, as transformers has it once it is converted.

    :class:`ExportError` for a file that cannot be converted, and for one that encodes or decodes a text in another way
    than sentencepiece: the error shows the first.
    """
    from sentencepiece import SentencePieceProcessor
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    try:
        processor: Any = SentencePieceProcessor(model_file=str(checkpoint / name))
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(checkpoint, vocab_file=str(checkpoint / name))
    except Exception as error:  # two libraries' own words about a file that they cannot read
        raise ExportError(
            f"{checkpoint / name} cannot be converted to tokenizer.json: {one_line(error)}",
            expected="a file of sentencepiece, of type BPE or unigram",
            remedy="fetch the checkpoint again, or copy tokenizer.json from the model that it was made from",
        ) from error
    backend = tokenizer.backend_tokenizer
    normalizer, decoder, found = backend.normalizer, backend.decoder, ""
    for form in FORMS:
        own = () if normalizer is None else (normalizer,)
        backend.normalizer = normalizers.Sequence([*own, *form])
        prefix = (decoders.Strip(" ", 1, 0),) if form[-1:] == PREFIX else ()
        backend.decoder = decoders.Sequence([decoder, *prefix])
        difference = first_difference(processor, backend, texts)
        if not difference:
            return tokenizer
        found = found or difference
    raise ExportError(
        f"{name}, converted to tokenizer.json, is another tokenizer than sentencepiece makes of it: {found}",
        expected="the ids and the text of sentencepiece, which the model was trained with",
        remedy="copy tokenizer.json from the model that this checkpoint was made from",
    )


def first_difference(processor: Any, backend: Any, texts: Sequence[str]) -> str:
    """The first text whose ids, or their text, sentencepiece and a converted tokenizer do not agree on; or nothing."""
    for text in texts:
        expected: list[int] = processor.encode(text)
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        if ids != expected:
            return f"{text[:40]!r} is {ids[:8]} converted, by sentencepiece {expected[:8]}"
        if (decoded := backend.decode(ids, skip_special_tokens=False)) != processor.decode(ids):
            return f"the ids of {text[:40]!r} are {decoded[:40]!r} converted, by sentencepiece another text"
    return ""
