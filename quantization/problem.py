"""What a quantization method works on: weights that read one input, their scheme, and what calibration saw.

N  output channels    K  input channels    s  [K], the input scale    noise  [K], in the units of the unscaled x

The inputs of a static scheme are rounded too. Rounding to steps of size d adds noise of variance d² / 12, but no more
than the channel's own power: a channel that is always rounded to zero loses just that. Steps of int8 are all the same,
those of FP8 grow with the number. Methods see the noise in the Gram matrix; what remains of it is charged to every
candidate alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from quantization.input_scale import InputScale, identity
from quantization.output_error import diagonal, output_error
from quantization.statistics import Statistics
from tapeout import e4m3
from tapeout.errors import QuantizationError
from tapeout.formats.fp8 import FORMAT
from tapeout.number_format import Activations, FloatArray
from tapeout.portable_graph import FoldTarget
from tapeout.quantized import SOME_STEP, QuantizedWeight, round_to_nearest
from tapeout.schemes import Scheme

T = TypeVar("T")
# Of the static grid of inputs: of symmetric int8, -128 is left to inputs beyond what calibration saw.
LARGEST_INPUT: Mapping[Activations, float] = {"int8": 127, "fp8": float(e4m3.LARGEST)}
# Of E4M3, whose steps are 2^-3 of the power of two below a number: the mean of step² / 12 over numbers that are spread
# evenly in their logarithm is 3 / (8 ln 2) / (64 * 12) times the number squared.
FP8_NOISE = 3 / (8 * math.log(2)) / (64 * 12)
FP8_LAST_STEP = 2.0**-9  # between the numbers nearest to zero
_SMALLEST_STEP = 1e-20  # of inputs; smaller ones times a weight's scale could be no float32 number
SEARCH_OUTPUTS = 256  # looked at in the search of an input scale, evenly spaced


@dataclass(frozen=True, eq=False)
class Inputs:
    """What weights of a scheme meet under an input scale; shared by all parts of a problem."""

    scheme: Scheme
    statistics: Statistics  # not scaled
    scale: InputScale  # weights are multiplied by it before rounding, and inputs divided
    _kept: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False)

    @cached_property
    def noise(self) -> FloatArray | None:
        """Variance that rounding adds to each channel of x; None where inputs stay in float."""
        if self.scheme.activations == "float":
            return None
        power = diagonal(self.statistics.gram)
        return input_noise(self.statistics.max_abs, power, self.scale, self.scheme.activations)

    @cached_property
    def gram(self) -> FloatArray:
        """Of the scaled inputs that the weights will meet, noise and all."""
        noisy = self._noisy(self.statistics.gram)
        if self.scale.is_identity:
            return noisy
        scale = self.scale.values.reshape(len(noisy), 1, -1)
        scaled = noisy / scale
        scaled /= scale.transpose(0, 2, 1)
        return scaled

    @cached_property
    def importance(self) -> FloatArray:
        return np.ascontiguousarray(diagonal(self.gram))

    @cached_property
    def held_out(self) -> FloatArray:
        return self._noisy(self.statistics.holdout)

    def once(self, compute: Callable[[Inputs], T]) -> T:
        """What a method needs of the inputs, computed for the first part of a problem."""
        if compute not in self._kept:
            self._kept[compute] = compute(self)
        return self._kept[compute]

    def _noisy(self, gram: FloatArray) -> FloatArray:
        if self.noise is None:
            return gram
        noisy = gram.copy()
        np.einsum("bkk->bk", noisy)[:] += self.noise.reshape(len(gram), -1)
        return noisy


@dataclass(frozen=True, eq=False)
class Problem:
    """Weights and their inputs. Methods must not change arrays."""

    weights: Sequence[FloatArray]  # [N, K] each, not scaled
    inputs: Inputs
    fold_target: FoldTarget | None = None  # where the inverse of an input scale can go; None: nowhere
    steps: int = 1  # input scales that a search tries besides the identity
    _kept: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False)

    @classmethod
    def of(
        cls,
        weights: Sequence[FloatArray],
        scheme: Scheme,
        statistics: Statistics,
        fold_target: FoldTarget | None,
        steps: int,
    ) -> Problem:
        return cls(weights, Inputs(scheme, statistics, identity(len(statistics.mean_abs))), fold_target, steps)

    @property
    def scheme(self) -> Scheme:
        """Fitted to K."""
        return self.inputs.scheme

    @property
    def statistics(self) -> Statistics:
        return self.inputs.statistics

    @property
    def scale(self) -> InputScale:
        return self.inputs.scale

    @property
    def noise(self) -> FloatArray | None:
        return self.inputs.noise

    def under(self, scale: InputScale) -> Problem:
        return replace(self, inputs=Inputs(self.scheme, self.statistics, scale))

    def part(self, weights: Sequence[FloatArray]) -> Problem:
        """The same problem for other weights that read these inputs."""
        return replace(self, weights=weights)

    def scaled(self) -> Iterator[FloatArray]:
        """The weights that are rounded, one at a time: a whole embedding is gigabytes."""
        return (weight * self.scale.values for weight in self.weights)

    def once(self, compute: Callable[[Problem], T]) -> T:
        """What several methods need, computed for the first of them."""
        if compute not in self._kept:
            self._kept[compute] = compute(self)
        return self._kept[compute]

    def best_scale(self, candidates: Iterable[InputScale]) -> InputScale | None:
        """The input scale with the lowest error of RTN on what scales are fitted to; None if that is the present one.

        Some output channels are looked at; what is kept is judged on all of them.
        """
        stacked = np.concatenate(list(self.weights))
        sample = np.ascontiguousarray(stacked[:: max(1, stacked.shape[0] // SEARCH_OUTPUTS)])

        def error(tried: Problem) -> float:
            rounded = round_to_nearest(sample * tried.scale.values, self.scheme)
            return tried.error(rounded, sample, self.statistics.gram)

        best = min([self, *map(self.under, candidates)], key=error)
        return None if best is self else best.scale

    def error(self, linear: QuantizedWeight, weight: FloatArray, gram: FloatArray) -> float:
        """Mean over tokens of the squared output error ``‖Ŵ(x + n) - W x‖²`` for independent noise n."""
        decoded = linear.dequantize() / self.scale.values
        noise = 0.0 if self.noise is None else float((decoded**2 @ self.noise).sum(dtype=np.float64))
        return output_error(decoded - weight, gram) + noise

    def held_out_error(self, linear: QuantizedWeight, weight: FloatArray) -> float:
        """What methods are compared by: how far ``linear`` errs on noisy inputs that no method was fitted to."""
        return output_error(linear.dequantize() / self.scale.values - weight, self.inputs.held_out)


def input_step(max_abs: FloatArray, scale: InputScale, activations: Activations) -> float:
    """Scale of the static grid for ``x / s``; a float32 value, of FP8 also one of float16.

    :class:`QuantizationError` where inputs are not finite.

    Inputs that are always zero, as those behind linears of zeros are, are zero on any grid.
    """
    step = np.float32((max_abs / scale.values).max() / LARGEST_INPUT[activations])
    if step < _SMALLEST_STEP:
        return SOME_STEP
    if activations == "fp8" and np.isfinite(step):
        step = FORMAT.storable(np.array([step], np.float32))[0]
    if not np.isfinite(step):
        raise QuantizationError(
            f"inputs of magnitude {float(max_abs.max())}",
            expected="finite inputs",
            remedy="run `dvc repro calibrate`, or let a rule with activations in float match this linear",
        )
    return float(step)


def input_noise(max_abs: FloatArray, power: FloatArray, scale: InputScale, activations: Activations) -> FloatArray:
    """Variance that rounding adds to each channel of x, ``[K]``; ``power`` is the mean of x² (a Gram's diagonal)."""
    step = input_step(max_abs, scale, activations) * scale.values
    noise = FP8_NOISE * power + (FP8_LAST_STEP * step) ** 2 / 12 if activations == "fp8" else step**2 / 12
    return np.minimum(noise, power).astype(np.float32)
