"""Parity: does the engine compute what the quantized checkpoint it was built from says?

The reference is any function from token ids to logits, so this module needs neither torch nor the checkpoint format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from engines.protocol import Engine, FloatArray
from evals.reports import ParityItem, ParityReport, write_items
from evals.text import CHUNK_TOKENS, kl_divergences, token_hash
from pipeline import artifact
from pipeline.artifact import Artifact
from pipeline.errors import EvidenceError

ITEMS_FILE = "parity_items.jsonl"
Reference = Callable[[Sequence[int]], FloatArray]


def parity(
    engine: Engine,
    reference: Reference,
    documents: Sequence[Sequence[int]],
    folder: Path,
    *,
    quantized: str,
    parents: Mapping[str, str],
) -> Artifact[ParityReport]:
    """Write the ParityReport of ``engine`` against ``reference``; ``quantized`` is the QuantizedModel's digest."""
    items = compare(engine, reference, documents)
    with artifact.create(folder, ParityReport) as draft:
        write_items(draft.folder / ITEMS_FILE, items)
        record = ParityReport(candidate=engine.digest, quantized=quantized, documents=len(items))
        draft.finish(record, parents=parents)
    return artifact.load(folder, ParityReport)


def compare(engine: Engine, reference: Reference, documents: Sequence[Sequence[int]]) -> list[ParityItem]:
    """KL(reference || engine) in nats and top-token agreement at every position of every document, in order.

    ``reference(tokens)`` gives float32 logits ``[S, V]``. The engine reads each document into slot 0. One document's
    logits are held at a time. :class:`EvidenceError` when there is nothing to compare, when a document does not fit
    the engine, when shapes differ, or when a logit is not finite.
    """
    if not documents:
        raise EvidenceError(
            "no documents to compare", expected="at least one", remedy="check data.source and evaluate.documents"
        )
    return [_compare_document(engine, reference, tokens) for tokens in tqdm(documents, desc="parity", disable=None)]


def _compare_document(engine: Engine, reference: Reference, tokens: Sequence[int]) -> ParityItem:
    if not 0 < len(tokens) <= engine.max_tokens:
        raise EvidenceError(
            f"a document of {len(tokens)} tokens",
            expected=f"1 to {engine.max_tokens} for engine {engine.digest[:12]}",
            remedy="set evaluate.document_tokens accordingly",
        )
    expected = reference(tokens)
    kl: list[float] = []
    agree = 0
    for start in range(0, len(tokens), CHUNK_TOKENS):
        piece = tokens[start : start + CHUNK_TOKENS]
        actual = engine.prefill(0, piece, start=start, rows=range(len(piece)))
        wanted = expected[start : start + len(piece)]
        if actual.shape != wanted.shape or len(expected) != len(tokens):
            raise EvidenceError(
                f"{actual.shape} logits from the engine, {wanted.shape} from the reference for {len(piece)} tokens",
                expected="one row per token over the same vocabulary",
                remedy="build the engine from the quantized model it is compared with",
            )
        for who, logits in (("engine", actual), ("reference", wanted)):
            if not np.isfinite(logits).all():
                raise EvidenceError(
                    f"the {who} returned NaN or infinite logits at position {start + _first_bad_row(logits)}",
                    expected="finite float32 logits",
                    remedy="`tapeout inspect` shows the scales and kernels; then quantize and build again",
                )
        kl += kl_divergences(wanted, actual).tolist()
        agree += int((wanted.argmax(axis=1) == actual.argmax(axis=1)).sum())
    return ParityItem(
        doc_hash=token_hash(tokens), tokens=len(tokens), kl_sum=float(np.sum(kl)), kl_max=max(kl), agree=agree
    )


def _first_bad_row(logits: FloatArray) -> int:
    return int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
