"""The products of a model, merged as engines run them, and what its units cost under what they may get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.graph import LinearGroup, PortableGraph
from pipeline.kernels import Kernel
from pipeline.recipe import THROUGHPUT_STREAMS, KVCache, Plan
from quantization.plan import HEAD, fitted, menu_for, resolve, table_kernels, tables_of

# Share of tokens by the rows of their step: as many tokens are read, 128 at a time, as are written.
WORKLOADS = {"latency": {1: 0.5, 128: 0.5}, "throughput": {THROUGHPUT_STREAMS: 0.5, 128: 0.5}}

Shape = tuple[int, int]  # (K, N) of a merged product


@dataclass(frozen=True)
class Cost:
    """Of a unit under one kernel. ``seconds``: of all of it, by the rows of a step; only those that were timed."""

    bytes: int
    seconds: Mapping[int, float]


@dataclass(frozen=True)
class CostTable:
    """What products cost on the target, by shape and the kernel's name. ``seconds``: of one product, by rows."""

    target: str
    threads: int
    slots: int  # a step of more rows is prefill, of which the head computes one
    bytes: Mapping[Shape, Mapping[str, int]]
    seconds: Mapping[Shape, Mapping[str, Mapping[int, float]]]

    def linears(self, groups: Sequence[LinearGroup], kernel: Kernel) -> Cost:
        """Of groups that are all of one shape."""
        shape, name = shape_of(groups[0]), fitted(kernel, groups[0].in_features).name
        seconds = self.seconds[shape].get(name, {})
        return Cost(
            len(groups) * self.bytes[shape][name], {rows: len(groups) * taken for rows, taken in seconds.items()}
        )

    def tables(self, graph: PortableGraph, kernel: Kernel) -> Cost:
        """Of the token embedding and the head: a tied table counts once, and gathering its rows costs no time."""
        head = self.linears([head_of(graph)], kernel)
        computed = {rows: rows if rows <= self.slots else 1 for rows in head.seconds}
        return Cost(
            len(tables_of(graph)) * head.bytes,
            {rows: head.seconds[count] for rows, count in computed.items() if count in head.seconds},
        )

    def cache(self, _: KVCache) -> Cost:
        return Cost(0, {rows: 0.0 for by_name in self.seconds.values() for by in by_name.values() for rows in by})


def workload_of(plan: Plan) -> dict[int, float]:
    """Rows of a step: share of tokens."""
    return WORKLOADS.get(plan.goal, plan.workload)


def shape_of(group: LinearGroup) -> Shape:
    return (group.in_features, sum(group.out_features))


def head_of(graph: PortableGraph) -> LinearGroup:
    return next(group for group in graph.groups if group.name == HEAD)


def products_of(graph: PortableGraph, plan: Plan) -> dict[Shape, tuple[Kernel, ...]]:
    """Every shape there is, with the kernels that its linears may get."""
    written = None if plan.kernels == "auto" else resolve(graph, plan.kernels)
    found: dict[Shape, dict[Kernel, None]] = {}
    for group in graph.groups:
        if group.name == HEAD:
            wanted = table_kernels(plan.embeddings, group.in_features)
        elif written is None:
            wanted = menu_for(group.in_features)
        else:
            wanted = (fitted(written[group.name], group.in_features),)
        found.setdefault(shape_of(group), {}).update(dict.fromkeys(wanted))
    return {shape: tuple(kernels) for shape, kernels in found.items()}
