"""Quantization schemes: how a tensor is stored and how its input is rounded. Recipes, the planner, checkpoints, proofs,
reports and passes share this one type.

What its codes mean is the number format's (``tapeout/formats``); a scheme adds how weights share scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from tapeout.artifact import Frozen
from tapeout.errors import QuantizationError
from tapeout.formats import formats
from tapeout.number_format import SCALE_BITS, Activations, NumberFormat, ScaleType, Uncoded

SMALLEST_GROUP = 16  # input channels
AUTO = "auto"


def find_format(
    bits: Any, activations: Any = "float", number_type: str = "int", scale_type: ScaleType = "float"
) -> NumberFormat | Uncoded | None:
    """The format of so many bits. ``number_type``: of codes, as ``config.json`` of a checkpoint has it."""
    wanted = (bits, activations, "float" if bits == 32 else number_type, scale_type)
    return next((f for f in formats().values() if (f.bits, f.activations, f.number_type, f.scale_type) == wanted), None)


class Scheme(Frozen):
    """``bits`` 32 is float. Without groups, ``group_size`` is None: one scale per output channel, on a symmetric grid.

    ``expert_bits``: of experts of a mixture that differ, the bits of each; ``bits`` are then those of the widest.

    >>> Scheme(bits=8, activations="int8") == STATIC_INT8, Scheme(bits=32).group_size
    (True, None)
    """

    bits: int
    group_size: Literal[16, 32, 64, 128, 256] | None = 32
    symmetric: bool = False
    positive_scales: bool = False  # of symmetric grids: TensorRT documents no others
    activations: Activations = "float"
    format: str = AUTO  # a module of tapeout/formats; auto: the integers, or floats, of so many bits
    expert_bits: tuple[int, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _with_format(cls, data: Any) -> Any:
        """A format says its bits and its activations; and a format without groups has one form."""
        if not isinstance(data, dict):
            return data
        named = data.get("format", AUTO)
        if named not in (AUTO, *formats()):
            raise ValueError(f"format: expected one of {', '.join(sorted(formats()))}, found {named}")
        found = formats().get(named) or find_format(data.get("bits"), data.get("activations", "float"))
        if found is None:
            return data
        facts = {"bits": found.bits, "activations": found.activations}
        data = facts | {"format": found.name} | {name: value for name, value in data.items() if name != "format"}
        if not found.grouped:
            return {**data, "group_size": None, "symmetric": True, "positive_scales": False}
        if found.group_size is not None:
            data = {"group_size": found.group_size} | data
        return data if found.affine else {**data, "symmetric": True}

    @field_validator("bits")
    @classmethod
    def _some_format(cls, bits: int) -> int:
        known = sorted({found.bits for found in formats().values()})
        if bits not in known:
            raise ValueError(f"expected one of {', '.join(map(str, known))}, found {bits}")
        return bits

    @model_validator(mode="after")
    def _known(self) -> Scheme:
        if self.format not in formats():
            known = [found for found in formats().values() if found.activations == self.activations]
            needed = [str(found.bits) for found in known]
            if str(self.bits) in needed:
                names = " or ".join(found.name for found in known if found.bits == self.bits)
                raise ValueError(f"activations: {self.activations} needs format: {names}, found none")
            raise ValueError(f"activations: {self.activations} needs bits: {' or '.join(needed)}, found {self.bits}")
        found = formats()[self.format]
        if (found.bits, found.activations) != (self.bits, self.activations):
            raise ValueError(
                f"format: {self.format} has {found.bits} bits and activations {found.activations}, found {self.bits} "
                f"and {self.activations}"
            )
        if self.group_size is None and found.grouped:
            raise ValueError(f"group_size: {self.bits} bits need one, found none")
        if self.group_size != (found.group_size or self.group_size):
            raise ValueError(f"group_size: {self.format} has groups of {found.group_size}, found {self.group_size}")
        if self.positive_scales and not self.symmetric:
            raise ValueError("positive_scales: true needs symmetric: true; with zero points no scale is negative")
        if self.expert_bits and (max(self.expert_bits) != self.bits or min(self.expert_bits) == self.bits):
            raise ValueError(f"expert_bits: {self.bits} bits are not the most of bits that differ: {self.expert_bits}")
        return self

    @model_serializer(mode="wrap")
    def _without_what_follows(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A format that follows from the bits is not written: who changes them in a recipe changes it, too."""
        written: dict[str, Any] = fields(self)
        found = find_format(self.bits, self.activations)
        if found is not None and found.name == self.format:
            del written["format"]
        if not self.expert_bits:
            del written["expert_bits"]
        return written

    @classmethod
    def of_experts(cls, schemes: Sequence[Scheme]) -> Scheme | None:
        """One scheme for experts that have these, in their order; None where they differ in more than integers' bits.

        >>> found = Scheme.of_experts([Scheme(bits=4), Scheme(bits=8), Scheme(bits=4)])
        >>> assert found is not None
        >>> found.name, found.of_expert(1).name
        ('4 to 8-bit g32 asym, mean 5.33', '8-bit g32 asym')
        """
        widest = max(schemes, key=lambda scheme: scheme.bits)
        if all(scheme == widest for scheme in schemes):
            return widest
        if any(s.format != f"int{s.bits}" or s.in_format(widest.format) != widest for s in schemes):
            return None
        return widest.model_copy(update={"expert_bits": tuple(scheme.bits for scheme in schemes)})

    def of_expert(self, expert: int) -> Scheme:
        """Of one expert by itself."""
        return self.in_format(f"int{self.expert_bits[expert]}") if self.expert_bits else self

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
        if self.group_size is None:
            return self.codes
        mean = f", mean {self.mean_bits:.2f}" if self.expert_bits else ""
        return f"{self.codes} g{self.group_size}{'' if self.symmetric else ' asym'}{mean}"

    @property
    def codes(self) -> str:
        """What tables call its codes: "4-bit", or the format of other codes than integers."""
        if self.expert_bits:
            return f"{min(self.expert_bits)} to {self.bits}-bit"
        return f"{self.bits}-bit" if formats()[self.format].number_type == "int" else self.format

    @property
    def each(self) -> tuple[Scheme, ...]:
        """The schemes that experts have, each once; without experts of their own bits, itself."""
        return tuple(dict.fromkeys(map(self.of_expert, range(len(self.expert_bits))))) or (self,)

    @property
    def widest(self) -> Scheme:
        """What holds every expert."""
        return self.in_format(self.format)

    @property
    def mean_bits(self) -> float:
        """Of a code, over all experts."""
        return sum(self.expert_bits) / len(self.expert_bits) if self.expert_bits else self.bits

    def in_format(self, name: str) -> Scheme:
        """The same groups, in another format, which all experts have."""
        found = formats()[name]
        changed = {"format": name, "bits": found.bits, "activations": found.activations, "expert_bits": ()}
        return self.model_copy(update=changed)

    def bits_per_weight(self, columns: int, scale_bits: int | None = None) -> float:
        """With scales and, when asymmetric, packed zero points; ``columns`` are the input channels.

        ``scale_bits``: as a checkpoint holds them, unless given.

        >>> Scheme(bits=4, group_size=32).bits_per_weight(64)
        4.625
        """
        scale_bits = SCALE_BITS[formats()[self.format].scale_type] if scale_bits is None else scale_bits
        return self.mean_bits + (scale_bits + (0 if self.symmetric else self.bits)) / (self.group_size or columns)

    def fitted(self, columns: int) -> Scheme:
        """The scheme with a group size that divides ``columns``: its own, or the largest power-of-two fraction.

        :class:`QuantizationError` for columns that the groups of its format do not divide.

        >>> Scheme(bits=4, group_size=128).fitted(576).group_size
        64
        """
        if self.group_size is None:
            return self
        smallest = formats()[self.format].group_size or SMALLEST_GROUP
        if columns % smallest:
            raise QuantizationError(
                f"{columns} input channels",
                expected=f"a multiple of {smallest}, the smallest group in {self.codes}",
                remedy="add a rule with bits: 32 that leaves this linear in float",
            )
        size: int = self.group_size
        while columns % size:
            size //= 2
        return self.model_copy(update={"group_size": size})


FLOAT = Scheme(bits=32)
STATIC_INT8 = Scheme(bits=8, activations="int8")
FP8 = Scheme.model_validate({"format": "fp8"})
FP8_DYNAMIC = Scheme.model_validate({"format": "fp8-dynamic"})

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
