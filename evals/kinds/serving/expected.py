"""What an answer must be, by the settings it was asked with and the logits of its own tokens.

A second implementation of the server's sampling, for evidence: in float64, a token at a time, with no state that is
carried from step to step. Whoever changes the meaning of a setting changes it in `runtime/engine/sampling.py` and here.

V  vocabulary size
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engines.protocol import FloatArray
from evals.answers import Ask, Score

Float64Array = NDArray[np.float64]

EDGE = 0.03  # in probability
_BITS = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # of SplitMix64


def adjusted(ask: Ask, response: Sequence[int], logits: FloatArray) -> Float64Array:
    """Logits ``[V]`` after the prompt and the tokens ``said``, as the settings change them.

    The bias first, then the repetition penalty of tokens in the prompt and the answer, then presence and frequency
    penalties of tokens in the answer. Stop tokens are excluded while the answer is shorter than its least length.
    """
    scores = logits.astype(np.float64)
    for token, bias in ask.logit_bias.items():
        scores[token] += bias
    if ask.repetition_penalty != 1:
        for token in {*ask.prompt, *response}:
            scores[token] *= 1 / ask.repetition_penalty if scores[token] > 0 else ask.repetition_penalty
    for token, count in Counter(response).items():
        scores[token] -= ask.presence_penalty + ask.frequency_penalty * count
    if len(response) < ask.min_new_tokens:
        scores[list(ask.stop_tokens)] = -np.inf
    return scores


def passed_over(ask: Ask, response: Sequence[int], logits: FloatArray, chosen: int) -> float:
    """How far ``chosen`` is from the token that must follow the tokens ``said``; 0 if it is that token.

    Of a greedy answer: how far its logit lies below the largest. Of one that is drawn: how far the random number lies
    outside the part of the unit interval that belongs to the token.
    """
    scores = adjusted(ask, response, logits)
    if not ask.temperature:
        return float(scores.max() - scores[chosen])
    point = random_bits(ask.seed, len(response)) / 2.0**64
    # What lies at the end of a nucleus may be in it by other sums of the same logits.
    edges = {0.0} if ask.top_p == 1 and not ask.min_p else {-EDGE, 0.0, EDGE}
    return min(_outside(_weights(ask, scores, edge), point, chosen) for edge in edges)


def _weights(ask: Ask, scores: Float64Array, edge: float) -> Float64Array:
    """Of all tokens; zero where top-k, top-p or min-p leave them out. ``edge``: they keep so much more."""
    weights = np.exp((scores - scores.max()) / ask.temperature)
    ranked = np.argsort(-scores, kind="stable")
    if 0 < ask.top_k < len(weights):
        weights[ranked[ask.top_k :]] = 0
    if ask.top_p < 1:
        shares = weights[ranked] / weights.sum()
        likelier = np.cumsum(shares) - shares
        weights[ranked[1:][likelier[1:] >= ask.top_p + edge]] = 0
    if ask.min_p:
        weights[weights < ask.min_p - edge] = 0
    return weights


def _outside(weights: Float64Array, point: float, chosen: int) -> float:
    ends = np.cumsum(weights) / weights.sum()
    begin, end = (float(ends[chosen - 1]) if chosen else 0.0), float(ends[chosen])
    outside = max(begin - point, point - end, 0.0)
    return outside if weights[chosen] else max(outside, 1.0)


def score_error(score: Score, logits: FloatArray) -> float:
    """The largest error of the log-probabilities that an answer gives for a token, in nats."""
    exact = logits.astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    given = [(score.token, score.logprob), *score.top]
    likeliest = np.sort(exact)[::-1][: len(score.top)]
    ranks = [abs(logprob - best) for (_, logprob), best in zip(score.top, likeliest, strict=True)]
    return float(max([*(abs(logprob - exact[token]) for token, logprob in given), *ranks]))


def random_bits(seed: int, position: int) -> int:
    """64 random bits for a position of an answer: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

    The generator's state is the mixed seed; the position is how often it was moved on.
    """
    state = _mix((seed + _GAMMA) & _BITS)
    return _mix((state + (position + 1) * _GAMMA) & _BITS)


def _mix(bits: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = ((bits ^ (bits >> shift)) * factor) & _BITS
    return bits ^ (bits >> 31)
