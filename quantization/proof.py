"""Proof of quantization: what lies in the file, judged against what was planned. A pure function over a census.

A checkpoint can carry a quantization config and still be float, or hold codes that say nothing: unit scales from a
failed calibration, one code everywhere, NaN. Every such reason is listed; none of them passes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from quantization.compressed_tensors import Checkpoint
from quantization.rounding import QuantizedLinear
from tapeout.artifact import Frozen
from tapeout.schemes import Scheme

BF16_BYTES = 2
BITS_TOLERANCE = 1.05  # stored bits over planned ones: shapes and float32 scales where float16 would not do
_OUTPUTS_AT_ONCE = 1024


class TensorCensus(Frozen):
    """One parameter as it lies in the file; ``bits`` is 32 for a float one, which has no scales and no codes."""

    name: str
    weights: int
    columns: int  # input channels
    stored_bytes: int
    bits: int
    distinct_codes: int = 0
    scales: int = 0
    scales_not_finite: int = 0
    scales_zero: int = 0
    scales_one: int = 0
    input_scale: float | None = None  # of static int8 activations


class Proof(Frozen):
    """``bits_per_weight`` counts every byte of the planned tensors; ``size_ratio`` every byte against bfloat16."""

    quantized_tensors: int
    planned_tensors: int
    bits_per_weight: float
    planned_bits_per_weight: float
    size_bytes: int
    size_ratio: float
    reasons: tuple[str, ...]  # why this is not a quantized model; empty when it is

    @property
    def passed(self) -> bool:
        return not self.reasons


def take_census(checkpoint: Checkpoint, name: str) -> TensorCensus:
    """Read one parameter back from the file."""
    if not checkpoint.is_quantized(name):
        shape = checkpoint.shape(name)
        return TensorCensus(
            name=name,
            weights=math.prod(shape),
            columns=shape[-1] if shape else 1,
            stored_bytes=checkpoint.stored_bytes(name),
            bits=32,
        )
    linear = checkpoint.linear(name)
    assert isinstance(linear, QuantizedLinear)
    scales = linear.scales
    seen = np.zeros(linear.scheme.levels, np.bool_)
    for start in range(0, linear.codes.shape[0], _OUTPUTS_AT_ONCE):
        seen |= np.bincount(linear.codes[start : start + _OUTPUTS_AT_ONCE].ravel(), minlength=len(seen)) > 0
    return TensorCensus(
        name=name,
        weights=linear.codes.size,
        columns=linear.codes.shape[1],
        stored_bytes=checkpoint.stored_bytes(name),
        bits=linear.scheme.bits,
        distinct_codes=int(seen.sum()),
        scales=scales.size,
        scales_not_finite=int((~np.isfinite(scales)).sum()),
        scales_zero=int((scales == 0).sum()),
        scales_one=int((scales == 1).sum()),
        input_scale=linear.input_scale,
    )


def prove(census: Sequence[TensorCensus], planned: Mapping[str, Scheme], *, in_bytes: Collection[str] = ()) -> Proof:
    """Judge the census of every stored parameter against the planned schemes, by parameter name.

    ``in_bytes``: those whose codes take a byte each in the file, however few bits they have.

    >>> float_only = TensorCensus(name="w", weights=64, columns=64, stored_bytes=256, bits=32)
    >>> prove([float_only], {"w": Scheme(bits=4, symmetric=True)}).reasons[0]
    'w was planned as 4-bit g32 but is stored in float'
    """
    by_name = {entry.name: entry for entry in census}
    reasons: list[str] = []
    if not planned:
        reasons.append("no tensor was planned to be quantized")
    for name, scheme in planned.items():
        entry = by_name.get(name)
        if entry is None:
            reasons.append(f"{name} was planned as {scheme.name} but is not stored")
        elif entry.bits != scheme.bits:
            stored = "in float" if entry.bits == 32 else f"in {entry.bits} bits"
            reasons.append(f"{name} was planned as {scheme.name} but is stored {stored}")
        elif (entry.input_scale is not None) != (scheme.activations == "int8"):
            found = "without" if entry.input_scale is None else "with"
            reasons.append(f"{name} was planned as {scheme.name} but is stored {found} an input scale")
        else:
            reasons.extend(f"{name} {problem}" for problem in _problems(entry))
    reasons.extend(
        f"{entry.name} is stored in {entry.bits} bits but was not planned to be"
        for entry in census
        if entry.bits != 32 and entry.name not in planned
    )

    chosen = [by_name[name] for name in planned if name in by_name]
    weights = sum(entry.weights for entry in chosen)
    bits = 8 * sum(entry.stored_bytes for entry in chosen) / weights if weights else 32.0

    def bits_of(entry: TensorCensus) -> float:
        scheme = planned[entry.name]
        return scheme.bits_per_weight(entry.columns) + (8 - scheme.bits if entry.name in in_bytes else 0)

    planned_bits = sum(bits_of(entry) * entry.weights for entry in chosen) / weights if weights else 32.0
    if weights and bits > planned_bits * BITS_TOLERANCE:
        reasons.append(f"{bits:.2f} bits per weight are stored, {planned_bits:.2f} were planned")
    size = sum(entry.stored_bytes for entry in census)
    size_ratio = size / (BF16_BYTES * max(1, sum(entry.weights for entry in census)))
    if size_ratio >= 1:
        reasons.append(f"the checkpoint is {size_ratio:.2f} times the size of the source in bfloat16")
    return Proof(
        quantized_tensors=sum(entry.bits != 32 for entry in census),
        planned_tensors=len(planned),
        bits_per_weight=bits,
        planned_bits_per_weight=planned_bits,
        size_bytes=size,
        size_ratio=size_ratio,
        reasons=tuple(reasons),
    )


def _problems(entry: TensorCensus) -> list[str]:
    problems: list[str] = []
    if entry.scales_not_finite:
        problems.append(f"has {entry.scales_not_finite} of {entry.scales} scales that are NaN or infinite")
    if entry.scales_zero:
        problems.append(f"has {entry.scales_zero} of {entry.scales} scales that are zero")
    if entry.scales_one == entry.scales:
        problems.append("has only scales of one: they were never fitted")
    if entry.input_scale is not None and not 0 < entry.input_scale < np.inf:
        problems.append(f"has an input scale of {entry.input_scale}")
    if entry.distinct_codes < 2:
        problems.append("holds the same code everywhere")
    return problems
