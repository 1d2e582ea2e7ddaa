"""Parity: does the engine compute what the quantized checkpoint it was built from says?

Judged with every linear of the reference locked to what the engine returned for it, so that each is held to its own
work (quantization/reference.py says why); both running freely is kept beside it. The engine and the reference are
plain functions here, so this module needs neither torch nor the checkpoint format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from engines.protocol import FloatArray
from evals.items import write_items, write_metrics
from evals.kind import Context, Probe, Reference
from evals.kinds.parity import KIND, ParityItem, ParityReport, ParitySettings
from evals.kinds.text import TextSettings
from evals.text import kl_divergences, token_hash
from tapeout import artifact
from tapeout.artifact import Artifact, Parents
from tapeout.errors import EvidenceError
from tapeout.fingerprint import Fingerprint


def measure(context: Context, folder: Path) -> None:
    """The stage of `evals/kinds/parity.py`."""
    text, count = context.section(TextSettings), context.section(ParitySettings).parity_documents
    quantized, reference = context.reference()
    documents = context.encode(context.heldout_texts(text.documents)[:count])
    candidate = context.bundle("candidate")
    parity(
        context.probe(),
        reference,
        [ids[: text.document_tokens] for ids in documents],
        folder,
        head=context.head(),
        candidate=candidate.digest,
        built_from=quantized.digest,
        executed_on=context.executed_on(),
        parents={"candidate": candidate, "quantized": quantized},
    )


def parity(
    probe: Probe,
    reference: Reference,
    documents: Sequence[Sequence[int]],
    folder: Path,
    *,
    head: str,
    candidate: str,
    built_from: str,
    executed_on: Fingerprint,
    parents: Parents,
) -> Artifact[ParityReport]:
    """Write the ParityReport; ``head``: the output head's parameter; ``candidate``, ``built_from``: digests."""
    items = compare(probe, reference, documents, head=head)
    with artifact.create(folder, ParityReport) as draft:
        write_items(draft.folder / KIND.items_file, items)
        write_metrics(draft.folder, parity_metrics(items))
        record = ParityReport(candidate=candidate, built_from=built_from, documents=len(items), executed_on=executed_on)
        draft.finish(record, parents=parents)
    return artifact.load(folder, ParityReport)


def compare(probe: Probe, reference: Reference, documents: Sequence[Sequence[int]], *, head: str) -> list[ParityItem]:
    """KL(reference || engine) in nats and top-token agreement at every position of every document.

    ``probe(tokens)`` gives the engine's logits ``[S, V]`` and each linear's output. The output head is not locked: its
    logits are what is compared. :class:`EvidenceError` when there is nothing to compare, when shapes differ, or when
    a logit is not finite.
    """
    if not documents:
        raise EvidenceError(
            "no documents to compare", expected="at least one", remedy="check data.source and evaluate.documents"
        )
    return [
        _compare_document(probe, reference, tokens, head) for tokens in tqdm(documents, desc="parity", disable=None)
    ]


def parity_metrics(items: Sequence[ParityItem]) -> dict[str, float]:
    """Flat numbers for ``dvc metrics``."""
    tokens = sum(item.tokens for item in items)
    return {
        "kl": sum(item.kl_sum for item in items) / tokens,
        "top_token": sum(item.agree for item in items) / tokens,
        "worst_error": max(item.worst_error for item in items),
        "free_kl": sum(item.free_kl_sum for item in items) / tokens,
        "free_top_token": sum(item.free_agree for item in items) / tokens,
    }


def _compare_document(probe: Probe, reference: Reference, tokens: Sequence[int], head: str) -> ParityItem:
    actual, outputs = probe(tokens)
    locked, errors = reference.locked(tokens, {name: value for name, value in outputs.items() if name != head})
    free = reference(tokens)
    _require_comparable(actual, locked, len(tokens))
    _require_errors(errors)
    kl, free_kl = kl_divergences(locked, actual), kl_divergences(free, actual)
    worst = max(errors, key=errors.__getitem__)
    return ParityItem(
        doc_hash=token_hash(tokens),
        tokens=len(tokens),
        kl_sum=float(kl.sum()),
        kl_max=float(kl.max()),
        agree=int((locked.argmax(axis=1) == actual.argmax(axis=1)).sum()),
        worst_error=errors[worst],
        worst_linear=worst,
        free_kl_sum=float(free_kl.sum()),
        free_agree=int((free.argmax(axis=1) == actual.argmax(axis=1)).sum()),
    )


def _require_errors(errors: Mapping[str, float]) -> None:
    """A linear that the reference cannot compute does not show in the logits: the engine's output replaces it there."""
    if not errors:
        raise EvidenceError(
            "the engine's graph has no linear to compare but the output head",
            expected="the output of every linear",
            remedy="build the bundle again: its record names the linears",
        )
    for name, error in errors.items():
        if not math.isfinite(error):
            raise EvidenceError(
                f"the error of {name} is {error}",
                expected="finite outputs of the engine and of the reference",
                remedy="`tapeout inspect` shows the scales and kernels; then quantize and build again",
            )


def _require_comparable(actual: FloatArray, expected: FloatArray, tokens: int) -> None:
    if actual.shape != expected.shape or len(actual) != tokens:
        raise EvidenceError(
            f"{actual.shape} logits from the engine, {expected.shape} from the reference for {tokens} tokens",
            expected="one row per token over the same vocabulary",
            remedy="build the engine from the quantized model it is compared with",
        )
    for who, logits in (("engine", actual), ("reference", expected)):
        if not np.isfinite(logits).all():
            bad = int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
            raise EvidenceError(
                f"the {who} returned NaN or infinite logits at position {bad}",
                expected="finite float32 logits",
                remedy="`tapeout inspect` shows the scales and kernels; then quantize and build again",
            )
