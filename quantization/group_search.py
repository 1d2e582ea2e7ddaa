"""How one group of linears is quantized: candidates against rounding to nearest, the best on held-out rows kept."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from quantization import awq, smoothquant
from quantization.checkpoint import LinearReport, Method
from quantization.gptq import gptq, inverse_factor
from quantization.rounding import FloatArray, Format, QuantizedLinear, round_to, round_to_nearest
from quantization.scale_fit import fit_scales, output_error
from quantization.statistics import Statistics
from tapeout.errors import QuantizationError
from tapeout.portable_graph import LinearGroup, ScaleSink
from tapeout.recipe import Quantize


@dataclass(frozen=True)
class Rounded:
    """One way to quantize one member, and its mean squared output error on the held-out rows."""

    method: Method
    linear: QuantizedLinear
    error: float


def quantize_group(
    group: LinearGroup,
    weights: list[FloatArray],
    statistics: Statistics,
    fmt: Format,
    settings: Quantize,
    sink: ScaleSink | None,
) -> tuple[awq.InputScale, list[QuantizedLinear], list[LinearReport]]:
    if fmt.activations == "int8":
        return _quantize_static(group, weights, statistics, fmt, settings, sink)
    identity = awq.identity(group.in_features)
    plain = [judge("rtn", w, round_to_nearest(w, fmt), identity, statistics) for w in weights]
    scale, kept = identity, plain
    if settings.method == "awq":
        kept = _best_of(weights, plain, identity, statistics, fmt)
        if sink is not None:
            found = awq.search(weights, statistics.gram, statistics.mean_abs, fmt, settings.scale_grid, sink)
            if not found.is_identity:
                rounded = [judge("rtn", w, round_to_nearest(w * found.values, fmt), found, statistics) for w in weights]
                scaled = _best_of(weights, rounded, found, statistics, fmt)
                if sum(r.error for r in scaled) < sum(r.error for r in kept):
                    scale, kept = found, scaled
    energies = [output_error(weight, statistics.holdout) for weight in weights]
    return scale, [r.linear for r in kept], _reports(group, fmt, scale, plain, kept, energies)


def _quantize_static(
    group: LinearGroup,
    weights: list[FloatArray],
    statistics: Statistics,
    fmt: Format,
    settings: Quantize,
    sink: ScaleSink | None,
) -> tuple[awq.InputScale, list[QuantizedLinear], list[LinearReport]]:
    """The same with inputs on a static int8 grid: their rounding is noise that joins the statistics of each candidate.

    One input scale serves the whole group, whose members read one tensor.
    """

    def noisy(scale: awq.InputScale) -> tuple[Statistics, FloatArray]:
        noise = smoothquant.input_noise(statistics.max_abs, np.diag(statistics.gram), scale)
        together = np.diag(noise)
        return replace(statistics, gram=statistics.gram + together, holdout=statistics.holdout + together), noise

    def rounded(scale: awq.InputScale) -> list[Rounded]:
        # Weights are fitted to the inputs they will meet, noise and all; the noise that passes is charged at the end.
        assumed, noise = noisy(scale)
        nearest = [judge("rtn", w, round_to_nearest(w * scale.values, fmt), scale, assumed) for w in weights]
        best = nearest if settings.method == "rtn" else _best_of(weights, nearest, scale, assumed, fmt)
        return [
            replace(r, error=smoothquant.noisy_error(r.linear, w, scale, statistics.holdout, noise))
            for r, w in zip(best, weights, strict=True)
        ]

    identity = awq.identity(group.in_features)
    scale, kept = identity, rounded(identity)
    plain = kept
    if sink is not None and settings.method == "awq":
        found = smoothquant.search(
            weights, statistics.gram, statistics.max_abs, fmt, steps=settings.scale_grid, sink=sink
        )
        if not found.is_identity:
            smoothed = rounded(found)
            if sum(r.error for r in smoothed) < sum(r.error for r in kept):
                scale, kept = found, smoothed
    step = smoothquant.input_step(statistics.max_abs, scale)
    energies = [output_error(weight, statistics.holdout) for weight in weights]
    linears = [replace(r.linear, input_scale=step) for r in kept]
    return scale, linears, _reports(group, fmt, scale, plain, kept, energies)


def _reports(
    group: LinearGroup,
    fmt: Format,
    scale: awq.InputScale,
    plain: list[Rounded],
    kept: list[Rounded],
    energies: list[float],
) -> list[LinearReport]:
    return [
        LinearReport(
            name=name,
            group=group.name,
            out_features=rows,
            in_features=group.in_features,
            bits=fmt.bits,
            group_size=fmt.group_size,
            symmetric=fmt.symmetric,
            activations=fmt.activations,
            method=chosen.method,
            input_scale=scale.label,
            error_rtn=first.error / energy,
            error=chosen.error / energy,
        )
        for name, rows, first, chosen, output in zip(
            group.members, group.out_features, plain, kept, energies, strict=True
        )
        for energy in [max(output, float(np.finfo(np.float32).tiny))]
    ]


def _best_of(
    weights: list[FloatArray], rounded: list[Rounded], scale: awq.InputScale, statistics: Statistics, fmt: Format
) -> list[Rounded]:
    """Per member, the best of its candidates, all under one input scale."""
    solver = Solver(statistics, scale)
    return [
        min([plain, *solver.candidates(weight, fmt)], key=lambda option: option.error)
        for weight, plain in zip(weights, rounded, strict=True)
    ]


class Solver:
    """What rounds weights better than to nearest under one input scale: fitted group scales, and GPTQ on these."""

    def __init__(self, statistics: Statistics, scale: awq.InputScale) -> None:
        self._statistics, self._scale = statistics, scale
        gram = statistics.gram / np.outer(scale.values, scale.values)
        self._importance = np.ascontiguousarray(np.diag(gram))
        self._factor = None  # inputs that are not correlated, or of too few dimensions: the other candidates stand
        if np.count_nonzero(gram) > np.count_nonzero(self._importance):
            with suppress(np.linalg.LinAlgError):
                self._factor = inverse_factor(gram)

    def candidates(self, weight: FloatArray, fmt: Format) -> list[Rounded]:
        scaled = weight * self._scale.values
        grid = fit_scales(scaled, self._importance, fmt)
        found = [judge("scale_fit", weight, round_to(scaled, grid, fmt), self._scale, self._statistics)]
        if self._factor is not None:
            found.append(judge("gptq", weight, gptq(scaled, self._factor, grid, fmt), self._scale, self._statistics))
        return found


def judge(
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
