"""The text for all engines: prompts for the timing, and held-out documents on which predictions are compared.

The text is tokenized once, here. All engines get the same token ids, so tokenizers and templates cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.sources.corpus import calibration_and_heldout
from pipeline.sources.source import Source
from tapeout import artifact
from tapeout.errors import EvidenceError
from tapeout.recipe import BaseRecipe

PREFILLS = 3  # of a turn: a single one would be the first after minutes in which the engine was stopped


@dataclass(frozen=True)
class Corpus:
    """``prompts`` have equal lengths, and fill the largest batch. ``long_prompts``: those of one turn, for each prefill
    length; they differ, so that no engine finds one in a cache.
    """

    prompts: tuple[tuple[int, ...], ...]
    long_prompts: dict[int, tuple[tuple[int, ...], ...]]
    documents: tuple[tuple[int, ...], ...]


def read_corpus(
    recipe: BaseRecipe,
    source: Path,
    tokenizer_file: Path,
    *,
    prompts: int,
    prompt_tokens: int,
    prefill_tokens: tuple[int, ...],
    documents: int,
    document_tokens: int,
) -> Corpus:
    """The pipeline's own held-out passages: the first ``documents`` of at least two tokens, each truncated to
    ``document_tokens``.

    Prompts are taken from the concatenated calibration passages. Speed does not depend on their content, and the
    held-out text is not used for timing. :class:`EvidenceError` if there is too little text.
    """
    from tokenizers import Tokenizer

    from evals.kinds.tasks.harness import bos_token_of, encode

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    calibration, heldout = calibration_and_heldout(
        artifact.load(source, Source),
        recipe.calibrate,
        documents,
        recipe.seed,
        tokenizer,
        document_tokens=document_tokens,
    )
    bos_token = bos_token_of(tokenizer)
    tokens = [token for text in calibration for token in encode(tokenizer, text, None)]
    required = max(prompts * prompt_tokens, *(PREFILLS * count for count in prefill_tokens))
    if len(tokens) < required:
        raise EvidenceError(
            f"the calibration text has {len(tokens)} tokens",
            expected=f"at least {required} for the prompts",
            remedy="use shorter prompts or smaller batches",
        )
    return Corpus(
        prompts=_cut(tokens, prompts, prompt_tokens),
        long_prompts={count: _cut(tokens, PREFILLS, count) for count in prefill_tokens},
        documents=tuple(tuple(encode(tokenizer, text, bos_token)[:document_tokens]) for text in heldout),
    )


def _cut(tokens: list[int], prompts: int, length: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokens[i * length : (i + 1) * length]) for i in range(prompts))
