"""The products of a model, merged as engines run them, and what they cost under the kernels they may get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.graph import LinearGroup, PortableGraph
from pipeline.kernels import Kernel
from pipeline.recipe import THROUGHPUT_STREAMS, Plan
from quantization.plan import HEAD, fitted, menu_for, resolve

# Share of tokens by the rows of their step: as many tokens are read, 128 at a time, as are written.
WORKLOADS = {"latency": {1: 0.5, 128: 0.5}, "throughput": {THROUGHPUT_STREAMS: 0.5, 128: 0.5}}

Shape = tuple[int, int]  # (K, N) of a merged product


@dataclass(frozen=True)
class CostTable:
    """What products cost on the target, by shape and the kernel's name. ``seconds``: of one product, by rows."""

    target: str
    threads: int
    slots: int  # a step of more rows is prefill, of which the head computes one
    bytes: Mapping[Shape, Mapping[str, int]]
    seconds: Mapping[Shape, Mapping[str, Mapping[int, float]]]

    def bytes_of(self, group: LinearGroup, kernel: Kernel) -> int:
        return self.bytes[shape_of(group)][fitted(kernel, group.in_features).name]

    def seconds_of(self, group: LinearGroup, kernel: Kernel) -> Mapping[int, float]:
        """By rows; nothing for a kernel that was not timed."""
        return self.seconds[shape_of(group)].get(fitted(kernel, group.in_features).name, {})

    def head_seconds(self, graph: PortableGraph, plan: Plan) -> float:
        """Per token of the plan's workload. Prefill computes one row of the head."""
        seconds = self.seconds_of(head_of(graph), plan.embeddings)
        shares = workload_of(plan).items()
        return sum(share * seconds[rows if rows <= self.slots else 1] / rows for rows, share in shares)


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
            wanted = (fitted(plan.embeddings, group.in_features),)
        elif written is None:
            wanted = menu_for(group.in_features)
        else:
            wanted = (fitted(written[group.name], group.in_features),)
        found.setdefault(shape_of(group), {}).update(dict.fromkeys(wanted))
    return {shape: tuple(kernels) for shape, kernels in found.items()}
