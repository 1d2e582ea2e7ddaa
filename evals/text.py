"""How far two engines differ on the same tokens: KL divergence, top-token agreement, likelihood of the text.

S  predicted positions      V  vocabulary size
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.protocol import FloatArray
from engines.sequences import Sequences
from quantization.calibration import sample_hash
from tapeout.errors import EvidenceError

# Logits are asked for in pieces: 256 rows of 49,152 floats are 50 MB an engine, whatever the document's length.
CHUNK_TOKENS = 256
# Rows per step of the arithmetic, so that its temporaries stay in the processor's cache.
BLOCK_ROWS = 4

Float64Array = NDArray[np.float64]


def token_hash(tokens: Sequence[int]) -> str:
    """Pairing key of a token sequence. It is that of calibration samples, so that a document in both is found."""
    return sample_hash(tokens)


def joined(documents: Sequence[Sequence[int]], tokens: int) -> list[int]:
    """One document of so many tokens: these one after the other, again from the first if they are too short together.

    >>> joined([[1, 2], [3]], 5)
    [1, 2, 3, 1, 2]
    """
    flat = [token for document in documents for token in document]
    if not flat:
        raise EvidenceError("no text", expected="held-out text", remedy="check data.source and evaluate.documents")
    return (flat * -(-tokens // len(flat)))[:tokens]


def log_likelihoods(logits: FloatArray, targets: Sequence[int]) -> Float64Array:
    """``log softmax(logits)[s, targets[s]]`` in nats, ``[S]``, from logits ``[S, V]``.

    Exponentials are float32 (V of them cost most), sums are float64: the error stays below 1e-6 nats.
    """
    rows = np.arange(len(targets))
    result = np.empty(len(targets))
    for block in blocks(len(targets)):
        shifted = logits[block] - logits[block].max(axis=1, keepdims=True)
        chosen = shifted[rows[: len(shifted)], np.asarray(targets[block])]
        result[block] = chosen - np.log(np.exp(shifted).sum(axis=1, dtype=np.float64))
    return result


def kl_divergences(baseline: FloatArray, candidate: FloatArray) -> Float64Array:
    """KL(baseline || candidate) in nats per row, ``[S]``, from two arrays of logits ``[S, V]``.

    ``sum p (log p - log q)`` is taken as ``sum p (z - z') - (log Z - log Z')`` with both rows shifted by their
    maximum, so no probability is ever rounded to zero before its logarithm. Rounding can leave -1e-7 where the rows
    are equal; that is returned as 0, since a divergence is not negative.
    """
    result = np.empty(len(baseline))
    for block in blocks(len(baseline)):
        left = baseline[block] - baseline[block].max(axis=1, keepdims=True)
        right = candidate[block] - candidate[block].max(axis=1, keepdims=True)
        weights = np.exp(left)
        normalizer = weights.sum(axis=1, dtype=np.float64)
        other = np.exp(right).sum(axis=1, dtype=np.float64)
        np.subtract(left, right, out=left)
        np.multiply(weights, left, out=left)
        result[block] = left.sum(axis=1, dtype=np.float64) / normalizer - np.log(normalizer) + np.log(other)
    return np.maximum(result, 0.0)  # keeps NaN


def blocks(rows: int) -> Iterator[slice]:
    """Of ``BLOCK_ROWS`` rows each; the last may have fewer."""
    return (slice(start, start + BLOCK_ROWS) for start in range(0, rows, BLOCK_ROWS))


@dataclass(frozen=True)
class Comparison:
    """Two engines on the same S predicted positions; every array is ``[S]``, likelihoods and KL in nats."""

    kl: Float64Array
    agree: NDArray[np.bool_]  # both rank the same token first (the lowest id, among equals)
    baseline_nll: Float64Array
    candidate_nll: Float64Array


def compare(baseline: Sequences, candidate: Sequences, tokens: Sequence[int], *, first: int = 1) -> Comparison:
    """Feed ``tokens[:-1]`` to slot 0 of both engines and compare how they predict ``tokens[first:]``.

    :class:`EvidenceError` when there is nothing to predict, or when the tokens do not fit an engine.
    """
    if not 1 <= first < len(tokens):
        raise EvidenceError(
            f"{len(tokens)} tokens, compared from position {first}",
            expected="at least one token before and one token at or behind that position",
            remedy="leave out empty texts and responses",
        )
    fed = len(tokens) - 1
    for engine in (baseline, candidate):
        if fed > engine.max_tokens:
            raise EvidenceError(
                f"a text of {len(tokens)} tokens",
                expected=f"at most {engine.max_tokens + 1} for engine {engine.digest[:12]}",
                remedy="shorten the texts, or export with a larger `export.max_positions`",
            )
    parts: list[Comparison] = []
    start = 0
    while start < fed:
        end = min(fed, max(start + CHUNK_TOKENS, first))
        rows = range(max(first - 1 - start, 0), end - start)
        targets = [tokens[start + row + 1] for row in rows]
        left = baseline.prefill(0, tokens[start:end], start=start, positions=rows)
        right = candidate.prefill(0, tokens[start:end], start=start, positions=rows)
        parts.append(_compare_rows(left, right, targets))
        start = end
    return Comparison(
        kl=np.concatenate([part.kl for part in parts]),
        agree=np.concatenate([part.agree for part in parts]),
        baseline_nll=np.concatenate([part.baseline_nll for part in parts]),
        candidate_nll=np.concatenate([part.candidate_nll for part in parts]),
    )


def _compare_rows(baseline: FloatArray, candidate: FloatArray, targets: Sequence[int]) -> Comparison:
    if baseline.shape != candidate.shape:
        raise EvidenceError(
            f"baseline logits are {baseline.shape}, candidate logits {candidate.shape}",
            expected="two engines with the same vocabulary",
            remedy="build both from the same exported graph",
        )
    return Comparison(
        kl=kl_divergences(baseline, candidate),
        agree=baseline.argmax(axis=1) == candidate.argmax(axis=1),
        baseline_nll=-log_likelihoods(baseline, targets),
        candidate_nll=-log_likelihoods(candidate, targets),
    )
