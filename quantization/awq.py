"""AWQ: scale up the input channels that matter before rounding, and divide the scale out again upstream.

``y = W x = (W · s) (x / s)``: columns of W with large activations are rounded more finely, and ``1/s`` goes into the
norm or linear that produces x (Lin et al. 2023, arXiv:2306.00978). Searched on the Gram matrix instead of samples, so
the error of a candidate is exact over every calibration token.

K  input channels    s  [K], positive
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quantization.rounding import FloatArray, Format, round_to_nearest
from quantization.scale_fit import output_error
from tapeout.portable_graph import ScaleSink

SEARCH_ROWS = 256  # output channels the search looks at, evenly spaced; what is kept is judged on all of them
_FLOOR = 1e-4  # smallest scale before normalization, as in AutoAWQ's quantizer


@dataclass(frozen=True)
class InputScale:
    """A scale per input channel and where it came from; ``values`` of ones is the identity."""

    values: FloatArray  # [K]
    label: str

    @property
    def is_identity(self) -> bool:
        return self.label == "identity"


def identity(columns: int) -> InputScale:
    return InputScale(np.ones(columns, np.float32), "identity")


def candidates(
    mean_abs: FloatArray, weight_mean: FloatArray, steps: int, sink: ScaleSink | None = None
) -> Iterator[InputScale]:
    """Scales to try besides the identity: ``steps`` of them, half by activations alone, half by both ("duo").

    ``mean_abs``: mean |x| per channel; ``weight_mean``: mean over output rows of |W| relative to its group's largest.
    Duo at ratio 0 is not the identity (reference A6), so it is a candidate too.
    """
    if not np.isfinite(mean_abs).all() or float(mean_abs.max()) <= 0:
        return  # nothing is known of these inputs: only the identity is left
    activations = tie(np.maximum(mean_abs, float(mean_abs.max()) * _FLOOR).astype(np.float64), sink)
    weights = tie(np.maximum(weight_mean, _FLOOR).astype(np.float64), sink)
    for step in range(1, steps - steps // 2 + 1):
        ratio = step / (steps - steps // 2)
        yield InputScale(normalize(activations**ratio), f"r={ratio:.2f}")
    for step in range(steps // 2):
        ratio = step / max(1, steps // 2 - 1)
        yield InputScale(normalize(activations**ratio / weights ** (1 - ratio)), f"duo r={ratio:.2f}")


def search(
    weights: Sequence[FloatArray],
    gram: FloatArray,
    mean_abs: FloatArray,
    fmt: Format,
    steps: int,
    sink: ScaleSink | None = None,
) -> InputScale:
    """The scale with the lowest output error of round-to-nearest over all members; the identity if none is lower."""
    stacked = np.concatenate(list(weights))
    stride = max(1, stacked.shape[0] // SEARCH_ROWS)
    rows = np.ascontiguousarray(stacked[::stride])
    best = identity(gram.shape[0])
    lowest = output_error(round_to_nearest(rows, fmt).dequantize() - rows, gram)
    for candidate in candidates(mean_abs, relative_magnitude(stacked, fmt.group_size), steps, sink):
        rounded = round_to_nearest(rows * candidate.values, fmt).dequantize() / candidate.values
        error = output_error(rounded - rows, gram)
        if error < lowest:
            best, lowest = candidate, error
    return best


def relative_magnitude(weight: FloatArray, group_size: int) -> FloatArray:
    """Per input channel, the mean over rows of |W| relative to the largest in its group; ``[K]``."""
    groups = np.abs(weight).reshape(weight.shape[0], -1, group_size)
    return (groups / (groups.max(axis=2, keepdims=True) + 1e-6)).mean(axis=0).reshape(-1)


def producer_scale(scale: FloatArray, sink: ScaleSink) -> FloatArray:
    """What the sink's channels are divided by: one value per producer channel.

    Under grouped queries each value head feeds ``repeat`` query heads, so its scale occurs ``repeat`` times in ``s``.
    """
    if sink.repeat == 1:
        return scale
    return scale.reshape(-1, sink.repeat, sink.head_size)[:, 0].reshape(-1)


def absorb(weight: FloatArray, scale: FloatArray, sink: ScaleSink) -> FloatArray:
    """The sink's weight with ``1/s`` folded in: a norm's ``[K]``, or a linear's ``[N, K']`` whose rows are outputs."""
    divisor = producer_scale(scale, sink)
    if sink.kind == "norm":
        return ((weight + np.float32(sink.offset)) / divisor - np.float32(sink.offset)).astype(np.float32)
    start, end = sink.rows or (0, weight.shape[0])
    folded = weight.copy()
    folded[start:end] /= divisor[:, None]
    return folded


def absorb_bias(bias: FloatArray, scale: FloatArray, sink: ScaleSink) -> FloatArray:
    """The bias that is added to the same channels, divided likewise."""
    start, end = (sink.rows or (0, bias.shape[0])) if sink.kind == "linear" else (0, bias.shape[0])
    folded = bias.copy()
    folded[start:end] /= producer_scale(scale, sink)
    return folded


def tie(values: np.ndarray, sink: ScaleSink | None) -> np.ndarray:
    """``[K]`` averaged over the consumer heads that share one producer head, as their scale must be equal."""
    if sink is None or sink.repeat == 1:
        return values
    heads = values.reshape(-1, sink.repeat, sink.head_size)
    return np.broadcast_to(heads.mean(axis=1, keepdims=True), heads.shape).reshape(-1)


def normalize(scale: np.ndarray) -> FloatArray:
    """Centred on one, so that folding changes magnitudes as little as possible."""
    return (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
