"""The shapes of a model's linears, merged as engines run them, and what its units cost under what they may get."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quantization.calibration import Calibration
from quantization.kv_cache import BITS
from quantization.units import (
    ALL_CANDIDATES,
    HEAD,
    Candidates,
    caches,
    candidates_of,
    embedding_schemes,
    embeddings_of,
    resolve,
)
from tapeout.portable_graph import CachedHeads, LinearGroup, PortableGraph
from tapeout.quantized import is_e4m3
from tapeout.recipe import THROUGHPUT_STREAMS, KVCache, Plan
from tapeout.schemes import FLOAT, Scheme
from tapeout.state import SEQUENCE_SLOTS, slot_bytes
from tapeout.throughput import Throughput

# Share of tokens by the tokens of their step: as many tokens are read, 128 at a time, as are written.
WORKLOADS = {"latency": {1: 0.5, 128: 0.5}, "throughput": {THROUGHPUT_STREAMS: 0.5, 128: 0.5}}

Shape = tuple[int, int]  # (K, N) of a merged linear
Visits = Mapping[str, Sequence[int]]  # by group of experts: tokens of calibration that chose each
SCALE_BYTES = 4  # of a channel of keys or values; one per tensor is written to every channel


@dataclass(frozen=True)
class Cost:
    """Of a unit under one scheme. ``seconds``: of all of it, by the tokens of a step; only those that were timed."""

    bytes: int
    seconds: Mapping[int, float]


@dataclass(frozen=True)
class CostTable:
    """What linears cost on the target, by shape and scheme name, and attention. Seconds are of one, by step size."""

    target: str
    threads: int
    slots: int  # a step of more tokens is prefill, of which lm_head computes one
    context: int  # tokens in the KV cache of each sequence
    bytes: Mapping[Shape, Mapping[str, int]]
    seconds: Mapping[Shape, Mapping[str, Mapping[int, float]]]
    attention: Mapping[str, Mapping[int, float]]  # of one layer, the mean, by a cache's dtype and tokens of a step
    timed: bool = True  # False: seconds follow from what the target declares
    float_bits: int = 32  # of a KV cache that is not quantized
    visits: Visits = field(default_factory=dict[str, Sequence[int]])  # empty: all experts are chosen alike

    def linears(self, groups: Sequence[LinearGroup], scheme: Scheme) -> Cost:
        """Of groups that are all of one shape, with so many experts or none."""
        sizes, scheme = self.bytes[shape_of(groups[0])], scheme.fitted(groups[0].in_features)
        size = sum(sizes[scheme.of_expert(expert).name] for expert in range(max(1, groups[0].experts)))
        return Cost(len(groups) * size, self.linears_seconds(groups, scheme))

    def embeddings(self, graph: PortableGraph, scheme: Scheme) -> Cost:
        """Of the token embedding and lm_head: a tied one counts once."""
        head = head_of(graph)
        size = self.bytes[shape_of(head)][scheme.fitted(head.in_features).name]
        return Cost(len(embeddings_of(graph)) * size, self.embeddings_seconds(graph, scheme))

    def cache(self, graph: PortableGraph, settings: KVCache) -> Cost:
        """Codes and scales of ``slots`` sequences of ``context`` tokens, and attention of all layers over them.

        And the recurrent state of as many sequences, which an engine holds whatever the cache is kept in: a slot for
        each, and one for a snapshot.
        """
        layers = len(graph.cached_layers)
        channels = sum(count * heads.channels for heads, count in graph.cached_heads.items())
        bits = BITS.get(settings.dtype, self.float_bits)
        scales = channels * SCALE_BYTES if settings.dtype in BITS else 0
        return Cost(
            self.slots * (self.context * channels * bits // 8 + SEQUENCE_SLOTS * slot_bytes(graph.state)) + scales,
            {tokens: layers * taken for tokens, taken in self.attention.get(settings.dtype, {}).items()},
        )

    def linears_seconds(self, groups: Sequence[LinearGroup], scheme: Scheme) -> dict[int, float]:
        """By tokens of a step; nothing for a scheme that was not timed.

        Experts take the time of a linear of their shape for each of them that a step reads.
        """
        group, scheme = groups[0], scheme.fitted(groups[0].in_features)
        if not group.experts:
            taken = self.seconds[shape_of(group)].get(scheme.name, {})
            return {tokens: len(groups) * seconds for tokens, seconds in taken.items()}
        of_experts = [self.experts_seconds(each, scheme) for each in groups]
        counts = of_experts[0].keys()
        return {n: float(sum(part[n].sum() for part in of_experts)) for n in counts if all(n in p for p in of_experts)}

    def experts_seconds(self, group: LinearGroup, scheme: Scheme) -> dict[int, NDArray[np.float64]]:
        """Of each expert, by tokens of a step, as far as timed: the time to read it, by how many steps do.

        The tokens of one that is read are those of all, shared out: a step waits for weights more than for products.
        """
        scheme = scheme.fitted(group.in_features)
        taken = self.seconds[shape_of(group)]
        own = [taken.get(scheme.of_expert(expert).name, {}) for expert in range(group.experts)]
        found: dict[int, NDArray[np.float64]] = {}
        for tokens in own[0]:
            read, each = visited(group, tokens, self.visits.get(group.name))
            if all(each in seconds for seconds in own):
                found[tokens] = read * [seconds[each] for seconds in own]
        return found

    def embeddings_seconds(self, graph: PortableGraph, scheme: Scheme) -> dict[int, float]:
        """By tokens of a step, as far as timed. Prefill computes one position of lm_head; a gather is free."""
        head = self.linears_seconds([head_of(graph)], scheme)
        computed = {tokens: tokens if tokens <= self.slots else 1 for tokens in head}
        return {tokens: head[count] for tokens, count in computed.items() if count in head}


def workload_of(plan: Plan) -> dict[int, float]:
    """Tokens of a step: share of all tokens."""
    return WORKLOADS.get(plan.goal, plan.workload)


def shape_of(group: LinearGroup) -> Shape:
    return (group.in_features, sum(group.out_features))


def visits_of(calibration: Calibration) -> Visits:
    """Of all samples."""
    return {
        name: tuple(fit + holdout for fit, holdout in zip(layer.fit, layer.holdout, strict=True))
        for layer in calibration.visits
        for name in layer.groups
    }


def visited(group: LinearGroup, tokens: int, visits: Sequence[int] | None = None) -> tuple[NDArray[np.float64], int]:
    """By expert, the share of steps of so many tokens that read it; and the tokens of each that is read.

    Tokens choose by themselves, each expert as often as calibration did: one that no token chose counts as chosen by
    one. Without ``visits`` all are chosen alike.

    >>> group = LinearGroup(
    ...     name="layers.0.experts_up", members=("up",), biases=(None,), in_features=64, out_features=(64,),
    ...     experts=128, chosen=8,
    ... )
    >>> [(round(float(read.sum()), 1), each) for read, each in (visited(group, tokens) for tokens in (1, 32, 512))]
    [(8.0, 1), (111.8, 2), (128.0, 32)]
    >>> visited(group.model_copy(update={"experts": 4, "chosen": 1}), 2, [97, 1, 1, 1])[0].round(3).tolist()
    [0.999, 0.02, 0.02, 0.02]
    """
    counts = np.maximum(visits or np.ones(group.experts), 1)
    read = 1 - (1 - np.minimum(group.chosen * counts / counts.sum(), 1)) ** tokens
    return read, max(1, round(tokens * group.chosen / read.sum()))


def head_of(graph: PortableGraph) -> LinearGroup:
    return next(group for group in graph.groups if group.name == HEAD)


def declared_costs(
    graph: PortableGraph,
    plan: Plan,
    candidates: Candidates,
    throughput: Throughput,
    *,
    target: str,
    slots: int,
    float_bits: int,
    fp8_inputs: bool = False,
    visits: Visits | None = None,
) -> CostTable:
    """The table of a target with no device at hand: bytes by schemes, seconds by its declared throughput.

    ``float_bits``: of what is not quantized. ``slots``: sequences whose KV cache counts. ``fp8_inputs``: kernels round
    inputs to E4M3 beside weights in E4M3.
    """
    tokens = sorted({1, *workload_of(plan)})  # prefill computes one position of lm_head
    context = min(plan.context, graph.max_positions)
    sizes: dict[Shape, dict[str, int]] = {}
    seconds: dict[Shape, dict[str, dict[int, float]]] = {}
    for (columns, outputs), schemes in schemes_by_shape(graph, plan, candidates).items():
        counts = counts_of(graph, (columns, outputs), tokens, visits or {})
        sizes[columns, outputs], seconds[columns, outputs] = {}, {}
        for scheme in schemes:
            bits = float_bits if scheme == FLOAT else scheme.bits_per_weight(columns)
            size = math.ceil(columns * outputs * bits / 8)
            inputs = "fp8" if fp8_inputs and scheme != FLOAT and is_e4m3(scheme) else scheme.activations
            sizes[columns, outputs][scheme.name] = size
            seconds[columns, outputs][scheme.name] = {
                count: throughput.seconds(size, 2 * count * columns * outputs, inputs) for count in counts
            }

    def attended(heads: CachedHeads, dtype: str) -> dict[int, float]:
        """By tokens of a step: each up to ``slots`` is of a sequence of its own, more are one prompt."""
        bits = context * heads.channels * BITS.get(dtype, float_bits)
        return {count: throughput.seconds((count if count <= slots else 1) * bits // 8, 0) for count in tokens}

    attention = {
        cache.dtype: mean_of_layers(graph, tokens, lambda heads, dtype=cache.dtype: attended(heads, dtype))
        for cache in caches(plan.kv_cache, graph, candidates)
    }
    return CostTable(
        *(target, 0, slots, context, sizes, seconds, attention),
        timed=False,
        float_bits=float_bits,
        visits=visits or {},
    )


def counts_of(graph: PortableGraph, shape: Shape, tokens: Collection[int], visits: Visits) -> list[int]:
    """Tokens at which a linear of the shape is timed, for steps of ``tokens``: fewer for one of experts."""
    alike = [group for group in graph.groups if group.experts and shape_of(group) == shape]
    return sorted({*tokens, *(visited(each, n, visits.get(each.name))[1] for each in alike for n in tokens)})


def mean_of_layers(
    graph: PortableGraph, tokens: Collection[int], seconds: Callable[[CachedHeads], Mapping[int, float]]
) -> dict[int, float]:
    """Of a layer's attention, by ``tokens`` of a step, as far as they were timed; 0 in a model without attention.

    ``seconds``: of a layer that keeps so many heads and channels.
    """
    layers = max(1, len(graph.cached_layers))
    parts = [(count / layers, seconds(heads)) for heads, count in graph.cached_heads.items()]
    timed = [n for n in tokens if all(n in taken for _, taken in parts)]
    return {n: sum(share * taken[n] for share, taken in parts) for n in timed}


def schemes_by_shape(
    graph: PortableGraph, plan: Plan, candidates: Candidates = ALL_CANDIDATES
) -> dict[Shape, tuple[Scheme, ...]]:
    """Every shape there is, with the schemes that its linears may get."""
    written = None if plan.schemes == "auto" else resolve(graph, plan.schemes)
    found: dict[Shape, dict[Scheme, None]] = {}
    for group in graph.groups:
        if group.name == HEAD:
            wanted = embedding_schemes(plan.embeddings, group.in_features)
        elif written is None:
            wanted = candidates_of(group, candidates)
        else:
            wanted = written[group.name].fitted(group.in_features).each
        found.setdefault(shape_of(group), {}).update(dict.fromkeys(wanted))
    return {shape: tuple(schemes) for shape, schemes in found.items()}
