"""Weights as codes with the scheme that says what they mean: rounded to nearest, and decoded.

N  output channels      K  input channels      g  group size      G  groups, K / g
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tapeout.errors import QuantizationError
from tapeout.formats import formats
from tapeout.number_format import CodeArray, Coded, FloatArray, Grid, NumberFormat, grouped
from tapeout.schemes import FLOAT, Scheme

_FEW_OUTPUTS = 16  # that tell of most weights that they are no codes of a scheme
SOME_STEP = 1 / 32  # of static inputs, where no calibration tells one


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight ``[..., N, K]`` as codes. ``zero_points`` None: all are the midpoint of the format.

    Where experts differ in bits, all have the codes of the widest here, whose values are the same to the bit. A part
    has its own.
    """

    codes: CodeArray  # [..., N, K], unsigned
    scales: FloatArray  # [..., N, G], may be negative
    zero_points: CodeArray | None  # [..., N, G], unsigned
    scheme: Scheme  # fitted to K
    input_scale: float | None = None  # of the inputs' static grid; None: inputs stay in float

    @classmethod
    def of(cls, coded: Coded, scheme: Scheme) -> QuantizedWeight:
        return cls(coded.codes, coded.scales, coded.zero_points, scheme, coded.input_scale)

    @property
    def coded(self) -> Coded:
        return Coded(self.codes, self.scales, self.zero_points, self.input_scale)

    def part(self, index: int) -> QuantizedWeight:
        """At an index of the first dimension: one of the weights that :func:`stacked` was given.

        :class:`QuantizationError` for codes that its bits do not hold.
        """
        zero_points = None if self.zero_points is None else self.zero_points[index]
        scheme, codes = self.scheme.of_expert(index), self.codes[index]
        if scheme.bits != self.scheme.bits:
            codes = _narrowed(codes, self.scheme, scheme, index)
        return replace(self, codes=codes, scales=self.scales[index], zero_points=zero_points, scheme=scheme)

    def rows(self, wanted: slice | NDArray[np.int64]) -> QuantizedWeight:
        """Some output channels of a weight ``[N, K]``, in this order."""
        zero_points = None if self.zero_points is None else self.zero_points[wanted]
        return replace(self, codes=self.codes[wanted], scales=self.scales[wanted], zero_points=zero_points)

    @property
    def group_size(self) -> int:
        return self.scheme.group_size or self.codes.shape[-1]

    def dequantize(self) -> FloatArray:
        """float32 ``[..., N, K]``."""
        number_format = format_of(self.scheme)
        size = self.group_size
        groups = self.codes.reshape(*self.codes.shape[:-1], self.codes.shape[-1] // size, size)
        zero_points = number_format.midpoint if self.zero_points is None else self.zero_points[..., None]
        values = number_format.values(groups, zero_points)
        values *= self.scales[..., None]
        return values.reshape(self.codes.shape)

    def widened(self, bits: int) -> QuantizedWeight | None:
        """The same weight to the bit, in integer codes of ``bits``; None where these cannot hold it."""
        if self.scheme.format == f"int{bits}":
            return self
        found = format_of(self.scheme).widened(self.coded, bits)
        return None if found is None else QuantizedWeight.of(found, self.scheme.in_format(f"int{bits}"))


def _narrowed(codes: CodeArray, scheme: Scheme, narrow: Scheme, expert: int) -> CodeArray:
    """Codes of ``scheme`` as those of ``narrow``, which has fewer bits."""
    down = format_of(scheme).midpoint - format_of(narrow).midpoint if scheme.symmetric else 0
    if codes.size and not down <= codes.min() <= codes.max() < down + (1 << narrow.bits):
        raise QuantizationError(
            f"expert {expert} has codes from {codes.min()} to {codes.max()} in {scheme.bits} bits",
            expected=f"codes from {down} to {down + (1 << narrow.bits) - 1}, as it has {narrow.bits} bits",
            remedy="run `dvc repro quantize`",
        )
    return codes - np.uint8(down)


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights ``[N, K]`` as one ``[len(weights), N, K]``, as the experts of a mixture are held.

    Their schemes differ in bits at most: see :meth:`tapeout.schemes.Scheme.of_experts`.
    """
    scheme = Scheme.of_experts([weight.scheme for weight in weights])
    assert scheme is not None, "whoever rounds experts has one scheme of them all"
    if scheme.expert_bits:
        weights = [wide for weight in weights if (wide := weight.widened(scheme.bits))]
    zero_points = [weight.zero_points for weight in weights if weight.zero_points is not None]
    return replace(
        weights[0],
        scheme=scheme,
        codes=np.stack([weight.codes for weight in weights]),
        scales=np.stack([weight.scales for weight in weights]),
        zero_points=np.stack(zero_points) if zero_points else None,
    )


def format_of(scheme: Scheme) -> NumberFormat:
    """:class:`QuantizationError` for weights without codes."""
    found = formats()[scheme.format]
    if not isinstance(found, NumberFormat):
        raise QuantizationError(f"a quantized weight in {scheme.name}", expected="a scheme with codes")
    return found


def is_e4m3(scheme: Scheme) -> bool:
    """Whether codes are 8-bit floats, with one scale for each output channel and inputs that a kernel rounds alike."""
    found = format_of(scheme)
    return (found.number_type, found.bits, found.activations) == ("float", 8, "float")


def fit_range(weight: FloatArray, scheme: Scheme, *, shrink: float = 1.0) -> Grid:
    """See :meth:`tapeout.number_format.NumberFormat.fit`."""
    return format_of(scheme).fit(weight, scheme, shrink)


def nearest_codes(weight: FloatArray, grid: Grid, scheme: Scheme) -> FloatArray:
    """Codes ``[..., N, G, g]`` as float32 (a working form; :func:`round_to` gives the stored one)."""
    scaled = grouped(weight, scheme) / grid.scales[..., None]
    return format_of(scheme).rounded(scaled, grid.zero_points[..., None])


def round_to(weight: FloatArray, grid: Grid, scheme: Scheme) -> QuantizedWeight:
    return assemble(nearest_codes(weight, grid, scheme).reshape(weight.shape), grid, scheme)


def assemble(codes: FloatArray, grid: Grid, scheme: Scheme) -> QuantizedWeight:
    """A stored weight from working codes ``[..., N, K]`` and their grid."""
    zero_points = None if scheme.symmetric else grid.zero_points.astype(np.uint8)
    return QuantizedWeight(codes.astype(np.uint8), grid.scales, zero_points, scheme)


def round_to_nearest(weight: FloatArray, scheme: Scheme) -> QuantizedWeight:
    """RTN: what every other method is compared with. Of experts, each in its own bits."""
    if scheme.expert_bits:
        return stacked([round_to_nearest(part, scheme.of_expert(expert)) for expert, part in enumerate(weight)])
    return round_to(weight, fit_range(weight, scheme), scheme)


def nearest_if_exact(weights: Sequence[FloatArray], scheme: Scheme) -> list[QuantizedWeight] | None:
    """Weights ``[N, K]`` rounded to nearest, where all of them stay what they are; None where one changes.

    So a checkpoint whose weights were codes of the scheme is kept, and no method may change it.
    """
    found: list[QuantizedWeight] = []
    for weight in weights:
        some = weight[:_FEW_OUTPUTS]
        if not np.array_equal(round_to_nearest(some, scheme).dequantize(), some):
            return None
        found.append(round_to_nearest(weight, scheme))
        if not np.array_equal(found[-1].dequantize(), weight):
            return None
    return found


def stored_by_rtn(scheme: Scheme, weight: FloatArray) -> QuantizedWeight | FloatArray:
    """A weight ``[..., N, K]`` as a checkpoint holds it for a fitted scheme: right in size and speed, not quality."""
    if scheme == FLOAT:
        return weight
    rounded = round_to_nearest(weight, scheme)
    return rounded if scheme.activations == "float" else replace(rounded, input_scale=SOME_STEP)
