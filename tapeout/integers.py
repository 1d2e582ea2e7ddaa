"""Integer codes on an affine grid.

A code ``q`` is stored unsigned in ``[0, 2^bits)``; ``weight ≈ (q - zero_point) * scale``. Symmetric grids have no
zero points: theirs is the midpoint ``2^(bits-1)``. They use the full range ``[-2^(bits-1), 2^(bits-1)-1]``: the sign
of the scale is chosen so that the value of largest magnitude lies exactly on the lowest code. For groups that is as
good as an asymmetric grid. So **scales may be negative**, unless a scheme asks for positive ones: a largest value above
zero then lies on the highest code, and steps are an eighth wider in 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tapeout.number_format import AnyArray, Coded, FloatArray, Grid, Grouping, grouped, require_finite, storable
from tapeout.packed_codes import PackedCodes

# A group that asks for a smaller scale counts as zero: a producer that divides it, or a step of the inputs that
# multiplies it, could make it zero or a number that processors flush to zero.
_SMALLEST_SCALE = np.float32(1e-33)


@dataclass(frozen=True)
class Integers(PackedCodes):
    affine: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "midpoint", 1 << (self.bits - 1))

    @property
    def levels(self) -> int:
        """Codes are ``0 .. levels - 1``."""
        return 1 << self.bits

    @property
    def integer_bits(self) -> int:
        return self.bits

    def fit(self, weight: FloatArray, grouping: Grouping, shrink: float = 1.0) -> Grid:
        """Groups that are too small to have a scale decode to zero, too."""
        require_finite(weight)
        groups, midpoint = grouped(weight, grouping), self.midpoint
        low, high = groups.min(axis=-1), groups.max(axis=-1)
        if grouping.symmetric:
            if grouping.positive_scales:
                scales = np.maximum(low / np.float32(-midpoint), high / np.float32(midpoint - 1)) * np.float32(shrink)
            else:
                extreme = np.where(-low >= high, low, high) * np.float32(shrink)
                scales = extreme / np.float32(-midpoint)
            zero_points = np.full_like(scales, midpoint)
        else:
            low, high = np.minimum(low, 0) * np.float32(shrink), np.maximum(high, 0) * np.float32(shrink)
            steps = np.float32(self.levels - 1)
            with np.errstate(over="ignore"):
                scales = (high - low) / steps
            scales = np.where(np.isinf(scales), high / steps - low / steps, scales)
            safe = np.where(scales < _SMALLEST_SCALE, np.float32(1), scales)
            zero_points = np.clip(np.rint(-low / safe), 0, self.levels - 1)
        scales = np.where(np.abs(scales) < _SMALLEST_SCALE, np.float32(1), scales)
        return Grid(storable(scales), zero_points.astype(np.float32))

    def rounded(self, scaled: FloatArray, zero_points: FloatArray) -> FloatArray:
        codes = np.rint(scaled, out=scaled)
        codes += zero_points
        return np.clip(codes, 0, self.levels - 1, out=codes)

    def values(self, codes: AnyArray, zero_points: AnyArray | float) -> FloatArray:
        decoded = codes.astype(np.float32, order="C")  # in place: an embedding may have gigabytes
        decoded -= np.asarray(zero_points, np.float32)
        return decoded

    def widened(self, weight: Coded, bits: int) -> Coded | None:
        if bits < self.bits:
            return None
        up = 0 if weight.zero_points is not None else (1 << (bits - 1)) - self.midpoint
        return weight._replace(codes=weight.codes + np.uint8(up)) if up else weight
