"""The search for how one group of weights is quantized: every candidate against round to nearest, on held-out samples.

Under each input scale that a candidate proposes, and under none, all others round every member; each member keeps the
rounding of lowest output error, and the group keeps the input scale of the lowest sum. One search serves linears, those
with static int8 inputs, the embedding and lm_head: the last two have no producer that could take an input scale, and an
embedding that is not tied has no inputs but one channel at a time, so every channel counts alike. On the default model
a tied embedding of 6 bits costs a KL of 0.0041 this way, in groups of 64 as of 32; by RTN 0.0109 and 0.0067
(docs/negative-results.md).

N  output channels (of an embedding: vocabulary size)      K  input channels
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quantization.input_scale import InputScale, identity
from quantization.methods import method
from quantization.output_error import output_error
from quantization.problem import Problem, input_step
from quantization.statistics import Statistics
from tapeout.errors import QuantizationError
from tapeout.number_format import FloatArray
from tapeout.portable_graph import FoldTarget
from tapeout.quantized import QuantizedWeight, nearest_if_exact
from tapeout.recipe import BASELINE, Quantize
from tapeout.schemes import Scheme

OUTPUTS_AT_ONCE = 2048  # output channels rounded together: a vocabulary of 128k times 4,096 channels is 2 GB in float
# Of a larger weight, evenly spaced outputs are searched on: what is found on them holds for the others.
SEARCHED_WEIGHTS, SEARCHED_OUTPUTS = 1 << 23, 512  # so many weights, and at least so many outputs
_TINY = 1e-30  # added to the energy of an output, which may be zero

Runner = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]  # map, or that of a pool of threads


@dataclass(frozen=True)
class Rounded:
    """One weight by one method. ``error``: mean squared output error on held-out samples."""

    method: str
    linear: QuantizedWeight
    error: float


@dataclass(frozen=True)
class SearchResult:
    """What a group became. Errors are relative to the mean squared output; ``errors_rtn`` are those of RTN.

    Of a weight with more than ``SEARCHED_WEIGHTS`` weights they are those of the output channels searched on.
    """

    scale: InputScale
    members: list[Rounded]
    errors_rtn: list[float]


def search(
    weights: Sequence[FloatArray],
    scheme: Scheme,
    statistics: Statistics,
    settings: Quantize,
    fold_target: FoldTarget | None = None,
    run: Runner = map,
) -> SearchResult:
    """Quantize ``weights`` ``[N, K]``, which read one input, to a scheme that is fitted to K.

    ``fold_target``: where the inverse of an input scale can go. ``run``: rounds the slices of a large weight, in any
    threads.
    Weights that the scheme holds exactly are kept as they are. :class:`QuantizationError` for errors that are not
    finite.
    """
    if scheme.activations == "float" and (exact := nearest_if_exact(weights, scheme)):
        kept_as_is = [Rounded(BASELINE, linear, 0.0) for linear in exact]
        return SearchResult(identity(weights[0].shape[1]), kept_as_is, [0.0] * len(exact))
    outputs = max(SEARCHED_OUTPUTS, SEARCHED_WEIGHTS // weights[0].shape[1])
    searched = [weight[:: -(-len(weight) // outputs)] for weight in weights]
    problem = Problem.of(searched, scheme, statistics, fold_target, settings.scale_grid)
    names, tried, found = list(settings.candidates), [problem], list[list[list[Rounded]]]()
    for current in tried:  # grows by the input scales that are proposed
        options: list[list[Rounded]] = [[] for _ in weights]
        for name in tuple(names):
            proposal = method(name).propose(current)
            if isinstance(proposal, InputScale):
                names.remove(name)
                tried.append(problem.under(proposal))
            elif proposal is not None:
                for member, option in enumerate(_judged(name, proposal, current)):
                    options[member].append(option)
        found.append(options)
    kept = [[min(options, key=lambda option: option.error) for options in members] for members in found]
    charged = [_charged(members, current, searched) for members, current in zip(kept, tried, strict=True)]
    best = min(range(len(tried)), key=lambda number: sum(member.error for member in charged[number]))
    first = [next(option for option in options if option.method == BASELINE) for options in found[0]]
    energies = [_TINY + output_error(weight, statistics.holdout) for weight in searched]
    members = [
        replace(
            member,
            error=member.error / energy,
            linear=member.linear if len(part) == len(weight) else _whole(weight, member, tried[best], run),
        )
        for member, weight, part, energy in zip(charged[best], weights, searched, energies, strict=True)
    ]
    rtn = [m.error / energy for m, energy in zip(_charged(first, problem, searched), energies, strict=True)]
    return SearchResult(tried[best].scale, members, rtn)


def _judged(name: str, proposal: list[QuantizedWeight], problem: Problem) -> list[Rounded]:
    errors = [problem.held_out_error(linear, weight) for linear, weight in zip(proposal, problem.weights, strict=True)]
    if not np.isfinite(errors).all():
        raise QuantizationError(
            f"{name} gives an output error of {max(errors)}",
            expected="a finite one",
            remedy="run `dvc repro calibrate`",
        )
    return [Rounded(name, linear, error) for linear, error in zip(proposal, errors, strict=True)]


def _whole(weight: FloatArray, found: Rounded, problem: Problem, run: Runner) -> QuantizedWeight:
    """All output channels, by the method that was found on some of them."""

    def rounded(start: int) -> QuantizedWeight:
        proposal = method(found.method).propose(problem.part([weight[start : start + OUTPUTS_AT_ONCE]]))
        assert isinstance(proposal, list)
        return proposal[0]

    linear = _stacked(list(run(rounded, range(0, len(weight), OUTPUTS_AT_ONCE))))
    return replace(linear, input_scale=found.linear.input_scale)


def _charged(members: list[Rounded], problem: Problem, weights: Sequence[FloatArray]) -> list[Rounded]:
    """With what remains of the noise of rounded inputs, and with their step; as they are where inputs stay in float."""
    if problem.noise is None:
        return members
    step = input_step(problem.statistics.max_abs, problem.scale, problem.scheme.activations)
    return [
        Rounded(
            member.method,
            replace(member.linear, input_scale=step),
            problem.error(member.linear, weight, problem.statistics.holdout),
        )
        for member, weight in zip(members, weights, strict=True)
    ]


def _stacked(linears: list[QuantizedWeight]) -> QuantizedWeight:
    zero_points = [linear.zero_points for linear in linears if linear.zero_points is not None]
    return replace(
        linears[0],
        codes=np.concatenate([linear.codes for linear in linears]),
        scales=np.concatenate([linear.scales for linear in linears]),
        zero_points=np.concatenate(zero_points) if zero_points else None,
    )
