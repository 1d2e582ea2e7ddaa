"""Proof of quantization: what lies in the file, judged against what was planned. A pure function over an inventory.

A checkpoint can carry a quantization config and still be float, or hold codes that say nothing: unit scales from a
failed calibration, one code everywhere, NaN. Every such reason is listed; none of them passes.

Sound models hold weights that look the same: groups of zeros have a scale of one and one code, constant groups have one
code, and scales of very small or very large weights need float32. So the inventory looks at the source's weights, too.
Input scales and what producers take of them are positive and differ by channel: they keep zeros and signs.

Each expert of a mixture is judged by itself. No input scale stands between it and its source, so its weights must be
those of the source but for rounding, and its scales must fit the ranges of its own weights best. Where its scheme holds
the weights of the source exactly, as mxfp4 those of a checkpoint in MXFP4, they must be the same to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from quantization.compressed_tensors import Checkpoint
from tapeout.artifact import Frozen
from tapeout.errors import QuantizationError
from tapeout.number_format import FloatArray, fits_half, grouped
from tapeout.quantized import QuantizedWeight, fit_range, format_of, nearest_if_exact
from tapeout.schemes import Scheme

BF16_BYTES = 2
BITS_TOLERANCE = 1.05  # stored bits over planned ones: shapes
SCALE_BITS = 16  # that float32 scales have more than the float16 ones of a plan
LARGEST_LOST = 0.01  # share of a parameter's groups: GPTQ may give a stray one a single code
_HELD = np.float32(1e-28)  # a group of smaller weights may be decoded to zero, whatever the input scale
_NO_SIZE = 1e-300  # of a weight, squared
_SPREAD = 4  # largest weight of a group over its smallest, from where on one code does not do for both
_OUTPUTS_AT_ONCE = 1024
LARGEST_DISTANCE = 0.5  # squared, of an expert from its source, in its own size; 4 bits have about 0.01, another's 2
# Of the squared distance between logarithms of scales and of ranges: another expert's must be smaller by that to be
# found, and both are means over at least so many groups.
_NEARER, _FEWEST_GROUPS = 0.7, 64


class TensorInventory(Frozen):
    """One parameter as it lies in the file, or one expert of it; ``bits`` is 32 for a float one, which has no scales
    and no codes.

    ``held``, ``scales_one`` and ``lost`` count groups, of those whose weights in the source are not all zero.
    """

    name: str
    expert: int | None = None
    weights: int
    columns: int  # input channels
    stored_bytes: int
    bits: int
    format: str
    scales: int = 0
    wide_scales: bool = False  # in float32, because float16 would lose some of them
    scales_not_finite: int = 0
    codes_nan: int = 0  # of floats: E4M3 has two codes for NaN
    scales_zero: int = 0
    input_scale: float | None = None  # of static activations
    held: int = 0
    scales_one: int = 0  # scales of one, where the weights ask for another
    lost: int = 0  # decoded to zero, or one code for weights that differ
    distance: float = 0.0  # of experts: squared, from the source, relative to its size
    scales_of: int | None = None  # of experts: the one whose weights the scales fit, where that is another
    exact: bool = False  # all weights are those of the source, to the bit
    rounded: bool = False  # of experts: weights differ from those of the source, which the scheme holds exactly

    @property
    def label(self) -> str:
        return self.name if self.expert is None else f"{self.name}, expert {self.expert},"


class QuantizationProof(Frozen):
    """``bits_per_weight`` counts every byte of the planned tensors; ``size_ratio`` every byte against bfloat16.

    ``exact_tensors``: quantized ones whose weights are those of the source, to the bit.
    """

    quantized_tensors: int
    planned_tensors: int
    exact_tensors: int = 0
    bits_per_weight: float
    planned_bits_per_weight: float
    size_bytes: int
    size_ratio: float
    reasons: tuple[str, ...]  # why this is not a quantized model; empty when it is

    @property
    def passed(self) -> bool:
        return not self.reasons


def count_tensors(
    checkpoint: Checkpoint, name: str, source: Callable[[int | None], FloatArray]
) -> list[TensorInventory]:
    """Read one parameter back from the file; each expert by itself where it holds some.

    ``source``: its weight ``[N, K]`` before it was quantized, or that of one expert.
    """
    if not checkpoint.is_quantized(name):
        shape = checkpoint.shape(name)
        return [
            TensorInventory(
                name=name,
                weights=math.prod(shape),
                columns=shape[-1] if shape else 1,
                stored_bytes=checkpoint.stored_bytes(name),
                bits=32,
                format="float",
            )
        ]
    linear = checkpoint.linear(name)
    assert isinstance(linear, QuantizedWeight)
    size = checkpoint.stored_bytes(name)
    if linear.codes.ndim == 2:
        weight = source(None)
        _require_shape(name, linear, weight)
        return [_count(name, linear, weight, size)]
    experts, columns = len(linear.codes), linear.codes.shape[-1]
    bits = [linear.scheme.of_expert(expert).bits_per_weight(columns) for expert in range(experts)]
    ends = np.cumsum([0.0, *bits]) / sum(bits)  # of each expert's share of the bytes
    found: list[TensorInventory] = []
    ranges: list[FloatArray] = []
    for expert in range(experts):
        part, own = linear.part(expert), source(expert)
        _require_shape(f"{name}, expert {expert},", part, own)
        counted = _count(name, part, own, round(size * ends[expert + 1]) - round(size * ends[expert]))
        error = np.square(part.dequantize() - own, dtype=np.float64).sum()
        distance = float(error / max(np.square(own, dtype=np.float64).sum(), _NO_SIZE))
        rounded = not counted.exact and nearest_if_exact([own], part.scheme) is not None
        found.append(counted.model_copy(update={"expert": expert, "distance": distance, "rounded": rounded}))
        ranges.append(np.abs(fit_range(own, part.scheme).scales).reshape(-1))
    owners = enumerate(_owners(linear, np.stack(ranges)))
    # Where every weight is its source's, so are the scales: of codes drawn with one scale, say, these fit any expert.
    return [
        found[expert].model_copy(update={"scales_of": None if owner == expert or found[expert].exact else owner})
        for expert, owner in owners
    ]


def _require_shape(name: str, linear: QuantizedWeight, weight: FloatArray) -> None:
    if weight.shape != linear.codes.shape:
        raise QuantizationError(
            f"{name} is stored as {list(linear.codes.shape)}", expected=f"{list(weight.shape)}, as in the source"
        )


def _owners(linear: QuantizedWeight, wanted: FloatArray) -> list[int]:
    """By expert, the one whose weights its scales fit: another only where it is clearly that one.

    ``wanted``: the scales that the range of each expert's weights asks for.
    """
    experts = len(wanted)
    stored, ranges = (
        np.log(np.maximum(scales.reshape(experts, -1), np.finfo(np.float32).tiny)).astype(np.float64)
        for scales in (np.abs(linear.scales), wanted)
    )
    # A range that is narrowed everywhere alike says nothing of whose it is.
    stored, ranges = (logs - logs.mean(axis=1, keepdims=True) for logs in (stored, ranges))
    squares = (stored**2).sum(1)[:, None] + (ranges**2).sum(1) - 2 * stored @ ranges.T
    owners = [int(row.argmin()) for row in squares]
    few = stored.shape[1] < _FEWEST_GROUPS
    return [
        expert if few or not squares[expert, owner] < _NEARER * squares[expert, expert] else owner
        for expert, owner in enumerate(owners)
    ]


def _count(name: str, linear: QuantizedWeight, weight: FloatArray, stored_bytes: int) -> TensorInventory:
    """Of a weight ``[N, K]``."""
    scales = linear.scales
    counts = np.zeros(5, np.int64)
    for start in range(0, len(weight), _OUTPUTS_AT_ONCE):
        counts += _count_groups(linear, weight, slice(start, start + _OUTPUTS_AT_ONCE))
    held, ones, lost, changed, nan = map(int, counts)
    return TensorInventory(
        name=name,
        weights=linear.codes.size,
        columns=linear.codes.shape[1],
        stored_bytes=stored_bytes,
        bits=linear.scheme.bits,
        format=linear.scheme.format,
        scales=scales.size,
        wide_scales=format_of(linear.scheme).scale_type == "float" and not fits_half(scales),
        scales_not_finite=int((~np.isfinite(scales)).sum()),
        codes_nan=nan,
        scales_zero=int((scales == 0).sum()),
        input_scale=linear.input_scale,
        held=held,
        scales_one=ones,
        lost=lost,
        exact=not changed,
    )


def _count_groups(linear: QuantizedWeight, weight: FloatArray, rows: slice) -> tuple[int, int, int, int, int]:
    """``held``, ``scales_one`` and ``lost`` of some output channels, how many of their weights are not exact, and how
    many are NaN although their scales are not.
    """
    scheme, codes = linear.scheme, linear.codes[rows]
    zero_points = None if linear.zero_points is None else linear.zero_points[rows]
    part = replace(linear, codes=codes, scales=linear.scales[rows], zero_points=zero_points)
    wanted, got = grouped(weight[rows], scheme), grouped(part.dequantize(), scheme)
    magnitude = np.abs(wanted)
    held = magnitude.max(axis=2) > _HELD
    ones = held & (np.abs(part.scales) == 1) & (np.abs(fit_range(weight[rows], scheme).scales) != 1)
    spread = magnitude.max(axis=2) / _SPREAD > magnitude.min(axis=2)
    signs = (wanted.min(axis=2) < 0) & (wanted.max(axis=2) > 0)
    one_code = got.min(axis=2) == got.max(axis=2)
    lost = held & one_code & (spread | signs | ~got.any(axis=2))
    nan = np.isnan(got) & np.isfinite(part.scales)[..., None]
    return int(held.sum()), int(ones.sum()), int(lost.sum()), int((wanted != got).sum()), int(nan.sum())


def prove(
    inventory: Sequence[TensorInventory], planned: Mapping[str, Scheme], *, in_bytes: Collection[str] = ()
) -> QuantizationProof:
    """Judge the inventory of every stored parameter against the planned schemes, by parameter name.

    ``in_bytes``: those whose codes take a byte each in the file, however few bits they have.

    >>> float_only = TensorInventory(name="w", weights=64, columns=64, stored_bytes=256, bits=32, format="float")
    >>> prove([float_only], {"w": Scheme(bits=4, symmetric=True)}).reasons[0]
    'w was planned as 4-bit g32 but is stored in float'
    """
    by_name: dict[str, list[TensorInventory]] = {}
    for entry in inventory:
        by_name.setdefault(entry.name, []).append(entry)
    reasons: list[str] = []
    if not planned:
        reasons.append("no tensor was planned to be quantized")
    for name, scheme in planned.items():
        if name not in by_name:
            reasons.append(f"{name} was planned as {scheme.name} but is not stored")
        for entry in by_name.get(name, ()):
            reasons += _reasons(entry, scheme if entry.expert is None else scheme.of_expert(entry.expert))
    reasons.extend(
        f"{entry.name} is stored in {entry.bits} bits but was not planned to be"
        for entry in inventory
        if entry.bits != 32 and entry.name not in planned
    )

    chosen = [entry for name in planned for entry in by_name.get(name, ())]
    weights = sum(entry.weights for entry in chosen)
    bits = 8 * sum(entry.stored_bytes for entry in chosen) / weights if weights else 32.0

    def bits_of(entry: TensorInventory) -> float:
        scheme = planned[entry.name]
        own = 0 if entry.expert is None else scheme.of_expert(entry.expert).bits - scheme.mean_bits
        wider = SCALE_BITS / (scheme.group_size or entry.columns) if entry.wide_scales else 0
        return scheme.bits_per_weight(entry.columns) + own + wider + (8 - scheme.bits if entry.name in in_bytes else 0)

    planned_bits = sum(bits_of(entry) * entry.weights for entry in chosen) / weights if weights else 32.0
    if weights and bits > planned_bits * BITS_TOLERANCE:
        reasons.append(f"{bits:.2f} bits per weight are stored, {planned_bits:.2f} were planned")
    size = sum(entry.stored_bytes for entry in inventory)
    size_ratio = size / (BF16_BYTES * max(1, sum(entry.weights for entry in inventory)))
    # What the plan leaves in float is the source's: that it may lie there in float32 tells nothing of the codes.
    shrunk = bits / (8 * BF16_BYTES)
    if weights and shrunk >= 1:
        reasons.append(f"quantized tensors are {shrunk:.2f} times the size of the source in bfloat16")
    return QuantizationProof(
        quantized_tensors=len({entry.name for entry in inventory if entry.bits != 32}),
        planned_tensors=len(planned),
        exact_tensors=sum(name in planned and all(entry.exact for entry in found) for name, found in by_name.items()),
        bits_per_weight=bits,
        planned_bits_per_weight=planned_bits,
        size_bytes=size,
        size_ratio=size_ratio,
        reasons=tuple(reasons),
    )


def _reasons(entry: TensorInventory, scheme: Scheme) -> list[str]:
    if entry.bits != scheme.bits:
        stored = "in float" if entry.bits == 32 else f"in {entry.bits} bits"
        return [f"{entry.label} was planned as {scheme.name} but is stored {stored}"]
    if (entry.input_scale is not None) != (scheme.activations != "float"):
        found = "without" if entry.input_scale is None else "with"
        return [f"{entry.label} was planned as {scheme.name} but is stored {found} an input scale"]
    if entry.format != scheme.format:
        return [f"{entry.label} was planned as {scheme.format} but is stored as {entry.format}"]
    return [f"{entry.label} {problem}" for problem in _problems(entry)]


def _problems(entry: TensorInventory) -> list[str]:
    problems: list[str] = []
    if entry.scales_not_finite:
        problems.append(f"has {entry.scales_not_finite} of {entry.scales} scales that are NaN or infinite")
    if entry.codes_nan:
        problems.append(f"has {entry.codes_nan} of {entry.weights} codes that are NaN")
    if entry.scales_zero:
        problems.append(f"has {entry.scales_zero} of {entry.scales} scales that are zero")
    if entry.held and entry.scales_one == entry.held:
        problems.append("has only scales of one: they were never fitted")
    if entry.input_scale is not None and not 0 < entry.input_scale < np.inf:
        problems.append(f"has an input scale of {entry.input_scale}")
    if entry.lost > LARGEST_LOST * entry.held:
        problems.append(f"holds one code, or zeros, in {entry.lost} of {entry.held} groups whose weights differ")
    if not entry.distance <= LARGEST_DISTANCE:
        problems.append(f"holds weights that are {entry.distance:.0%} off its source, in squares")
    if entry.rounded:
        problems.append(f"holds other weights than its source, whose weights {entry.format} holds exactly")
    if entry.scales_of is not None:
        problems.append(f"has scales that fit the weights of expert {entry.scales_of}")
    return problems
