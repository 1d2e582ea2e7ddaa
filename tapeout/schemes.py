"""The kernels a linear or a table can have: lists that recipes, the cost table and the planner share.

A kernel says how weights are stored and how inputs are rounded; it knows no shape. Another one is another entry of
``MENU``, or of ``TABLE_MENU`` for the token embedding and the output head: rules can name it by its fields, its cost is
measured on what the passes of the target make of it, and its sensitivity on what ``quantization.quick_rounding`` makes
of it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from tapeout.artifact import Frozen


class Scheme(Frozen):
    """``bits`` 32 leaves a linear in float. With int8 ``activations`` inputs lie on one static grid, and weights are
    symmetric with one scale per output channel, whatever ``group_size`` and ``symmetric`` say.
    """

    bits: Literal[4, 6, 8, 32]
    group_size: Literal[16, 32, 64, 128, 256] = 32
    symmetric: bool = False
    positive_scales: bool = False  # of symmetric grids: TensorRT documents no others
    activations: Literal["float", "int8"] = "float"

    @model_validator(mode="after")
    def _int8_products_take_int8_weights(self) -> Scheme:
        if self.activations == "int8" and self.bits != 8:
            raise ValueError(f"activations: int8 needs bits: 8, found bits: {self.bits}")
        return self

    @model_validator(mode="after")
    def _scales_beside_zero_points_are_positive_anyway(self) -> Scheme:
        if self.positive_scales and not self.symmetric:
            raise ValueError("positive_scales: true needs symmetric: true; with zero points no scale is negative")
        return self

    @property
    def name(self) -> str:
        """What tables call it.

        >>> Scheme(bits=4).name, Scheme(bits=8, activations="int8").name
        ('4-bit g32 asym', 'static int8')
        """
        if self.bits == 32:
            return "fp32"
        if self.activations == "int8":
            return "static int8"
        return f"{self.bits}-bit g{self.group_size}{'' if self.symmetric else ' asym'}"

    @property
    def in_blocks(self) -> bool:
        """Whether input channels share scales in groups of ``group_size``."""
        return self.bits != 32 and self.activations == "float"


FLOAT = Scheme(bits=32, symmetric=True)
STATIC_INT8 = Scheme(bits=8, symmetric=True, activations="int8")

# Groups of 128 shrink to 64 where they do not divide the inputs. Larger or smaller ones of 8 bits are no faster.
MENU: tuple[Scheme, ...] = (
    FLOAT,
    Scheme(bits=8, group_size=128, symmetric=True),
    STATIC_INT8,
    Scheme(bits=6, group_size=64, symmetric=True),
    Scheme(bits=4, group_size=32, symmetric=True),
    Scheme(bits=4, group_size=128, symmetric=True),
)

# Weight-only, since a table is gathered, and symmetric, as checkpoints hold quantized embeddings.
TABLE_MENU: tuple[Scheme, ...] = (
    FLOAT,
    Scheme(bits=8, group_size=64, symmetric=True),
    Scheme(bits=6, group_size=64, symmetric=True),
    Scheme(bits=6, group_size=32, symmetric=True),
    Scheme(bits=4, group_size=32, symmetric=True),
)
