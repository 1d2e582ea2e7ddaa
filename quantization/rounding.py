"""Integer grids for weights: fit a range, round to the nearest code, and go back.

N  output channels      K  input channels      g  group size (input channels that share one scale)
G  groups in a row, K / g

A code ``q`` is stored unsigned in ``[0, 2^bits)``; ``weight ≈ (q - zero_point) * scale``. Symmetric grids have no
zero points: theirs is the midpoint ``2^(bits-1)``. They use the full range ``[-2^(bits-1), 2^(bits-1)-1]``: the sign
of the scale is chosen so that the value of largest magnitude lies exactly on the lowest code, which is as good as
an asymmetric grid for groups (reference A1, "full-range symmetric"); so **scales may be negative**, unless a format
asks for positive ones: an extreme on the upper side then lies on the highest code, and steps are an eighth wider.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tapeout.errors import QuantizationError

FloatArray = NDArray[np.float32]
CodeArray = NDArray[np.uint8]
SMALLEST_GROUP = 16  # input channels
Bits = Literal[4, 6, 8]  # of a code
Activations = Literal["float", "int8"]  # int8: static, one scale for the whole input

# Codes are searched for the scale that is stored: float16 keeps 11 bits of it at 16/g bits per weight.
_SMALLEST_NORMAL_HALF = np.float32(np.finfo(np.float16).smallest_normal)
_LARGEST_HALF = np.float32(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Format:
    """How one linear is stored: ``bits`` 4, 6 or 8, one scale per ``group_size`` input channels.

    ``positive`` is how a symmetric grid is chosen, not how it is stored, so formats that differ in it alone are equal.

    With int8 activations a group is a whole row (one scale per output channel), as integer products need it.

    >>> Format(4, 32, symmetric=False).bits_per_weight
    4.625
    """

    bits: Bits
    group_size: int
    symmetric: bool
    activations: Activations = "float"
    positive: bool = field(default=False, compare=False)

    @property
    def levels(self) -> int:
        return 1 << self.bits

    @property
    def midpoint(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def bits_per_weight(self) -> float:
        """With float16 scales and, when asymmetric, packed zero points."""
        return self.bits + (16 + (0 if self.symmetric else self.bits)) / self.group_size

    def __str__(self) -> str:
        if self.activations == "int8":
            return f"int{self.bits} per channel, static int8 activations"
        return f"int{self.bits} g{self.group_size} {'sym' if self.symmetric else 'asym'}"


@dataclass(frozen=True)
class Grid:
    """Where the codes of each group lie: ``scales`` and (integral) ``zero_points``, both float32 ``[N, G]``."""

    scales: FloatArray
    zero_points: FloatArray


@dataclass(frozen=True)
class QuantizedLinear:
    """A weight ``[N, K]`` as codes. ``zero_points`` is None for the midpoint ``2^(bits-1)``."""

    codes: CodeArray  # [N, K], unsigned
    scales: FloatArray  # [N, G], may be negative
    zero_points: CodeArray | None  # [N, G], unsigned
    bits: Bits
    group_size: int
    input_scale: float | None = None  # step of the inputs' static int8 grid; None: inputs stay in float

    @property
    def format(self) -> Format:
        activations = "float" if self.input_scale is None else "int8"
        return Format(self.bits, self.group_size, symmetric=self.zero_points is None, activations=activations)

    def dequantize(self) -> FloatArray:
        """float32 ``[N, K]``."""
        zero_points = self.format.midpoint if self.zero_points is None else self.zero_points[:, :, None]
        codes = grouped(self.codes.astype(np.float32), self.group_size)
        return ((codes - np.float32(zero_points)) * self.scales[:, :, None]).reshape(self.codes.shape)


def grouped(weight: FloatArray, group_size: int) -> FloatArray:
    """``[N, K]`` as ``[N, G, g]``, without a copy."""
    rows, columns = weight.shape
    if columns % group_size:
        raise QuantizationError(
            f"{columns} input channels in groups of {group_size}",
            expected="a group size that divides the input channels",
            remedy="choose it with rounding.fitting_group_size",
        )
    return weight.reshape(rows, columns // group_size, group_size)


def fitting_group_size(group_size: int, columns: int) -> int:
    """The wanted group size, or the largest power-of-two fraction of it (at least 16) that divides ``columns``.

    >>> fitting_group_size(128, 576), fitting_group_size(64, 576)
    (64, 64)
    """
    size = group_size
    while size >= SMALLEST_GROUP:
        if columns % size == 0:
            return size
        size //= 2
    raise QuantizationError(
        f"{columns} input channels",
        expected=f"a multiple of {SMALLEST_GROUP}, the smallest group",
        remedy="add a rule with bits: 32 that leaves this linear in float",
    )


def storable(scales: FloatArray) -> FloatArray:
    """The scales that will be stored: rounded to float16 where that keeps their precision, else unchanged."""
    magnitude = np.abs(scales)
    if np.all((magnitude >= _SMALLEST_NORMAL_HALF) & (magnitude <= _LARGEST_HALF)):
        return scales.astype(np.float16).astype(np.float32)
    return scales


def fit_range(weight: FloatArray, fmt: Format, *, shrink: float = 1.0) -> Grid:
    """The grid that spans each group's range (times ``shrink``). All-zero groups get scale 1 and decode to zero."""
    if not np.isfinite(weight).all():
        raise QuantizationError(
            f"{int((~np.isfinite(weight)).sum())} weights are NaN or infinite",
            expected="finite weights",
            remedy="check the source checkpoint",
        )
    groups = grouped(weight, fmt.group_size)
    low, high = groups.min(axis=2), groups.max(axis=2)
    if fmt.symmetric:
        if fmt.positive:
            scales = np.maximum(low / np.float32(-fmt.midpoint), high / np.float32(fmt.midpoint - 1)) * np.float32(
                shrink
            )
        else:
            extreme = np.where(-low >= high, low, high) * np.float32(shrink)
            scales = extreme / np.float32(-fmt.midpoint)
        zero_points = np.full_like(scales, fmt.midpoint)
    else:
        low, high = np.minimum(low, 0) * np.float32(shrink), np.maximum(high, 0) * np.float32(shrink)
        scales = (high - low) / np.float32(fmt.levels - 1)
        safe = np.where(scales == 0, np.float32(1), scales)
        zero_points = np.clip(np.rint(-low / safe), 0, fmt.levels - 1)
    scales = np.where(scales == 0, np.float32(1), scales)
    return Grid(storable(scales), zero_points.astype(np.float32))


def nearest_codes(weight: FloatArray, grid: Grid, fmt: Format) -> FloatArray:
    """Codes ``[N, G, g]`` as float32 (a working form; :func:`round_to` gives the stored one)."""
    codes = np.rint(grouped(weight, fmt.group_size) / grid.scales[:, :, None])
    codes += grid.zero_points[:, :, None]
    return np.clip(codes, 0, fmt.levels - 1, out=codes)


def round_to(weight: FloatArray, grid: Grid, fmt: Format) -> QuantizedLinear:
    return assemble(nearest_codes(weight, grid, fmt).reshape(weight.shape), grid, fmt)


def assemble(codes: FloatArray, grid: Grid, fmt: Format) -> QuantizedLinear:
    """A stored linear from working codes ``[N, K]`` and their grid."""
    zero_points = None if fmt.symmetric else grid.zero_points.astype(np.uint8)
    return QuantizedLinear(codes.astype(np.uint8), grid.scales, zero_points, fmt.bits, fmt.group_size)


def round_to_nearest(weight: FloatArray, fmt: Format) -> QuantizedLinear:
    """What every other method is compared with."""
    return round_to(weight, fit_range(weight, fmt), fmt)


def pack(codes: CodeArray, bits: int) -> NDArray[np.int32]:
    """``[R, C]`` codes into ``[R, ceil(C * bits / 32)]`` words, the first code in the lowest bits.

    >>> pack(np.array([[1, 2, 3, 4, 5, 6, 7, 8]], np.uint8), 4).view(np.uint32).tolist() == [[0x87654321]]
    True
    """
    columns = codes.shape[1]
    padded = np.pad(codes, ((0, 0), (0, -columns % 32)))
    if bits == 4:
        padded = padded[:, 0::2] | (padded[:, 1::2] << np.uint8(4))
    elif bits == 6:  # codes lie across the bounds of bytes and words: four of them in three bytes
        first, second, third, fourth = (padded[:, at::4] for at in range(4))
        bytes_ = [first | (second << 6), (second >> 2) | (third << 4), (third >> 4) | (fourth << 2)]
        padded = np.stack(bytes_, axis=2).reshape(len(codes), -1)
    padded = padded[:, : -(-columns * bits // 32) * 4]
    return np.ascontiguousarray(padded).view("<i4").astype(np.int32, copy=False)


def unpack(words: NDArray[np.int32], bits: int, columns: int) -> CodeArray:
    """The inverse of :func:`pack`."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets[:, :columns]
    if bits == 6:
        threes = np.pad(octets, ((0, 0), (0, -octets.shape[1] % 3))).reshape(len(octets), -1, 3)
        low, middle, high = (threes[:, :, at] for at in range(3))
        unpacked = np.empty((*threes.shape[:2], 4), np.uint8)
        unpacked[:, :, 0] = low & 63
        unpacked[:, :, 1] = (low >> 6) | (middle & 15) << 2
        unpacked[:, :, 2] = (middle >> 4) | (high & 3) << 4
        unpacked[:, :, 3] = high >> 2
        return unpacked.reshape(len(octets), -1)[:, :columns]
    codes = np.empty((octets.shape[0], octets.shape[1] * 2), np.uint8)
    codes[:, 0::2] = octets & np.uint8(0x0F)
    codes[:, 1::2] = octets >> np.uint8(4)
    return codes[:, :columns]
