"""Each layer's linears and experts are quantized, side by side in as much memory as SEARCH_BYTES says.

For each group of linears that share an input, the methods of ``quantize.candidates`` are compared by output error on
held-out calibration samples (search.py). RTN is always among them, so that no method is kept that does harm. Experts of
a mixture are searched for one by one, on the tokens that chose each. Their inputs get no scale: the norm before them
feeds the router, too, and an expert's own gate has no place for one that all its scheme shares.

A scale ``s`` on a linear's input is undone by its producer. Where the producer is a quantized linear, its outputs are
divided by ``s`` after rounding: that divides their group scales and leaves the codes alone, so the order in which
groups are treated does not matter.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Condition

import numpy as np
import psutil
from threadpoolctl import threadpool_limits

from quantization import input_scale
from quantization.calibration import Calibration
from quantization.checkpoint import LinearReport
from quantization.compressed_tensors import Checkpoint, ResumableWriter
from quantization.input_scale import InputScale, identity
from quantization.kv_cache import BITS, scale_name
from quantization.needs import search_bytes
from quantization.query_gates import multiplied, restored, row_factors
from quantization.search import SearchResult, search
from quantization.statistics import every_channel_alike, kv_scales, read_statistics
from quantization.units import (
    ATTENTION_INPUTS,
    EMBEDDING,
    HEAD,
    Schemes,
    by_layer,
    embedding_scheme,
    embeddings_of,
    fold_target_of,
    head_with,
    kind_of,
    layer_of,
    out_by_in,
)
from tapeout.artifact import Artifact
from tapeout.number_format import FloatArray
from tapeout.portable_graph import FoldTarget, LinearGroup, PortableGraph
from tapeout.progress import ProgressBar
from tapeout.quantized import QuantizedWeight, format_of, stacked
from tapeout.recipe import BASELINE, KVCache, Quantize
from tapeout.schemes import FLOAT, Scheme


@dataclass
class LayerResult:
    """What one layer's groups became. ``tensors`` holds every parameter that differs from the source."""

    tensors: dict[str, QuantizedWeight | FloatArray] = field(default_factory=dict)
    reports: list[LinearReport] = field(default_factory=list)
    value_scale: FloatArray | None = None  # [kv_heads * head_size] that value channels were divided by

    def notes(self) -> str:
        """All but the tensors, to be kept beside them."""
        scale = None if self.value_scale is None else self.value_scale.tolist()
        reports = [report.model_dump(mode="json") for report in self.reports]
        return json.dumps({"names": list(self.tensors), "reports": reports, "value_scale": scale})


@dataclass(frozen=True)
class _LayerRecord:
    """A :class:`LayerResult` of this run or of one before it, its tensors written."""

    names: tuple[str, ...]
    reports: tuple[LinearReport, ...]
    value_scale: FloatArray | None

    @classmethod
    def of(cls, notes: str) -> _LayerRecord:
        kept = json.loads(notes)
        scale = None if kept["value_scale"] is None else np.array(kept["value_scale"], np.float32)
        return cls(tuple(kept["names"]), tuple(map(LinearReport.model_validate, kept["reports"])), scale)


class MemoryBudget:
    """A number of bytes that threads take shares of; who wants more than all of it gets it alone."""

    def __init__(self, total: int) -> None:
        self._free = self._total = total
        self._changed = Condition()

    @contextmanager
    def taken(self, wanted: int) -> Generator[None]:
        wanted = min(wanted, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()


@dataclass(frozen=True)
class LayersJob:
    """What the layers of one model are quantized with."""

    graph: PortableGraph
    source: Checkpoint
    calibration: Artifact[Calibration]
    stored: Schemes
    settings: Quantize
    kv_cache: KVCache
    memory: MemoryBudget

    def write(self, writer: ResumableWriter) -> tuple[list[LinearReport], dict[str, FloatArray]]:
        """Every tensor, a part per layer and embedding; parts that ``writer`` has already are not made again.

        Returns what is reported of each weight, and the scales of the KV cache.
        """
        layers, embeddings = by_layer(self.graph), embeddings_of(self.graph)
        total = len(layers) + len(embeddings)
        missing = [number for number in range(len(layers)) if not writer.has_part(number)]
        with (
            threadpool_limits(1),  # matmuls of several groups must not compete for the same cores
            ProgressBar(title="quantizing", unit="layer", total=total, done=len(layers) - len(missing)) as progress,
            ThreadPoolExecutor(psutil.cpu_count(logical=False) or 1) as pool,
        ):
            results = pool.map(lambda number: self.layer(layers[number][1]), missing)
            for number, result in zip(missing, results, strict=True):
                for name, tensor in sorted(result.tensors.items()):
                    writer.add_linear(name, tensor)
                writer.end_part(number, result.notes())
                progress.update()
            for number, (name, tied_to) in enumerate(embeddings.items(), start=len(layers)):
                if not writer.has_part(number):
                    result = self.embedding(name, pool)
                    writer.add_embedding(name, result.tensors[name], tied_to=tied_to)
                    writer.end_part(number, result.notes())
                progress.update()
        done = [_LayerRecord.of(writer.notes(number)) for number in range(total)]
        cache = self._add_others(writer, layers, done)
        writer.end_part(total)
        return [report for result in done for report in result.reports], cache

    def _add_others(
        self, writer: ResumableWriter, layers: list[tuple[str, list[LinearGroup]]], done: list[_LayerRecord]
    ) -> dict[str, FloatArray]:
        """Parameters that stay as they are, and published scales of the KV cache; returns all its scales."""
        written = {name for result in done for name in result.names}
        for name in self.source.names():
            if name not in written:
                writer.add(name, self.source.tensor(name))
        cache: dict[str, FloatArray] = {}
        if self.kv_cache.dtype not in BITS:
            return cache
        for (_, groups), result in zip(layers, done, strict=False):  # embeddings follow the layers
            layer = layer_of(groups[0])
            if layer is not None and layer in self.graph.cached_layers:
                scales = kv_scales(layer, self.calibration, self.kv_cache, result.value_scale)
                cache.update(scales)
                if self.kv_cache.granularity == "per_tensor":
                    for name, array in _published_kv_scales(groups, layer, scales).items():
                        writer.add(name, array)
        return cache

    def layer(self, groups: list[LinearGroup]) -> LayerResult:
        result = LayerResult()
        folds: list[tuple[FloatArray, FoldTarget]] = []
        for group in groups:
            with self.memory.taken(search_bytes(group)):
                scale = self._group(group, result)
            fold_target = fold_target_of(group, self.graph, self.stored)
            if fold_target is not None and not scale.is_identity:
                folds.append((scale.values, fold_target))
        for values, fold_target in folds:
            _fold(result, self.source, values, fold_target)
            if fold_target.kind == "linear" and fold_target.head_size:
                result.value_scale = input_scale.producer_scale(values, fold_target)
        for group in groups:
            for name in group.members:
                kept = result.tensors[name]
                if not isinstance(kept, QuantizedWeight):
                    result.tensors[name] = out_by_in(kept, group)  # back to how the source stores it
        return result

    def _group(self, group: LinearGroup, result: LayerResult) -> InputScale:
        """Add the group's linears to ``result``; returns the scale on their input."""
        scheme = self.stored[group.name]
        if group.experts and scheme != FLOAT:
            self._experts(group, scheme, result)
            return identity(group.in_features)
        weights = [out_by_in(self.source.tensor(name), group) for name in group.members]
        found = None
        if scheme == FLOAT:
            result.tensors.update(zip(group.members, weights, strict=True))
        else:
            statistics = read_statistics(self.calibration, group)
            factors = row_factors(weights, group, statistics)
            fold_target = fold_target_of(group, self.graph, self.stored)
            found = search(multiplied(weights, factors), scheme, statistics, self.settings, fold_target)
            linears = restored([member.linear for member in found.members], factors)
            result.tensors.update(zip(group.members, linears, strict=True))
        for at, (name, weight) in enumerate(zip(group.members, weights, strict=True)):
            result.reports.append(_report(name, group.name, weight, scheme, found, at))
        return identity(group.in_features) if found is None else found.scale

    def _experts(self, group: LinearGroup, scheme: Scheme, result: LayerResult) -> None:
        """Add the group's one weight to ``result``."""
        name = group.members[0]
        stored = self.source.codes(name)
        if stored is not None and stored.scheme == scheme:
            result.tensors[name] = stored
            result.reports.append(_experts_report(group, scheme, [], self._visits(group)))
            return
        found: list[SearchResult] = []
        for expert in range(group.experts):
            weight = out_by_in(self.source.part(name, expert), group)
            statistics = read_statistics(self.calibration, group, expert)
            found.append(search([weight], scheme.of_expert(expert), statistics, self.settings))
        result.tensors[name] = stacked([one.members[0].linear for one in found])
        result.reports.append(_experts_report(group, scheme, found, self._visits(group)))

    def _visits(self, group: LinearGroup) -> tuple[int, ...]:
        return next(layer.fit for layer in self.calibration.record.visits if group.name in layer.groups)

    def embedding(self, name: str, pool: ThreadPoolExecutor) -> LayerResult:
        """The embedding or lm_head."""
        weight, head = self.source.tensor(name), head_with(self.graph, name)
        scheme, group = embedding_scheme(self.graph, self.stored, name), EMBEDDING if head is None else HEAD
        if scheme == FLOAT:
            return LayerResult({name: weight}, [_report(name, group, weight, scheme, None, 0)])
        inputs = every_channel_alike(weight.shape[1]) if head is None else read_statistics(self.calibration, head)
        found = search([weight], scheme, inputs, self.settings, run=pool.map)
        return LayerResult({name: found.members[0].linear}, [_report(name, group, weight, scheme, found, 0)])


def _fold(result: LayerResult, source: Checkpoint, scale: FloatArray, fold_target: FoldTarget) -> None:
    producer = result.tensors.get(fold_target.weight)
    if isinstance(producer, QuantizedWeight):
        folded = input_scale.absorb(producer.scales, scale, fold_target)
        result.tensors[fold_target.weight] = replace(producer, scales=format_of(producer.scheme).storable(folded))
    else:
        result.tensors[fold_target.weight] = input_scale.absorb(
            source.tensor(fold_target.weight) if producer is None else producer, scale, fold_target
        )
    if fold_target.bias is not None:
        bias = result.tensors.get(fold_target.bias)
        assert not isinstance(bias, QuantizedWeight)
        result.tensors[fold_target.bias] = input_scale.absorb_bias(
            source.tensor(fold_target.bias) if bias is None else bias, scale, fold_target
        )


def _report(
    name: str, group: str, weight: FloatArray, scheme: Scheme, found: SearchResult | None, member: int
) -> LinearReport:
    """``found`` None: the weight stays in float."""
    return LinearReport(
        name=name,
        group=group,
        out_features=weight.shape[-2],
        in_features=weight.shape[-1],
        experts=math.prod(weight.shape[:-2]) if weight.ndim > 2 else 0,
        scheme=scheme,
        method="float" if found is None else found.members[member].method,
        input_scale="identity" if found is None else found.scale.label,
        error_rtn=0.0 if found is None else found.errors_rtn[member],
        error=0.0 if found is None else found.members[member].error,
    )


def _experts_report(
    group: LinearGroup, scheme: Scheme, found: list[SearchResult], visits: Sequence[int]
) -> LinearReport:
    """Errors are means over the experts, weighted by their visits; the method is that of most of them. Nothing found:
    the codes of the source are kept.
    """
    methods = Counter(one.members[0].method for one in found) or Counter([BASELINE])
    share = np.array(visits, np.float64) / sum(visits)
    return LinearReport(
        name=group.members[0],
        group=group.name,
        out_features=group.out_features[0],
        in_features=group.in_features,
        experts=group.experts,
        scheme=scheme,
        method=methods.most_common(1)[0][0],
        input_scale="identity",
        error_rtn=float(share @ [one.errors_rtn[0] for one in found]) if found else 0.0,
        error=float(share @ [one.members[0].error for one in found]) if found else 0.0,
    )


def _published_kv_scales(groups: list[LinearGroup], layer: int, scales: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """One scale per tensor, where compressed-tensors looks for it: on the attention module."""
    projection = next(group for group in groups if kind_of(group) == ATTENTION_INPUTS).members[0]
    attention = projection.rsplit(".", 2)[0]
    names = {part: scale_name(layer, part) for part in ("key", "value")}
    return {f"{attention}.{part[0]}_scale": scales[name].reshape(-1)[:1] for part, name in names.items()}
