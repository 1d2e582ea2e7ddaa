"""The text every engine reads: prompts to time, and held-out documents to compare predictions on.

Token ids are made once, here, and given to all engines as they are, so no tokenizer or template differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.sources.corpus import calibration_and_heldout
from pipeline.sources.source import Source
from tapeout import artifact
from tapeout.errors import EvidenceError
from tapeout.recipe import Recipe


@dataclass(frozen=True)
class Corpus:
    """``prompts``: as many as the largest batch, of equal length. ``long_prompts``: one for each prefill length."""

    prompts: tuple[tuple[int, ...], ...]
    long_prompts: dict[int, tuple[int, ...]]
    documents: tuple[tuple[int, ...], ...]


def read_corpus(
    recipe: Recipe,
    source: Path,
    tokenizer_file: Path,
    *,
    prompts: int,
    prompt_tokens: int,
    prefill_tokens: tuple[int, ...],
    documents: int,
    document_tokens: int,
) -> Corpus:
    """The pipeline's own held-out passages: the first ``documents`` of at least two tokens, each cut to its length.

    Prompts are cut from the calibration passages, run together: speed does not depend on what they say, and the
    held-out text stays out of the timing. :class:`EvidenceError` when there is too little text.
    """
    from tokenizers import Tokenizer

    from evals.harness import beginning_of_text, encode

    settings = recipe.calibrate
    calibration, heldout = calibration_and_heldout(
        artifact.load(source, Source), settings.dataset, settings.column, settings.samples, documents, recipe.seed
    )
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    beginning = beginning_of_text(tokenizer)
    stream = [token for text in calibration for token in encode(tokenizer, text, None)]
    wanted = max(prompts * prompt_tokens, *prefill_tokens)
    if len(stream) < wanted:
        raise EvidenceError(
            f"the calibration text has {len(stream)} tokens", expected=f"{wanted} for the prompts", remedy="lower them"
        )
    return Corpus(
        prompts=tuple(tuple(stream[i * prompt_tokens : (i + 1) * prompt_tokens]) for i in range(prompts)),
        long_prompts={count: tuple(stream[:count]) for count in prefill_tokens},
        documents=tuple(tuple(encode(tokenizer, text, beginning)[:document_tokens]) for text in heldout),
    )
