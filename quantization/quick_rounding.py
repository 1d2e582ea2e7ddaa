"""Linears rounded to a scheme well enough to rank schemes by, in a fraction of what the quantize stage takes.

Every scheme gets the search for input scales that belongs to it, on a coarse grid. Then 4-bit codes are GPTQ's on the
full range, and those of more bits the nearest; embeddings are rounded as the quantize stage does it. Less would not
do: without the search 8-bit Q/K/V of the default model seem to cost two to four times what the quantize stage makes of
them, and without GPTQ 4-bit ones three to five times, 5- and 6-bit ones 1.4 to 1.6 times (docs/negative-results.md).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from quantization.calibration import Calibration
from quantization.compressed_tensors import Checkpoint, open_checkpoint
from quantization.input_scale import identity
from quantization.kv_cache import BITS, scale_name
from quantization.methods import awq, gptq, smoothquant
from quantization.problem import Problem, input_step
from quantization.query_gates import multiplied, restored, row_factors
from quantization.reference import round_to_grid
from quantization.search import search
from quantization.simulate import Simulated
from quantization.statistics import Statistics, every_channel_alike, kv_scales, read_statistics
from quantization.units import EMBEDDING, HEAD, embeddings_of, fold_target_of, head_with, out_by_in
from tapeout.artifact import Artifact
from tapeout.number_format import FloatArray
from tapeout.operators.operator import StateChange
from tapeout.portable_graph import FoldTarget, LinearGroup, PortableGraph
from tapeout.quantized import QuantizedWeight, fit_range, round_to_nearest, stacked
from tapeout.recipe import KVCache, Quantize
from tapeout.schemes import FLOAT, Scheme

STEPS = 8  # of the exponent between 0 and 1, in searches for input scales
AT_ONCE = 2  # groups; numpy releases the interpreter
# And fewer. With GPTQ for 6 bits, too, plans use up all of plan.max_kl, and the verdict of `latency` is INCONCLUSIVE.
GPTQ_BITS = 4


@dataclass(frozen=True)
class Prepared:
    """A group with what every scheme needs of it. ``weights``: multiplied by ``factors``, see query_gates.py."""

    weights: Sequence[FloatArray]
    factors: Sequence[FloatArray | None]
    statistics: Statistics
    fold_target: FoldTarget | None
    candidates: Collection[str]  # of quantize.candidates

    def rounded(self, scheme: Scheme) -> Simulated:
        """Not for a scheme that leaves the group in float."""
        scheme = scheme.fitted(self.weights[0].shape[1])
        problem = Problem.of(self.weights, scheme, self.statistics, self.fold_target, STEPS)
        for name, search_scale in (("awq", awq.propose), ("smoothquant", smoothquant.propose)):
            scale = search_scale(problem) if name in self.candidates else None
            if scale is not None:
                problem = problem.under(scale)
        if (
            (scheme.bits <= GPTQ_BITS or scheme.activations == "fp8")
            and "gptq" in self.candidates
            and (factors := problem.inputs.once(gptq.factors_of)) is not None
        ):
            linears = [gptq.gptq(weight, factors, fit_range(weight, scheme), scheme) for weight in problem.scaled()]
        else:
            linears = [round_to_nearest(weight, scheme) for weight in problem.scaled()]
        if scheme.activations != "float":
            step = input_step(self.statistics.max_abs, problem.scale, scheme.activations)
            linears = [replace(linear, input_scale=step) for linear in linears]
        return Simulated(tuple(restored(linears, self.factors)), problem.scale)


@dataclass(frozen=True)
class PreparedExperts:
    """A group of experts. They are read one by one whenever they are rounded: a layer's may be gigabytes."""

    group: LinearGroup
    source: Checkpoint
    calibration: Artifact[Calibration]
    candidates: Collection[str]

    def rounded(self, scheme: Scheme) -> Simulated:
        """Not for a scheme that leaves the group in float."""
        found = (
            self._expert(expert).rounded(scheme.of_expert(expert)).linears[0] for expert in range(self.group.experts)
        )
        return Simulated((stacked(list(found)),), identity(self.group.in_features))

    def _expert(self, expert: int) -> Prepared:
        weight = out_by_in(self.source.part(self.group.members[0], expert), self.group)
        statistics = read_statistics(self.calibration, self.group, expert)
        return Prepared((weight,), (None,), statistics, None, self.candidates)


class QuickRounding:
    """Reads groups of a float checkpoint and rounds them, several at once."""

    def __init__(self, graph: Artifact[PortableGraph], calibration: Artifact[Calibration], settings: Quantize) -> None:
        self._graph, self._calibration, self._settings = graph, calibration, settings
        self._source = open_checkpoint(graph.folder)

    def prepare(self, groups: Sequence[LinearGroup]) -> dict[str, Prepared | PreparedExperts]:
        """By the group's name."""
        with _together() as run:
            return dict(zip((group.name for group in groups), run(self._prepare, groups), strict=True))

    def rounded(self, prepared: Mapping[str, Prepared | PreparedExperts], scheme: Scheme) -> dict[str, Simulated]:
        """By the group's name; for any scheme but float."""
        with _together() as run:
            return dict(zip(prepared, run(lambda group: group.rounded(scheme), prepared.values()), strict=True))

    def embeddings(self, scheme: Scheme) -> dict[str, Simulated]:
        """The embedding and lm_head, rounded as the quantize stage does it; nothing for float ones."""
        graph = self._graph.record
        if scheme == FLOAT:
            return {}
        scheme = scheme.fitted(graph.hidden_size)
        as_given = identity(graph.hidden_size)
        found = {name: Simulated((self._embedding(name, scheme),), as_given) for name in embeddings_of(graph)}
        head = next(group.members[0] for group in graph.groups if group.name == HEAD)
        return {EMBEDDING: found[graph.embedding], HEAD: found[head]}

    def kv_cache(self, settings: KVCache) -> StateChange | None:
        """How keys and values are rounded; None for a cache in float."""
        if settings.dtype not in BITS:
            return None
        layers = self._graph.record.cached_layers
        found = [kv_scales(layer, self._calibration, settings) for layer in layers]
        scales = {name: torch.from_numpy(scale) for part in found for name, scale in part.items()}

        def rounded(layer: int, part: str, kept: Tensor) -> Tensor:
            return round_to_grid(kept, scales[scale_name(layer, part)], settings.dtype)

        return rounded

    def _prepare(self, group: LinearGroup) -> Prepared | PreparedExperts:
        if group.experts:
            return PreparedExperts(group, self._source, self._calibration, self._settings.candidates)
        weights = [out_by_in(self._source.tensor(name), group) for name in group.members]
        statistics = read_statistics(self._calibration, group)
        factors = row_factors(weights, group, statistics)
        fold_target = fold_target_of(group, self._graph.record)
        return Prepared(multiplied(weights, factors), factors, statistics, fold_target, self._settings.candidates)

    def _embedding(self, name: str, scheme: Scheme) -> QuantizedWeight:
        head, weight = head_with(self._graph.record, name), self._source.tensor(name)
        inputs = every_channel_alike(weight.shape[1]) if head is None else read_statistics(self._calibration, head)
        return search([weight], scheme, inputs, self._settings).members[0].linear


@contextmanager
def _together() -> Generator[Any]:
    """A ``map`` over groups side by side, each on one core."""
    with threadpool_limits(1), ThreadPoolExecutor(AT_ONCE) as pool:
        yield pool.map
