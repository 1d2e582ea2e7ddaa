"""Stage ``evaluate`` on a machine without the candidate's hardware: as much held-out text as can be emulated."""

from __future__ import annotations

from pathlib import Path

from evals.kind import Context
from evals.kinds.emulated import KIND, EmulatedReport
from evals.kinds.text import HeldOutSettings, text_items, text_metrics
from evals.not_executed import write_not_executed

# Multiply-adds of each engine: an emulation makes 0.2 to 0.4 G a second on one core (docs/cuda-kernels.md).
MOST_WORK = 20e9
MOST_TOKENS, LEAST_TOKENS = 256, 16
DOCUMENT_TOKENS = 64
FLOAT_BYTES = 2  # of a weight of the float engine


def measure(context: Context, folder: Path, reason: str) -> None:
    """A report of both engines, or none of a model that is too large. ``reason``: why nothing is executed, a clause."""
    candidate, baseline = context.bundle("candidate"), context.bundle("baseline")
    settings = context.section(HeldOutSettings)
    each = min(DOCUMENT_TOKENS, settings.document_tokens)
    tokens = tokens_for(baseline.record.step_bytes // FLOAT_BYTES)
    if tokens < LEAST_TOKENS:
        write_not_executed(folder, candidate, f"{reason}, and the model is too large to emulate its kernels")
        return
    texts = context.heldout_texts(settings.documents)
    lengths = [min(each, tokens - first) for first in range(0, tokens, each) if tokens - first > 1]
    documents = [ids[:length] for ids, length in zip(context.encode(texts[: len(lengths)]), lengths, strict=False)]
    engines = [context.engine(role, slots=1) for role in ("baseline", "candidate")]
    items = text_items(engines[0], engines[1], documents)
    means = text_metrics(items)
    record = EmulatedReport(
        baseline=baseline.digest,
        candidate=candidate.digest,
        reason=reason,
        documents=len(items),
        tokens=sum(item.tokens for item in items),
        kl=means["kl_mean"],
        top_token=means["top_token_agreement"],
        perplexity_ratio=means["perplexity_ratio"],
    )
    parents = {"baseline": baseline, "candidate": candidate}
    KIND.write(folder, record, parents=parents, items=items, metrics=means)


def tokens_for(weights: int) -> int:
    """How many tokens a model that reads so many weights a token computes with :data:`MOST_WORK`.

    >>> tokens_for(10**7), tokens_for(10**9), tokens_for(10**10)
    (256, 20, 2)
    """
    return min(MOST_TOKENS, int(MOST_WORK / max(weights, 1)))
