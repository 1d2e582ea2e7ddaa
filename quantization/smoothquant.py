"""SmoothQuant: move the outliers of a linear's inputs into its weights, so that one static int8 grid holds them all.

``y = W x = (W · s) (x / s)`` with ``s = max|x|^a / max|W|^(1 - a)`` per channel; ``1/s`` goes into the norm or linear
that produces x (Xiao et al. 2023, arXiv:2211.10438, equation 4). The exponent is searched by output error, with the
rounding of the inputs simulated from calibration's statistics: rounding to steps of size d adds noise of variance
d² / 12, but no more than the channel's own power, for a channel that is always rounded to zero loses just that.

N  output channels    K  input channels    s  [K], positive    noise  [K], in the units of the unscaled x
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from quantization.awq import SEARCH_ROWS, InputScale, identity, normalize, tie
from quantization.rounding import FloatArray, Format, QuantizedLinear, round_to_nearest
from quantization.scale_fit import output_error
from tapeout.errors import QuantizationError
from tapeout.portable_graph import ScaleSink

LARGEST_CODE = 127  # symmetric int8; -128 is left to inputs beyond what calibration saw
_FLOOR = 1e-4  # of the largest, so that a silent channel does not blow up its weights


def input_step(max_abs: FloatArray, scale: InputScale) -> float:
    """Step of the static grid for ``x / s``; a float32 value. :class:`QuantizationError` if no input was ever seen."""
    step = np.float32((max_abs / scale.values).max() / LARGEST_CODE)
    if not 0 < step < np.inf:
        raise QuantizationError(
            f"inputs of magnitude {float(max_abs.max())}",
            expected="finite inputs that are not all zero",
            remedy="run `dvc repro calibrate`, or let a rule without int8 activations match this linear",
        )
    return float(step)


def input_noise(max_abs: FloatArray, power: FloatArray, scale: InputScale) -> FloatArray:
    """Variance that rounding adds to each channel of x, ``[K]``; ``power`` is the mean of x² (a Gram's diagonal)."""
    step = input_step(max_abs, scale) * scale.values
    return np.minimum(step**2 / 12, power).astype(np.float32)


def noisy_error(
    linear: QuantizedLinear, weight: FloatArray, scale: InputScale, gram: FloatArray, noise: FloatArray
) -> float:
    """Mean over tokens of the squared output error ``‖Ŵ(x + n) - W x‖²`` for independent noise n."""
    decoded = linear.dequantize() / scale.values
    return output_error(decoded - weight, gram) + float((decoded**2 @ noise).sum(dtype=np.float64))


def candidates(
    max_abs: FloatArray, weight_max: FloatArray, steps: int, sink: ScaleSink | None = None
) -> Iterator[InputScale]:
    """``steps`` scales, of exponents evenly from 1 / steps to 1; ``weight_max`` is the largest |W| of each channel."""
    inputs = tie(np.maximum(max_abs, float(max_abs.max()) * _FLOOR).astype(np.float64), sink)
    weights = tie(np.maximum(weight_max, float(weight_max.max()) * _FLOOR).astype(np.float64), sink)
    for number in range(1, steps + 1):
        exponent = number / steps
        yield InputScale(normalize(inputs**exponent / weights ** (1 - exponent)), f"smooth a={exponent:.2f}")


def search(
    weights: Sequence[FloatArray],
    gram: FloatArray,
    max_abs: FloatArray,
    fmt: Format,
    steps: int,
    sink: ScaleSink | None = None,
) -> InputScale:
    """The scale of the lowest output error of round-to-nearest over all members; the identity if none is lower."""
    stacked = np.concatenate(list(weights))
    rows = np.ascontiguousarray(stacked[:: max(1, stacked.shape[0] // SEARCH_ROWS)])
    power = np.diag(gram)
    if not stacked.any() or not max_abs.any():
        return identity(gram.shape[0])

    def error(scale: InputScale) -> float:
        rounded = round_to_nearest(rows * scale.values, fmt)
        return noisy_error(rounded, rows, scale, gram, input_noise(max_abs, power, scale))

    tried = [identity(gram.shape[0]), *candidates(max_abs, np.abs(stacked).max(axis=0), steps, sink)]
    return min(tried, key=error)
