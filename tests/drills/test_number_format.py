"""A table of sixteen values, the 4-bit floats of FP4, becomes a number format."""

from __future__ import annotations

from pathlib import Path

from tests.drills.checkout import Checkout

MODULE = '''"""FP4: floats with two bits of exponent and one of mantissa (E2M1, OCP Microscaling Formats 1.0, 5.3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tapeout.formats.int4 import pack, unpack
from tapeout.number_format import AnyArray, Coded, FloatArray, Grid, Grouping, grouped, require_finite, storable
from tapeout.packed_codes import PackedCodes

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
BETWEEN = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
TWICE = (2 * VALUES).astype(np.int16)  # integers from -12 to 12


@dataclass(frozen=True)
class E2M1(PackedCodes):
    number_type: str = "float"
    integer_bits: int = 5

    def fit(self, weight: FloatArray, grouping: Grouping, shrink: float = 1.0) -> Grid:
        require_finite(weight)
        scales = np.abs(grouped(weight, grouping)).max(axis=-1) * np.float32(shrink / 6)
        return Grid(storable(np.where(scales < 1e-33, np.float32(1), scales)), np.zeros_like(scales))

    def rounded(self, scaled: FloatArray, zero_points: FloatArray) -> FloatArray:
        codes = np.searchsorted(BETWEEN, np.abs(scaled))
        return (codes + 8 * ((scaled < 0) & (codes > 0))).astype(np.float32)

    def values(self, codes: AnyArray, zero_points: AnyArray | float) -> FloatArray:
        return VALUES[codes.astype(np.intp)]

    def widened(self, weight: Coded, bits: int) -> Coded | None:
        if bits < self.integer_bits:
            return None
        codes = (TWICE[weight.codes] + (1 << (bits - 1))).astype(np.uint8)
        return weight._replace(codes=codes, scales=weight.scales * np.float32(0.5))


FORMAT = E2M1("e2m1", 4, pack, unpack)
'''
MOST_EDITED = 2


def test_a_table_of_values(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "checkout")
    checkout.add("tapeout/formats/e2m1.py", MODULE)
    checkout.edit("docs/extending.md", "Number formats: ", "Number formats: `e2m1`, ")
    assert len(checkout.edited) <= MOST_EDITED
    checkout.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_schemes.py")
    rule = {"format": "e2m1", "group_size": 32}
    plan = {"schemes": [{"match": "*", **rule}], "embeddings": rule, "kv_cache": {"dtype": "int8"}}
    found = checkout.stages(tmp_path / "project", {"plan": plan})
    assert {found["checks"][name] for name in ("quantized", "parity_kl", "parity_error")} == {"PASS"}, found
    assert all("e2m1 g32" in kernel for kernel in found["plan"].values()), found["plan"]


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    """MXFP4 is there already; every stage takes it, and kernels read its codes as they are."""
    checkout = Checkout(tmp_path / "checkout")
    rule = {"format": "mxfp4"}
    plan = {"schemes": [{"match": "*", **rule}], "embeddings": rule, "kv_cache": {"dtype": "int8"}}
    found = checkout.stages(tmp_path / "project", {"plan": plan})
    assert {found["checks"][name] for name in ("quantized", "parity_kl", "parity_error")} == {"PASS"}, found
    assert all("mxfp4 g32" in kernel and "stored in" not in kernel for kernel in found["plan"].values()), found
