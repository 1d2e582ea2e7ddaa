"""Integer grids for weights: fit a range, round to the nearest code, and go back.

N  output channels      K  input channels      g  group size (input channels that share one scale)
G  groups, K / g

A code ``q`` is stored unsigned in ``[0, 2^bits)``; ``weight ≈ (q - zero_point) * scale``. Symmetric grids have no
zero points: theirs is the midpoint ``2^(bits-1)``. They use the full range ``[-2^(bits-1), 2^(bits-1)-1]``: the sign
of the scale is chosen so that the value of largest magnitude lies exactly on the lowest code. For groups that is as
good as an asymmetric grid. So **scales may be negative**, unless a scheme asks for positive ones: a largest value above
zero then lies on the highest code, and steps are an eighth wider in 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapeout.errors import QuantizationError
from tapeout.schemes import Scheme

FloatArray = NDArray[np.float32]
CodeArray = NDArray[np.uint8]

# Codes are searched for the scale that is stored: float16 keeps 11 bits of it at 16/g bits per weight.
_SMALLEST_NORMAL_HALF = np.float32(np.finfo(np.float16).smallest_normal)
_LARGEST_HALF = np.float32(np.finfo(np.float16).max)
# A group that asks for a smaller scale counts as zero: a producer that divides it, or a step of the inputs that
# multiplies it, could make it zero or a number that processors flush to zero.
_SMALLEST_SCALE = np.float32(1e-33)
_LARGEST_SQUARED = 1e15  # squares of larger numbers and their sums overflow float32


@dataclass(frozen=True)
class Grid:
    """Where the codes of each group lie: ``scales`` and (integral) ``zero_points``, both float32 ``[N, G]``."""

    scales: FloatArray
    zero_points: FloatArray


@dataclass(frozen=True)
class QuantizedLinear:
    """A weight ``[N, K]`` as codes. ``zero_points`` is None for a symmetric scheme: all are the midpoint."""

    codes: CodeArray  # [N, K], unsigned
    scales: FloatArray  # [N, G], may be negative
    zero_points: CodeArray | None  # [N, G], unsigned
    scheme: Scheme  # fitted to K
    input_scale: float | None = None  # step of the inputs' static int8 grid; None: inputs stay in float

    @property
    def group_size(self) -> int:
        return self.scheme.group_size or self.codes.shape[1]

    def dequantize(self) -> FloatArray:
        """float32 ``[N, K]``."""
        zero_points = self.scheme.midpoint if self.zero_points is None else self.zero_points[:, :, None]
        decoded = self.codes.astype(np.float32, order="C")
        groups = grouped(decoded, self.scheme)  # in place: an embedding may have gigabytes
        groups -= np.float32(zero_points)
        groups *= self.scales[:, :, None]
        return decoded


def grouped(weight: FloatArray, scheme: Scheme) -> FloatArray:
    """``[N, K]`` as ``[N, G, g]``, without a copy."""
    rows, columns = weight.shape
    size = scheme.group_size or columns
    if columns % size:
        raise QuantizationError(
            f"{columns} input channels in groups of {size}",
            expected="a group size that divides the input channels",
            remedy="fit the scheme to them with Scheme.fitted",
        )
    return weight.reshape(rows, columns // size, size)


def storable(scales: FloatArray) -> FloatArray:
    """The scales that will be stored: rounded to float16 where that keeps their precision, else unchanged."""
    magnitude = np.abs(scales)
    if np.all((magnitude >= _SMALLEST_NORMAL_HALF) & (magnitude <= _LARGEST_HALF)):
        return scales.astype(np.float16).astype(np.float32)
    return scales


def fits_half(scales: FloatArray) -> bool:
    """Whether float16 holds exactly these scales."""
    with np.errstate(over="ignore"):
        return np.array_equal(scales.astype(np.float16).astype(np.float32), scales)


def fit_range(weight: FloatArray, scheme: Scheme, *, shrink: float = 1.0) -> Grid:
    """The grid that spans each group's range (times ``shrink``). All-zero groups get scale 1 and decode to zero,
    and so do those that are too small to have a scale.
    """
    if not np.isfinite(weight).all():
        raise QuantizationError(
            f"{int((~np.isfinite(weight)).sum())} weights are NaN or infinite",
            expected="finite weights",
            remedy="check the source checkpoint",
        )
    groups, midpoint = grouped(weight, scheme), scheme.midpoint
    low, high = groups.min(axis=2), groups.max(axis=2)
    if scheme.symmetric:
        if scheme.positive_scales:
            scales = np.maximum(low / np.float32(-midpoint), high / np.float32(midpoint - 1)) * np.float32(shrink)
        else:
            extreme = np.where(-low >= high, low, high) * np.float32(shrink)
            scales = extreme / np.float32(-midpoint)
        zero_points = np.full_like(scales, midpoint)
    else:
        low, high = np.minimum(low, 0) * np.float32(shrink), np.maximum(high, 0) * np.float32(shrink)
        steps = np.float32(scheme.levels - 1)
        with np.errstate(over="ignore"):
            scales = (high - low) / steps
        scales = np.where(np.isinf(scales), high / steps - low / steps, scales)
        safe = np.where(scales < _SMALLEST_SCALE, np.float32(1), scales)
        zero_points = np.clip(np.rint(-low / safe), 0, scheme.levels - 1)
    scales = np.where(np.abs(scales) < _SMALLEST_SCALE, np.float32(1), scales)
    return Grid(storable(scales), zero_points.astype(np.float32))


def nearest_codes(weight: FloatArray, grid: Grid, scheme: Scheme) -> FloatArray:
    """Codes ``[N, G, g]`` as float32 (a working form; :func:`round_to` gives the stored one)."""
    codes = np.rint(grouped(weight, scheme) / grid.scales[:, :, None])
    codes += grid.zero_points[:, :, None]
    return np.clip(codes, 0, scheme.levels - 1, out=codes)


def round_to(weight: FloatArray, grid: Grid, scheme: Scheme) -> QuantizedLinear:
    return assemble(nearest_codes(weight, grid, scheme).reshape(weight.shape), grid, scheme)


def assemble(codes: FloatArray, grid: Grid, scheme: Scheme) -> QuantizedLinear:
    """A stored linear from working codes ``[N, K]`` and their grid."""
    zero_points = None if scheme.symmetric else grid.zero_points.astype(np.uint8)
    return QuantizedLinear(codes.astype(np.uint8), grid.scales, zero_points, scheme)


def round_to_nearest(weight: FloatArray, scheme: Scheme) -> QuantizedLinear:
    """RTN: what every other method is compared with."""
    return round_to(weight, fit_range(weight, scheme), scheme)


def output_error(delta: FloatArray, gram: FloatArray) -> float:
    """Mean over tokens of the squared norm of ``delta @ x``, exactly, with no forward pass.

    ``delta`` is ``[N, K]``; ``gram`` is ``[B, k, k]``, diagonal blocks of the mean of x xᵀ: the error is
    tr(Δ · gram · Δᵀ). Errors of channels in different blocks count as independent.
    """
    largest = max(float(delta.max(initial=0)), -float(delta.min(initial=0)))
    if largest > _LARGEST_SQUARED and np.isfinite(largest):
        return output_error(delta / np.float32(largest), gram) * largest**2
    parts = np.split(delta, len(gram), axis=1)
    return sum(
        float(np.einsum("nk,nk->", part @ block, part, dtype=np.float64))
        for part, block in zip(parts, gram, strict=True)
    )


def diagonal(gram: FloatArray) -> FloatArray:
    """``[K]``, the mean of x²: a view of ``gram [B, k, k]`` where that is one block."""
    return np.einsum("bkk->bk", gram).reshape(-1)
