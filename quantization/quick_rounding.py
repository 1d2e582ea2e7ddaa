"""Linears rounded for a kernel well enough to rank kernels by, in a fraction of what the quantize stage takes.

Every kernel gets the search for input scales that belongs to it, on a coarse grid. Then 4-bit codes are GPTQ's on the
plain range, and those of 6 and 8 bits the nearest; tables are rounded as at last. Less would not do: without the search
8-bit Q/K/V of the default model seem to cost two to four times what the quantize stage makes of them, and without GPTQ
4-bit ones three to five times (docs/negative-results.md).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from quantization import awq, smoothquant
from quantization.attention_hook import KVFunction
from quantization.calibration import Calibration
from quantization.compressed_tensors import open_checkpoint
from quantization.embedding_rounding import round_table
from quantization.gptq import gptq, inverse_factor
from quantization.kv_cache import BITS
from quantization.reference import InputGrid, round_to_grid
from quantization.rounding import FloatArray, Format, fit_range, round_to_nearest
from quantization.simulate import Simulated, simulated
from quantization.statistics import Statistics, kv_scales, read_statistics
from quantization.units import EMBEDDING, HEAD, fitted, format_of, head_with, out_by_in, sink_of, tables_of
from tapeout.artifact import Artifact
from tapeout.portable_graph import LinearGroup, PortableGraph, ScaleSink
from tapeout.recipe import KVCache, Quantize
from tapeout.schemes import Scheme

STEPS = 8  # of the exponent between 0 and 1, in searches for input scales
AT_ONCE = 2  # groups; numpy releases the interpreter


@dataclass(frozen=True)
class Prepared:
    """A group with what every kernel needs of it."""

    weights: tuple[FloatArray, ...]
    statistics: Statistics
    sink: ScaleSink | None
    search: bool  # for input scales and codes; else everything is rounded to nearest

    def rounded(self, kernel: Scheme) -> Simulated:
        """Not for a kernel that leaves the group in float."""
        columns = self.weights[0].shape[1]
        fmt = format_of(fitted(kernel, columns), columns)
        assert fmt is not None
        if fmt.activations == "int8":
            return self._static(fmt)
        scale, seen = awq.identity(columns), self.statistics
        if self.sink is not None and self.search:
            scale = awq.search(self.weights, seen.gram, seen.mean_abs, fmt, STEPS, self.sink)
        scaled = [weight * scale.values for weight in self.weights]
        if fmt.bits == 4 and self.search:
            with suppress(np.linalg.LinAlgError):  # inputs of too few dimensions
                factor = inverse_factor(seen.gram / np.outer(scale.values, scale.values))
                return simulated([gptq(weight, factor, fit_range(weight, fmt), fmt) for weight in scaled], scale)
        return simulated([round_to_nearest(weight, fmt) for weight in scaled], scale)

    def _static(self, fmt: Format) -> Simulated:
        scale, seen = awq.identity(fmt.group_size), self.statistics
        if self.sink is not None and self.search:
            scale = smoothquant.search(self.weights, seen.gram, seen.max_abs, fmt, steps=STEPS, sink=self.sink)
        step = smoothquant.input_step(seen.max_abs, scale)
        nearest = (round_to_nearest(weight * scale.values, fmt) for weight in self.weights)
        return simulated([replace(linear, input_scale=step) for linear in nearest], scale)


class QuickRounding:
    """Reads groups of a float checkpoint and rounds them, several at once."""

    def __init__(self, graph: Artifact[PortableGraph], calibration: Artifact[Calibration], settings: Quantize) -> None:
        self._graph, self._calibration, self._settings = graph, calibration, settings
        self._source = open_checkpoint(graph.folder)

    def prepare(self, groups: Sequence[LinearGroup]) -> dict[str, Prepared]:
        """By the group's name."""
        with _together() as run:
            return dict(zip((group.name for group in groups), run(self._prepare, groups), strict=True))

    def rounded(self, prepared: Mapping[str, Prepared], kernel: Scheme) -> dict[str, Simulated]:
        """By the group's name; for any kernel but float."""
        with _together() as run:
            return dict(zip(prepared, run(lambda group: group.rounded(kernel), prepared.values()), strict=True))

    def tables(self, kernel: Scheme) -> dict[str, Simulated]:
        """The embedding and the output head, rounded as they are at last; nothing for float ones."""
        graph = self._graph.record
        fmt = format_of(fitted(kernel, graph.hidden_size), graph.hidden_size)
        if fmt is None:
            return {}
        decoded = {name: self._decoded(name, fmt) for name in tables_of(graph)}
        found = {EMBEDDING: Simulated((decoded[graph.embedding],), None)}
        for group in graph.groups:
            if group.name == HEAD:
                found[HEAD] = Simulated((decoded[group.members[0]],), InputGrid(fmt.group_size, None))
        return found

    def kv_cache(self, settings: KVCache) -> KVFunction | None:
        """How keys and values are rounded; None for a cache in float."""
        if settings.dtype not in BITS:
            return None
        bits = BITS[settings.dtype]
        layers = range(self._graph.record.layers)
        found = [kv_scales(f"layers.{layer}", self._calibration, settings) for layer in layers]
        scales = {name: torch.from_numpy(scale) for part in found for name, scale in part.items()}

        def rounded(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return (
                round_to_grid(key, scales[f"layers.{layer}.k_scale"], bits),
                round_to_grid(value, scales[f"layers.{layer}.v_scale"], bits),
            )

        return rounded

    def _prepare(self, group: LinearGroup) -> Prepared:
        weights = tuple(out_by_in(self._source.tensor(name), group) for name in group.members)
        statistics = read_statistics(self._calibration, group)
        return Prepared(weights, statistics, sink_of(group, self._graph.record), self._settings.method == "awq")

    def _decoded(self, name: str, fmt: Format) -> FloatArray:
        head = head_with(self._graph.record, name)
        statistics = None if head is None else read_statistics(self._calibration, head)
        return round_table(self._source.tensor(name), fmt, statistics, self._settings).linear.dequantize()


@contextmanager
def _together() -> Generator[Any]:
    """A ``map`` over groups side by side, each of whose products keeps to one core."""
    with threadpool_limits(1), ThreadPoolExecutor(AT_ONCE) as pool:
        yield pool.map
