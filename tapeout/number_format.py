"""What a number format is: how the codes of a weight become numbers, and how a checkpoint holds them.

A weight is ``value(code) * scale``, with one scale for a group of input channels. Each module of ``tapeout/formats`` is
one format. Planner, methods, proof, checkpoints, passes and reports ask the format of a scheme, and know none by name.

N  output channels      K  input channels      g  group size      G  groups, K / g

Dimensions may come before these, such as the experts of a layer: a weight is ``[..., N, K]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tapeout.errors import QuantizationError

FloatArray = NDArray[np.float32]
CodeArray = NDArray[np.uint8]
AnyArray = NDArray[Any]
Tensors = Mapping[str, AnyArray]  # of one module, by the part of the name that follows the module's
Activations = Literal["float", "int8", "fp8"]  # int8, fp8: one static scale for the whole input
ScaleType = Literal["float", "e8m0"]  # e8m0: a power of two in a byte
SCALE_BITS: Mapping[ScaleType, int] = {"float": 16, "e8m0": 8}  # as they are stored; floats that need it in float32

# Codes are searched for the scale that is stored: float16 keeps 11 bits of it at 16/g bits per weight.
_SMALLEST_NORMAL_HALF = np.float32(np.finfo(np.float16).smallest_normal)
_LARGEST_HALF = np.float32(np.finfo(np.float16).max)


class Grouping(Protocol):
    """What a scheme says beside its format: see :class:`tapeout.schemes.Scheme`."""

    @property
    def group_size(self) -> int | None: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def positive_scales(self) -> bool: ...


@dataclass(frozen=True)
class Grid:
    """Where the codes of each group lie: ``scales`` and (integral) ``zero_points``, both float32 ``[..., N, G]``."""

    scales: FloatArray
    zero_points: FloatArray


class Coded(NamedTuple):
    """A weight as codes. ``zero_points`` None: each is the format's own ``midpoint``."""

    codes: CodeArray  # [..., N, K]
    scales: FloatArray  # [..., N, G], may be negative
    zero_points: CodeArray | None  # [..., N, G]
    input_scale: float | None = None  # of the inputs' static grid; None: inputs stay in float


class Format(Protocol):
    """The facts of a format.

    ``bits``: of a code; 32: a float. ``number_type``: as compressed-tensors calls it in ``config.json``. ``grouped``:
    input channels share scales in groups; other formats have at most one scale per output channel. ``group_size``: the
    only one that there is; None: any. ``affine``: groups may have zero points. ``divisible``: a checkpoint holds a
    scale that was divided by any number; else a linear in this format takes no input scale of the next one.
    """

    @property
    def name(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def number_type(self) -> str: ...
    @property
    def activations(self) -> Activations: ...
    @property
    def grouped(self) -> bool: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def scale_type(self) -> ScaleType: ...
    @property
    def affine(self) -> bool: ...
    @property
    def divisible(self) -> bool: ...


@dataclass(frozen=True)
class Uncoded:
    """Weights that have no codes: a checkpoint holds them as tensors like any other."""

    name: str
    bits: int
    number_type: str = "float"
    activations: Activations = "float"
    grouped: bool = False
    group_size: int | None = None
    scale_type: ScaleType = "float"
    affine: bool = False
    divisible: bool = True


@runtime_checkable
class NumberFormat(Format, Protocol):
    """``midpoint``: the zero point of codes that have none of their own.

    ``integer_bits``: bits of the smallest integers that hold the same weights exactly (:meth:`widened`); 0: there are
    none, and an engine without kernels for the format decodes it. ``layout``: of linears in a checkpoint.
    """

    @property
    def midpoint(self) -> int: ...
    @property
    def integer_bits(self) -> int: ...
    @property
    def layout(self) -> str: ...

    def fit(self, weight: FloatArray, grouping: Grouping, shrink: float = 1.0) -> Grid:
        """The grid that spans the range of each group of ``[..., N, K]``, times ``shrink``.

        Groups of zeros get scale 1 and decode to zero. :class:`QuantizationError` for weights that are not finite.
        """
        ...

    def storable(self, scales: FloatArray) -> FloatArray:
        """The scales that will be stored for these, which are not zero."""
        ...

    def rounded(self, scaled: FloatArray, zero_points: FloatArray) -> FloatArray:
        """The nearest codes, as float32, of values that were divided by their scale. ``scaled`` may be overwritten."""
        ...

    def values(self, codes: AnyArray, zero_points: AnyArray | float) -> FloatArray:
        """float32 values of codes, before the scale; a new array. ``zero_points`` broadcasts."""
        ...

    def widened(self, weight: Coded, bits: int) -> Coded | None:
        """The same weight to the bit, in integer codes of ``bits``; None where these cannot hold it."""
        ...

    def encode(self, weight: Coded) -> dict[str, AnyArray]:
        """The stored tensors of a weight ``[..., N, K]``; a linear is ``[N, K]``."""
        ...

    def decode(self, tensors: Tensors) -> Coded:
        """The inverse of ``encode``."""
        ...

    def encode_bytes(self, weight: Coded) -> dict[str, AnyArray]:
        """The stored tensors of a weight without zero points, as an embedding has them: a byte per code."""
        ...

    def decode_bytes(self, tensors: Tensors) -> Coded:
        """The inverse of ``encode_bytes``."""
        ...

    def arguments(self, grouping: Grouping) -> dict[str, Any]:
        """What ``config_groups`` of ``config.json`` say of a linear."""
        ...


def grouped(weight: FloatArray, grouping: Grouping) -> FloatArray:
    """``[..., N, K]`` as ``[..., N, G, g]``, without a copy."""
    columns = weight.shape[-1]
    size = grouping.group_size or columns
    if columns % size:
        raise QuantizationError(
            f"{columns} input channels in groups of {size}",
            expected="a group size that divides the input channels",
            remedy="fit the scheme to them with Scheme.fitted",
        )
    return weight.reshape(*weight.shape[:-1], columns // size, size)


def require_finite(weight: FloatArray) -> None:
    if not np.isfinite(weight).all():
        raise QuantizationError(
            f"{int((~np.isfinite(weight)).sum())} weights are NaN or infinite",
            expected="finite weights",
            remedy="check the source checkpoint",
        )


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


def stored_scales(scales: FloatArray) -> AnyArray:
    """In float16 where that loses nothing."""
    return scales.astype(np.float16) if fits_half(scales) else scales
