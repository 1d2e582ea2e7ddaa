"""Quantization schemes: how a tensor is stored and how its input is rounded. Recipes, menus, the planner, checkpoints,
proofs, reports and passes share this one type.

``KINDS`` lists what a scheme can be. What a package does with a kind is in that package's own table, keyed by the
kind's name: ``quantization/formats`` fits and stores it, ``engines/lowerings.py`` says which pass computes it. A test
demands an entry or a refusal with its reason for every kind in each table (docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import field_validator, model_validator

from tapeout.artifact import Frozen
from tapeout.errors import QuantizationError

Activations = Literal["float", "int8"]  # int8: one static scale for the whole input
SMALLEST_GROUP = 16  # input channels


@dataclass(frozen=True)
class SchemeKind:
    """``grouped``: input channels share scales in groups of ``Scheme.group_size``. The others have at most one scale
    per output channel.
    """

    name: str
    bits: int  # of a code; 32: a float
    activations: Activations = "float"
    grouped: bool = True


@dataclass(frozen=True)
class Refusal:
    """A table's entry for a kind that it does not take, and why: a clause for messages."""

    kind: str
    reason: str


KINDS = {
    kind.name: kind
    for kind in (
        SchemeKind("float", 32, grouped=False),
        SchemeKind("int4", 4),
        SchemeKind("int5", 5),
        SchemeKind("int6", 6),
        SchemeKind("int8", 8),
        SchemeKind("int8-static", 8, activations="int8", grouped=False),
    )
}


def _kind(bits: Any, activations: Any) -> SchemeKind | None:
    return next((kind for kind in KINDS.values() if (kind.bits, kind.activations) == (bits, activations)), None)


class Scheme(Frozen):
    """``bits`` 32 is float. Without groups, ``group_size`` is None: one scale per output channel, on a symmetric grid.

    >>> Scheme(bits=8, activations="int8") == STATIC_INT8, Scheme(bits=32).group_size
    (True, None)
    """

    bits: int
    group_size: Literal[16, 32, 64, 128, 256] | None = 32
    symmetric: bool = False
    positive_scales: bool = False  # of symmetric grids: TensorRT documents no others
    activations: Activations = "float"

    @model_validator(mode="before")
    @classmethod
    def _without_groups(cls, data: Any) -> Any:
        """Whatever is said of groups, a kind without groups has one form."""
        kind = _kind(data.get("bits"), data.get("activations", "float")) if isinstance(data, dict) else None
        if kind is None or kind.grouped:
            return data
        return {**data, "group_size": None, "symmetric": True, "positive_scales": False}

    @field_validator("bits")
    @classmethod
    def _some_kind(cls, bits: int) -> int:
        known = sorted({kind.bits for kind in KINDS.values()})
        if bits not in known:
            raise ValueError(f"expected one of {', '.join(map(str, known))}, found {bits}")
        return bits

    @model_validator(mode="after")
    def _known(self) -> Scheme:
        if _kind(self.bits, self.activations) is None:
            needed = [str(kind.bits) for kind in KINDS.values() if kind.activations == self.activations]
            raise ValueError(f"activations: {self.activations} needs bits: {' or '.join(needed)}, found {self.bits}")
        if self.group_size is None and KINDS[self.kind].grouped:
            raise ValueError(f"group_size: {self.bits} bits need one, found none")
        if self.positive_scales and not self.symmetric:
            raise ValueError("positive_scales: true needs symmetric: true; with zero points no scale is negative")
        return self

    @property
    def kind(self) -> str:
        """The key of every package's table."""
        found = _kind(self.bits, self.activations)
        assert found is not None
        return found.name

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
    def levels(self) -> int:
        """Codes are ``0 .. levels - 1``."""
        return 1 << self.bits

    @property
    def midpoint(self) -> int:
        """The zero point of a symmetric grid."""
        return self.levels // 2

    def bits_per_weight(self, columns: int) -> float:
        """With float16 scales and, when asymmetric, packed zero points; ``columns`` are the input channels.

        >>> Scheme(bits=4, group_size=32).bits_per_weight(64)
        4.625
        """
        return self.bits + (16 + (0 if self.symmetric else self.bits)) / (self.group_size or columns)

    def fitted(self, columns: int) -> Scheme:
        """The scheme with a group size that divides ``columns``: its own, or the largest power-of-two fraction.

        >>> Scheme(bits=4, group_size=128).fitted(576).group_size
        64
        """
        if self.group_size is None:
            return self
        if columns % SMALLEST_GROUP:
            raise QuantizationError(
                f"{columns} input channels",
                expected=f"a multiple of {SMALLEST_GROUP}, the smallest group",
                remedy="add a rule with bits: 32 that leaves this linear in float",
            )
        size: int = self.group_size
        while columns % size:
            size //= 2
        return self.model_copy(update={"group_size": size})


FLOAT = Scheme(bits=32)
STATIC_INT8 = Scheme(bits=8, activations="int8")

# For linears. Groups of 128 shrink to 64 where they do not divide the inputs, and are 1.06 to 1.10 times as fast as 64
# from eight rows on (docs/native-kernels.md). 5 bits in groups of 32 have 0.6 to 0.7 times the KL of 64 at 5 % more
# bytes (docs/benchmarks/plans.md).
CANDIDATE_SCHEMES: tuple[Scheme, ...] = (
    FLOAT,
    Scheme(bits=8, group_size=128, symmetric=True),
    STATIC_INT8,
    Scheme(bits=6, group_size=64, symmetric=True),
    Scheme(bits=6, group_size=128, symmetric=True),
    Scheme(bits=5, group_size=32, symmetric=True),
    Scheme(bits=4, group_size=32, symmetric=True),
    Scheme(bits=4, group_size=128, symmetric=True),
)

# For the token embedding and lm_head. Weight-only, since an embedding is gathered, and symmetric, as checkpoints hold
# quantized embeddings.
EMBEDDING_CANDIDATES: tuple[Scheme, ...] = (
    FLOAT,
    Scheme(bits=8, group_size=64, symmetric=True),
    Scheme(bits=8, group_size=128, symmetric=True),
    Scheme(bits=6, group_size=64, symmetric=True),
    Scheme(bits=6, group_size=32, symmetric=True),
    Scheme(bits=5, group_size=32, symmetric=True),
    Scheme(bits=4, group_size=32, symmetric=True),
)
