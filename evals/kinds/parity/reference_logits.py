"""The logits of the judged engine, kept beside the parity report: what another engine of the same model is held to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.protocol import FloatArray
from evals.text import Float64Array, blocks, token_hash
from tapeout.artifact import Frozen
from tapeout.errors import EvidenceError

REFERENCE_FILE = "reference_logits.npz"  # beside the items of a ParityReport
KEPT_TOKENS = 64  # likeliest tokens of a position whose log-probabilities are kept; all others count as one


class LevelItem(Frozen):
    """One document: the engine at this level against the engine that was judged, at all its positions."""

    doc_hash: str
    tokens: int
    kl_sum: float
    agree: int


@dataclass
class ReferenceLogits:
    """What the judged engine said at every position of some documents.

    ``documents``: token ids. ``ids`` and ``logprobs``: ``[S, K]`` for each document, most likely first.
    """

    documents: list[list[int]] = field(default_factory=list[list[int]])
    ids: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    logprobs: list[FloatArray] = field(default_factory=list[FloatArray])

    def add(self, tokens: Sequence[int], logits: FloatArray) -> None:
        """``logits``: ``[S, V]`` after each of the tokens."""
        count = min(KEPT_TOKENS, logits.shape[1])
        ids = np.empty((len(logits), count), np.int32)
        logprobs = np.empty((len(logits), count), np.float32)
        for block in blocks(len(logits)):
            ids[block] = _likeliest(logits[block], count)
            logprobs[block] = _logprobs(logits[block], ids[block])
        self.documents.append([int(token) for token in tokens])
        self.ids.append(ids)
        self.logprobs.append(logprobs)

    def save(self, path: Path) -> None:
        lengths = np.array([len(tokens) for tokens in self.documents], np.int32)
        tokens = np.concatenate([np.asarray(tokens, np.int32) for tokens in self.documents])
        arrays = {"lengths": lengths, "tokens": tokens, "ids": np.concatenate(self.ids)}
        np.savez_compressed(path, logprobs=np.concatenate(self.logprobs), **arrays)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def load(path: Path) -> ReferenceLogits:
        with np.load(path, allow_pickle=False) as stored:
            edges = np.cumsum(stored["lengths"])[:-1]
            parts = {name: np.split(stored[name], edges) for name in ("tokens", "ids", "logprobs")}
        return ReferenceLogits([part.tolist() for part in parts["tokens"]], parts["ids"], parts["logprobs"])

    def compare(self, number: int, chunks: Iterable[FloatArray]) -> LevelItem:
        """``chunks``: the logits of the document of this number, as another engine gives them, ``[rows, V]`` each.

        One chunk is held at a time. :class:`EvidenceError` for too few or too many rows, and for logits that are not
        finite.
        """
        tokens, ids, expected = self.documents[number], self.ids[number], self.logprobs[number]
        kl, agree, at = np.empty(len(tokens)), 0, 0
        for chunk in chunks:
            if at + len(chunk) > len(tokens):
                raise _incomparable(f"more than {len(tokens)} rows of logits for {len(tokens)} tokens")
            for block in blocks(len(chunk)):
                logits = chunk[block]
                if not np.isfinite(logits).all():
                    bad = at + int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
                    raise _incomparable(f"NaN or infinite logits at position {bad} of document {number}")
                rows = slice(at, at + len(logits))
                kl[rows] = _divergence(expected[rows], _logprobs(logits, ids[rows]))
                agree += int((logits.argmax(axis=1) == ids[rows, 0]).sum())
                at = rows.stop
        if at != len(tokens):
            raise _incomparable(f"{at} rows of logits for {len(tokens)} tokens")
        return LevelItem(doc_hash=token_hash(tokens), tokens=len(tokens), kl_sum=math.fsum(kl), agree=agree)


def _incomparable(found: str) -> EvidenceError:
    return EvidenceError(
        found,
        expected="one finite row for each token",
        remedy="the kernels of this level are wrong on this processor: serve at another level",
    )


def _likeliest(logits: FloatArray, count: int) -> NDArray[np.integer]:
    """Ids of the ``count`` likeliest tokens of each row, most likely first."""
    ids = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1)


def _logprobs(logits: FloatArray, ids: NDArray[np.integer]) -> FloatArray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    normalizer = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    return (np.take_along_axis(shifted, ids, axis=1) - normalizer).astype(np.float32)


def _divergence(expected: FloatArray, found: FloatArray) -> Float64Array:
    """KL in nats of each row, over the kept tokens and all others as one."""
    p, q = expected.astype(np.float64), found.astype(np.float64)
    rest_p, rest_q = (np.maximum(1 - np.exp(each).sum(axis=1), 1e-9) for each in (p, q))
    kept = (np.exp(p) * (p - q)).sum(axis=1)
    return np.maximum(kept + rest_p * np.log(rest_p / rest_q), 0.0)
