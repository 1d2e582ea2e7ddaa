"""Linears over codes become BlockLinear, a kernel of our own: bandwidth-bound at one token and compute-bound at many.

    Linear(x) over codes      ->   BlockLinear(x, codes, scales[, zero points][, bias])
    Linear(x) over floats     ->   BlockLinear(x, halves, ones, none[, bias]) of 16 bits, where kernels read these

What it computes is what MatMulNBits does at accuracy level 4: inputs rounded to int8 for every token and block. The
target's kernels say which weights they take and how these lie in memory. Scales are float16 where that loses nothing,
or bytes of exponents beside codes that are 4-bit floats. Beside codes that are 8-bit floats inputs become such floats,
too, with a scale for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.kernels.kernel_set import KernelSet
from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, deferred, initializer, new_value
from engines.passes.graph.linears import (
    described,
    is_linear,
    label_of,
    one_scheme,
    out_features_of,
    put,
    quantized,
    stacked_bias,
    trimmed,
    weights_of,
)
from tapeout import e4m3
from tapeout.errors import BuildError
from tapeout.quantized import QuantizedWeight, is_e4m3

HALF_BITS = 16  # of weights that are not quantized
FLOAT_BASELINE = "float32"  # the precision of a bundle in which no plan quantizes anything


def run(lowering: Lowering) -> PassResult:
    nodes = [n for n in lowering.model.graph if is_linear(n)]
    reason = lowering.kernels.unsupported("BlockLinear")
    if reason or not nodes:
        return PassResult(
            0, (f"every linear: {reason}; left to the next kernel pass" if reason else "no linear in the graph",)
        )
    matched, declined = 0, list[str]()
    for node in nodes:
        parts, label = quantized(lowering, node), label_of(lowering, node)
        first = parts[0] if parts else lowering.weights.linear(weights_of(node)[0])
        reason = _unsupported(lowering.kernels, first)
        if reason:
            declined.append(f"{label}: {reason}; left to the next kernel pass")
            continue
        if parts:
            _lower(lowering, node, label, parts)
        else:
            _lower_floats(lowering, node, label)
        matched += 1
    if matched:
        lowering.model.opset_imports[DOMAIN] = 1
    return PassResult(matched, tuple(declined))


def _unsupported(kernels: KernelSet, weight: QuantizedWeight | NDArray[np.float32]) -> str:
    if isinstance(weight, QuantizedWeight):
        return kernels.unsupported_weight(weight)
    return kernels.unsupported_float(weight.shape[1])


def _lower_floats(lowering: Lowering, node: ir.Node, label: str) -> None:
    """Weights in float16, for kernels that read them."""
    names = weights_of(node)
    parts = [lowering.weights.linear(name) for name in names]
    one_scheme(label, parts)
    outputs, columns = sum(out_features_of(node)), parts[0].shape[1]  # type: ignore[union-attr]
    codes, scales = halves(lowering, label, names, outputs, columns)
    linear = ir.node(
        "BlockLinear",
        trimmed([node.inputs[0], codes, scales, None, stacked_bias(lowering, node)]),
        attributes=float_attributes(outputs, columns),
        domain=DOMAIN,
        outputs=[new_value(f"{label}.matmul", node.outputs[0])],
    )
    put(lowering, node, [linear], "BlockLinear fp16")


def halves(
    lowering: Lowering, label: str, names: Sequence[str], outputs: int, columns: int
) -> tuple[ir.Value, ir.Value]:
    """Float weights that are stacked along their outputs, packed when they are written, and their scales: ones."""
    kernels = lowering.kernels

    def packed() -> NDArray[np.uint8]:
        with np.errstate(over="ignore"):
            rows = [np.asarray(lowering.weights.tensor(name), np.float32).astype(np.float16) for name in names]
        stacked = np.concatenate(rows)
        if not np.isfinite(stacked).all():
            raise BuildError(
                f"{label} has weights beyond the range of float16",
                expected="weights of at most 65,504, as kernels read what is not quantized in float16",
                remedy="build for ort-cpu: build.target, or --target"
                if lowering.precision == FLOAT_BASELINE
                else "give it a scheme in plan.schemes, or build for ort-cpu",
            )
        return kernels.pack_codes(stacked, HALF_BITS)

    shape = kernels.codes_shape(outputs, columns, HALF_BITS)
    codes = deferred(lowering.model, f"{label}.codes", shape, ir.DataType.UINT8, packed)
    ones = kernels.pack_scales(np.ones((outputs, 1), np.float16))
    return codes, initializer(lowering.model, f"{label}.scales", ones)


def float_attributes(outputs: int, columns: int) -> dict[str, int]:
    return {"N": outputs, "K": columns, "bits": HALF_BITS, "block_size": columns, "half_scales": 1, "symmetric": 1}


def _lower(lowering: Lowering, node: ir.Node, label: str, parts: list[QuantizedWeight]) -> None:
    one_scheme(label, parts)
    bits = lowering.kernels.code_bits(parts[0])
    names = weights_of(node)
    for name, part in zip(names, parts, strict=True):
        _require_numbers(name, part)
    codes, scales, zero_points = stacked(
        lowering.model,
        lowering.kernels,
        label,
        lambda: [widened(lowering.weights.linear(name), bits) for name in names],
    )
    linear = ir.node(
        "BlockLinear",
        trimmed([node.inputs[0], codes, scales, zero_points, stacked_bias(lowering, node)]),
        attributes={"N": sum(out_features_of(node))} | attributes(widened(parts[0], bits), scales),
        domain=DOMAIN,
        outputs=[new_value(f"{label}.matmul", node.outputs[0])],
    )
    put(lowering, node, [linear], f"BlockLinear {described(parts[0])}{in_more_bits(parts[0], bits)}")


def _require_numbers(name: str, linear: QuantizedWeight) -> None:
    """:class:`BuildError` for scales or codes that are no numbers: every output would be NaN, whatever is fed."""
    scales = int((~np.isfinite(linear.scales)).sum())
    codes = int((linear.codes & e4m3.NAN == e4m3.NAN).sum()) if is_e4m3(linear.scheme) else 0
    if scales or codes:
        found = f"{scales} scales that are NaN or infinite" if scales else f"{codes} codes in E4M3 that are NaN"
        raise BuildError(
            f"{name} has {found}",
            expected="numbers in every code and scale of the checkpoint",
            remedy="run `dvc repro quantize`, and build again",
        )


def widened(linear: QuantizedWeight | NDArray[np.float32], bits: int) -> QuantizedWeight:
    """The same weight to the bit, in codes of ``bits``, which hold it: its own, or integers."""
    assert isinstance(linear, QuantizedWeight)
    found = linear if linear.scheme.bits == bits else linear.widened(bits)
    assert found is not None, "whoever names the bits asked the format"
    return found


def in_more_bits(linear: QuantizedWeight, bits: int) -> str:
    """For a bundle's record."""
    return "" if linear.scheme.bits == bits else f", stored in {bits} bits"


def stacked(
    model: ir.Model, kernels: KernelSet, label: str, read: Callable[[], Sequence[QuantizedWeight]]
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Codes, scales and zero points of linears that are stacked along their outputs, packed; None: no zero points.

    ``read`` gives the linears; codes are packed when they are written.
    """
    parts = read()
    bits, columns, outputs = parts[0].scheme.bits, parts[0].codes.shape[1], sum(len(part.codes) for part in parts)
    scales = np.concatenate([part.scales for part in parts]).astype(np.float32)
    zero_points = [part.zero_points for part in parts if part.zero_points is not None]
    stored = kernels.stored_scales(scales, parts[0].scheme)
    return (
        deferred(
            model,
            f"{label}.codes",
            kernels.codes_shape(outputs, columns, bits),
            ir.DataType.UINT8,
            lambda: kernels.pack_codes(np.concatenate([part.codes for part in read()]), bits),
        ),
        initializer(model, f"{label}.scales", kernels.pack_scales(stored)),
        initializer(model, f"{label}.zero_points", kernels.pack_scales(np.concatenate(zero_points)))
        if zero_points
        else None,
    )


def attributes(linear: QuantizedWeight, scales: ir.Value) -> dict[str, int]:
    """What the kernels must know of codes beside the tensors."""
    known = {
        "K": linear.codes.shape[1],
        "bits": linear.scheme.bits,
        "block_size": linear.group_size,
        "half_scales": int(scales.dtype == ir.DataType.FLOAT16),
        "symmetric": int(linear.scheme.symmetric),
    }
    if is_e4m3(linear.scheme):
        return known | {"e4m3": 1}
    return known | ({"e2m1": 1} if scales.dtype == ir.DataType.UINT8 else {})
