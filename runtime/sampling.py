"""From logits to the next token: greedy, temperature, top-k, top-p, min-p and repetition penalty.

B  requests sampled together      V  vocabulary size

Each request owns a :class:`Sampler` with its own seeded generator, so the tokens it draws depend on its seed and its
logits alone, never on its batch neighbours. The filters and their order (penalty, temperature, top-k, top-p, min-p)
are those of transformers' ``generation/logits_process.py``; a test compares the distributions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from engines.protocol import FloatArray
from runtime.messages import SamplingSettings
from tapeout.errors import RequestError

Float64Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

# A nucleus seldom holds more tokens than this, and partitioning V logits is ten times cheaper than sorting them.
NUCLEUS_GUESS = 1024


class Sampler:
    """One request's generator and the tokens it has seen."""

    def __init__(self, settings: SamplingSettings, vocab_size: int, prompt: Iterable[int] = ()) -> None:
        self.settings = settings
        self._generator = np.random.Generator(np.random.PCG64(settings.seed))
        self._seen: NDArray[np.bool_] | None = None
        if settings.repetition_penalty != 1.0:
            self._seen = np.zeros(vocab_size, dtype=np.bool_)
            self._seen[list(prompt)] = True

    @property
    def draws_argmax(self) -> bool:
        """True when the raw logits' argmax is the answer, so a batch of such requests needs one pass."""
        return self.settings.temperature == 0 and self._seen is None

    def draw(self, logits: FloatArray) -> int:
        """The next token from finite-or-minus-infinity logits ``[V]``; it counts as seen from now on."""
        scores = logits.astype(np.float64)
        penalty = self.settings.repetition_penalty
        if self._seen is not None:
            seen = scores[self._seen]
            scores[self._seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self.settings.temperature == 0:
            token = int(np.argmax(scores))
        else:
            tokens, probabilities = candidates(scores / self.settings.temperature, self.settings)
            cumulative = np.cumsum(probabilities)
            # A uniform draw scaled by the sum, so that rounding in the sum never leaves a gap at its end.
            point = self._generator.random() * cumulative[-1]
            token = int(tokens[min(int(np.searchsorted(cumulative, point, side="right")), len(tokens) - 1)])
        if self._seen is not None:
            self._seen[token] = True
        return token


def sample(logits: FloatArray, samplers: Sequence[Sampler]) -> list[int]:
    """The next token of each of B requests from logits ``[B, V]``.

    Raises :class:`RequestError` naming the request when logits hold NaN or plus infinity, or mask every token.
    """
    if logits.shape[0] != len(samplers):
        raise RequestError(f"logits of {logits.shape[0]} requests", expected=f"{len(samplers)}")
    best: list[int] = np.argmax(logits, axis=1).tolist()  # stops at the first NaN, so it also finds broken logits
    for index, token in enumerate(best):
        if not isfinite(top := float(logits[index, token])):
            raise RequestError(
                f"the largest logit of request {index} is {top} (token {token})",
                expected="finite logits",
                remedy="rebuild the bundle; `tapeout inspect` shows which quantized layers have the largest errors",
            )
    return [best[i] if sampler.draws_argmax else sampler.draw(logits[i]) for i, sampler in enumerate(samplers)]


def candidates(scores: Float64Array, settings: SamplingSettings) -> tuple[IntArray, Float64Array]:
    """Tokens left by the filters and their probabilities, which sum to 1, from tempered scores ``[V]``.

    Ties at the edge of a filter go to the lower token id.
    """
    weights = np.exp(scores - scores.max())
    filtered = settings.top_k or settings.top_p < 1
    tokens = _descending(weights, settings) if filtered else np.arange(len(weights))
    kept = weights[tokens]
    if settings.top_p < 1:
        total = kept.sum() if settings.top_k else weights.sum()
        # The token that crosses the line belongs to the nucleus, so the first always stays.
        tokens = tokens[: int(np.searchsorted(np.cumsum(kept), settings.top_p * total)) + 1]
        kept = weights[tokens]
    if settings.min_p > 0:
        likely = kept >= settings.min_p * kept.max()
        tokens, kept = tokens[likely], kept[likely]
    return tokens.astype(np.int64), kept / kept.sum()


def _descending(weights: Float64Array, settings: SamplingSettings) -> IntArray:
    """Token ids by descending weight: the ``top_k``, or enough of them to hold a ``top_p`` share of all weight."""
    count = min(settings.top_k or NUCLEUS_GUESS, len(weights))
    # Every token at or above the count-th largest weight, ties included; then a stable sort of those few.
    edge = np.partition(weights, len(weights) - count)[len(weights) - count]
    head = np.flatnonzero(weights >= edge)
    head = head[np.argsort(-weights[head], kind="stable")][:count]
    if not settings.top_k and weights[head].sum() < settings.top_p * weights.sum():
        head = np.argsort(-weights, kind="stable")
    return head
