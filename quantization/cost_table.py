"""The products of a model, merged as engines run them, and what its units cost under what they may get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantization.kv_cache import BITS
from quantization.units import HEAD, fitted, menu_for, resolve, table_kernels, tables_of
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.recipe import THROUGHPUT_STREAMS, KVCache, Plan
from tapeout.schemes import Scheme

# Share of tokens by the rows of their step: as many tokens are read, 128 at a time, as are written.
WORKLOADS = {"latency": {1: 0.5, 128: 0.5}, "throughput": {THROUGHPUT_STREAMS: 0.5, 128: 0.5}}

Shape = tuple[int, int]  # (K, N) of a merged product
SCALE_BYTES = 4  # of a channel of keys or values; one a tensor is written to every channel


@dataclass(frozen=True)
class Cost:
    """Of a unit under one kernel. ``seconds``: of all of it, by the rows of a step; only those that were timed."""

    bytes: int
    seconds: Mapping[int, float]


@dataclass(frozen=True)
class CostTable:
    """What products cost on the target, by shape and the kernel's name, and attention. Seconds are of one, by rows."""

    target: str
    threads: int
    slots: int  # a step of more rows is prefill, of which the head computes one
    context: int  # tokens in the KV cache of each sequence
    bytes: Mapping[Shape, Mapping[str, int]]
    seconds: Mapping[Shape, Mapping[str, Mapping[int, float]]]
    attention: Mapping[str, Mapping[int, float]]  # of one layer, by a cache's dtype and rows

    def linears(self, groups: Sequence[LinearGroup], kernel: Scheme) -> Cost:
        """Of groups that are all of one shape."""
        size = self.bytes[shape_of(groups[0])][fitted(kernel, groups[0].in_features).name]
        return Cost(len(groups) * size, self.linears_seconds(groups, kernel))

    def tables(self, graph: PortableGraph, kernel: Scheme) -> Cost:
        """Of the token embedding and the head: a tied table counts once."""
        head = head_of(graph)
        size = self.bytes[shape_of(head)][fitted(kernel, head.in_features).name]
        return Cost(len(tables_of(graph)) * size, self.tables_seconds(graph, kernel))

    def cache(self, graph: PortableGraph, settings: KVCache) -> Cost:
        """Codes and scales of ``slots`` sequences of ``context`` tokens, and attention of all layers over them."""
        channels = 2 * graph.layers * graph.kv_heads * graph.head_size  # of keys and values
        bits = BITS.get(settings.dtype, 32)
        scales = channels * SCALE_BYTES if settings.dtype in BITS else 0
        return Cost(
            self.slots * self.context * channels * bits // 8 + scales,
            {rows: graph.layers * taken for rows, taken in self.attention.get(settings.dtype, {}).items()},
        )

    def linears_seconds(self, groups: Sequence[LinearGroup], kernel: Scheme) -> dict[int, float]:
        """By rows; nothing for a kernel that was not timed."""
        taken = self.seconds[shape_of(groups[0])].get(fitted(kernel, groups[0].in_features).name, {})
        return {rows: len(groups) * seconds for rows, seconds in taken.items()}

    def tables_seconds(self, graph: PortableGraph, kernel: Scheme) -> dict[int, float]:
        """By rows, as far as they were timed. Prefill computes one row of the head; gathering costs nothing."""
        head = self.linears_seconds([head_of(graph)], kernel)
        computed = {rows: rows if rows <= self.slots else 1 for rows in head}
        return {rows: head[count] for rows, count in computed.items() if count in head}


def workload_of(plan: Plan) -> dict[int, float]:
    """Rows of a step: share of tokens."""
    return WORKLOADS.get(plan.goal, plan.workload)


def shape_of(group: LinearGroup) -> Shape:
    return (group.in_features, sum(group.out_features))


def head_of(graph: PortableGraph) -> LinearGroup:
    return next(group for group in graph.groups if group.name == HEAD)


def products_of(graph: PortableGraph, plan: Plan) -> dict[Shape, tuple[Scheme, ...]]:
    """Every shape there is, with the kernels that its linears may get."""
    written = None if plan.kernels == "auto" else resolve(graph, plan.kernels)
    found: dict[Shape, dict[Scheme, None]] = {}
    for group in graph.groups:
        if group.name == HEAD:
            wanted = table_kernels(plan.embeddings, group.in_features)
        elif written is None:
            wanted = menu_for(group.in_features)
        else:
            wanted = (fitted(written[group.name], group.in_features),)
        found.setdefault(shape_of(group), {}).update(dict.fromkeys(wanted))
    return {shape: tuple(kernels) for shape, kernels in found.items()}
