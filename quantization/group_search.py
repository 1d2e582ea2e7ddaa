"""How one group of linears is quantized: candidates against rounding to nearest, the best on held-out rows kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.errors import QuantizationError
from pipeline.graph import LinearGroup, ScaleSink
from pipeline.recipe import Quantize
from quantization import awq
from quantization.checkpoint import LinearReport, Method
from quantization.gptq import gptq, inverse_factor
from quantization.rounding import FloatArray, Format, QuantizedLinear, round_to, round_to_nearest
from quantization.scale_fit import fit_scales, output_error


@dataclass(frozen=True)
class Rounded:
    """One way to quantize one member, and its mean squared output error on the held-out rows."""

    method: Method
    linear: QuantizedLinear
    error: float


@dataclass(frozen=True)
class Statistics:
    """Of one group's inputs; see calibration.py."""

    gram: FloatArray  # [K, K]
    holdout: FloatArray  # [K, K]
    mean_abs: FloatArray  # [K]


def quantize_group(
    group: LinearGroup,
    weights: list[FloatArray],
    statistics: Statistics,
    fmt: Format,
    settings: Quantize,
    sink: ScaleSink | None,
) -> tuple[awq.InputScale, list[QuantizedLinear], list[LinearReport]]:
    identity = awq.identity(group.in_features)
    plain = [_judge("rtn", w, round_to_nearest(w, fmt), identity, statistics) for w in weights]
    scale, kept = identity, plain
    if settings.method == "awq":
        kept = _best_of(weights, plain, identity, statistics, fmt)
        if sink is not None:
            found = awq.search(weights, statistics.gram, statistics.mean_abs, fmt, settings.scale_grid, sink)
            if not found.is_identity:
                rounded = [
                    _judge("rtn", w, round_to_nearest(w * found.values, fmt), found, statistics) for w in weights
                ]
                scaled = _best_of(weights, rounded, found, statistics, fmt)
                if sum(r.error for r in scaled) < sum(r.error for r in kept):
                    scale, kept = found, scaled
    reports = [
        LinearReport(
            name=name,
            group=group.name,
            out_features=weight.shape[0],
            in_features=weight.shape[1],
            bits=8 if fmt.bits == 8 else 4,
            group_size=fmt.group_size,
            symmetric=fmt.symmetric,
            method=chosen.method,
            input_scale=scale.label,
            error_rtn=first.error / energy,
            error=chosen.error / energy,
        )
        for name, weight, first, chosen in zip(group.members, weights, plain, kept, strict=True)
        for energy in [max(output_error(weight, statistics.holdout), float(np.finfo(np.float32).tiny))]
    ]
    return scale, [r.linear for r in kept], reports


def _best_of(
    weights: list[FloatArray], rounded: list[Rounded], scale: awq.InputScale, statistics: Statistics, fmt: Format
) -> list[Rounded]:
    """Per member, the best of round-to-nearest, fitted group scales, and GPTQ on these, all under one input scale."""
    gram = statistics.gram / np.outer(scale.values, scale.values)
    try:
        factor = inverse_factor(gram)
    except np.linalg.LinAlgError:
        factor = None  # inputs of too few dimensions: the other candidates stand
    best: list[Rounded] = []
    for weight, plain in zip(weights, rounded, strict=True):
        scaled = weight * scale.values
        grid = fit_scales(scaled, np.ascontiguousarray(np.diag(gram)), fmt)
        options = [plain, _judge("scale_fit", weight, round_to(scaled, grid, fmt), scale, statistics)]
        if factor is not None:
            options.append(_judge("gptq", weight, gptq(scaled, factor, grid, fmt), scale, statistics))
        best.append(min(options, key=lambda option: option.error))
    return best


def _judge(
    method: Method, weight: FloatArray, linear: QuantizedLinear, scale: awq.InputScale, statistics: Statistics
) -> Rounded:
    error = output_error(linear.dequantize() / scale.values - weight, statistics.holdout)
    if not np.isfinite(error):
        raise QuantizationError(
            f"{method} gives an output error of {error}", expected="a finite one", remedy="run `dvc repro calibrate`"
        )
    return Rounded(method, linear, error)


def float_report(group: LinearGroup, index: int) -> LinearReport:
    return LinearReport(
        name=group.members[index],
        group=group.name,
        out_features=group.out_features[index],
        in_features=group.in_features,
        bits=32,
        group_size=0,
        symmetric=True,
        method="float",
        input_scale="identity",
        error_rtn=0.0,
        error=0.0,
    )
