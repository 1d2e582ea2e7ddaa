"""From one row of logits to one token, in numpy; a kernel (:class:`engines.kernels.sampling.Sampler`) computes the
same, to the bit, where there is one.

V  vocabulary size      K  tokens that the filters keep

A token's weight is its probability over that of the likeliest token, in fixed point: an integer of at most ``ONE``.
Sums of integers do not depend on their order, so neither the width of vectors nor the number of threads changes which
token is drawn. Weights are rounded to 2**-30: less than float32 logits resolve. The filters and their order
(temperature, top-k, top-p, min-p) are those of transformers' ``generation/logits_process.py``; a test compares the
distributions. Among equal logits the lower token id comes first.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engines.kernels.sampling import (
    NONE_LEFT,
    NOT_FINITE,
    ONE,
    ONE_BITS,
    Drawn,
    SamplingRow,
    normalizer,
)
from engines.protocol import Filters, FloatArray
from runtime.constraints.compiler import MaskArray
from runtime.wire.messages import SamplingSettings

Int64Array = NDArray[np.int64]

LOG2_E = 1 / math.log(2)
_SMALLEST = np.float32(-40)  # exponents below have weight 0
_SCALES = 2.0**-100, 2.0**100  # in float32 smaller ones would be 0, which is greedy
# 2**f for f in [-0.5, 0.5] is 1 + f * (0.693147 + f * (...)): least maximum of the relative error (9e-8 in real
# numbers, 1.6e-7 in float32), found by Lawson's iteration.
_COEFFICIENTS = tuple(map(np.float32, (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0)))


def filters_of(settings: SamplingSettings) -> Filters:
    temperature = settings.temperature
    smallest, largest = _SCALES
    scale = min(max(LOG2_E / temperature, smallest), largest) if temperature and settings.top_p else 0.0
    return Filters(float(np.float32(scale)), settings.top_k, settings.top_p, math.ceil(settings.min_p * ONE))


def draw(row: SamplingRow) -> Drawn:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        max_logit = row.logits.max()
        if not max_logit < np.inf:  # the maximum is NaN if any logit is
            return Drawn(NOT_FINITE)
        if row.top is None or max_logit == -np.inf:
            return Drawn(_token(row))
        total = int(weights(row.logits, LOG2_E).sum())
        return Drawn(_token(row), normalizer(float(max_logit), total), largest(row.logits, row.top).tolist())


def _token(row: SamplingRow) -> int | str:
    scores = row.logits if row.adjustments is None else row.adjustments.apply(row.logits)
    if row.mask is not None:
        scores = np.where(unpack(row.mask, len(scores)), scores, np.float32(-np.inf))
    best = scores.max()
    if not best < np.inf:
        return NOT_FINITE
    if best == -np.inf:
        return NONE_LEFT
    if not row.filters.scale:
        return int(scores.argmax())
    tokens, kept = candidates(scores, row.filters)
    cumulative = np.cumsum(kept)
    point = row.random * int(cumulative[-1]) >> 64
    return int(tokens[np.searchsorted(cumulative, point, side="right")])


def weights(scores: FloatArray, scale: float) -> Int64Array:
    """``2 ** ((scores - max) * scale)`` in fixed point, ``[V]``."""
    exponents = np.maximum((scores - scores.max()) * np.float32(scale), _SMALLEST)
    whole = np.rint(exponents)
    fraction = exponents - whole
    power = np.full_like(fraction, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        power = power * fraction + coefficient
    return np.rint(np.ldexp(power, whole.astype(np.int32) + ONE_BITS)).astype(np.int64)


def candidates(scores: FloatArray, filters: Filters) -> tuple[Int64Array, Int64Array]:
    """Tokens that the filters keep, ascending, and their weights; both ``[K]``."""
    all_weights = weights(scores, filters.scale)
    if not 0 < filters.top_k < len(scores) and filters.top_p == 1:
        tokens = np.arange(len(scores))
    else:
        tokens = _nucleus(scores, all_weights, filters)
    kept = all_weights[tokens]
    if filters.least:
        tokens, kept = tokens[kept >= filters.least], kept[kept >= filters.least]
    return tokens, kept


def largest(scores: FloatArray, count: int) -> Int64Array:
    """The tokens of the ``count`` largest scores, from the largest on."""
    count = min(count, len(scores))
    if not count:
        return np.zeros(0, np.int64)
    # Every token at or above the count-th largest score, ties included; then a stable sort of those few.
    edge = np.partition(scores, len(scores) - count)[len(scores) - count]
    head = np.flatnonzero(scores >= edge)
    return head[np.argsort(-scores[head], kind="stable")][:count]


def unpack(mask: MaskArray, count: int) -> NDArray[np.bool_]:
    """The first ``count`` bits of a mask, from the least significant bit on."""
    return np.unpackbits(mask.view(np.uint8), count=count, bitorder="little").view(np.bool_)


def random_bits(seed: int, position: int) -> int:
    """64 bits for one position of one request: SplitMix64, started at a place that the seed decides.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    return _mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA)


def _nucleus(scores: FloatArray, all_weights: Int64Array, filters: Filters) -> Int64Array:
    """Tokens that top-k and then top-p keep, ascending."""
    if 0 < filters.top_k < len(scores):
        tokens = largest(scores, filters.top_k)
        total = int(all_weights[tokens].sum())
    else:
        total = int(all_weights.sum())
        # All tokens below this weight have less than 1 - top_p of the sum, so the nucleus is among the others. Weights
        # follow the order of scores but for the rounding of a float.
        least = int((1 - filters.top_p) * total / len(scores))
        tokens = np.flatnonzero(all_weights >= least - (least >> 20) - 1)
        tokens = tokens[np.argsort(-scores[tokens], kind="stable")]
    if filters.top_p < 1:
        # The token that crosses the line belongs to the nucleus, so the first always stays.
        cumulative = np.cumsum(all_weights[tokens])
        tokens = tokens[: int(np.searchsorted(cumulative, filters.top_p * total)) + 1]
    return np.sort(tokens)


_GAMMA = 0x9E3779B97F4A7C15
_BITS = (1 << 64) - 1


def _mix(x: int) -> int:
    x &= _BITS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _BITS
    return x ^ x >> 31
