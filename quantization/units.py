"""Which parameter is stored in which format: the kernel of every group of a graph, as rules or a planner gave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from quantization.rounding import (
    SMALLEST_GROUP,
    FloatArray,
    Format,
    QuantizedLinear,
    fitting_group_size,
    round_to_nearest,
)
from tapeout.errors import QuantizationError
from tapeout.portable_graph import LinearGroup, PortableGraph, ScaleSink
from tapeout.recipe import Cache, Embeddings, KVCache, Rule
from tapeout.schemes import MENU, TABLE_MENU, Scheme

EMBEDDING = "embedding"
HEAD = "lm_head"
CACHE_MENU = (KVCache(dtype="float32"), KVCache(dtype="int8"), KVCache(dtype="int4"))
Formats = dict[str, Format | None]  # by group name, and EMBEDDING; None leaves a group in float


@dataclass(frozen=True)
class Unit:
    """Groups of one kind and shape in neighbouring layers, which take one kernel: ``layers.5-9.gate_up``."""

    name: str
    groups: tuple[LinearGroup, ...]

    @property
    def columns(self) -> int:
        return self.groups[0].in_features

    @property
    def first_layer(self) -> int:
        """The first layer whose result depends on these linears; 0 for what stands before the layers or elsewhere."""
        return layer_of(self.groups[0]) or 0


def layer_of(group: LinearGroup) -> int | None:
    return int(group.name.split(".")[1]) if group.name.startswith("layers.") else None


def kind_of(group: LinearGroup) -> str:
    return group.name.split(".", 2)[-1] if group.name.startswith("layers.") else group.name


def units_of(graph: PortableGraph, band: int) -> tuple[Unit, ...]:
    """Every linear but the head, in units of at most ``band`` layers."""
    found: dict[tuple[int, str, int, tuple[int, ...]], list[LinearGroup]] = {}
    for group in graph.groups:
        if group.name != HEAD:
            layer = layer_of(group)
            key = (-1 if layer is None else layer // band, kind_of(group), group.in_features, group.out_features)
            found.setdefault(key, []).append(group)
    return tuple(unit_of(run) for groups in found.values() for run in _runs(groups))


def unit_of(groups: Sequence[LinearGroup]) -> Unit:
    first, last = layer_of(groups[0]), layer_of(groups[-1])
    if first is None or first == last:
        return Unit(groups[0].name, tuple(groups))
    return Unit(f"layers.{first}-{last}.{kind_of(groups[0])}", tuple(groups))


def _runs(groups: Sequence[LinearGroup]) -> list[list[LinearGroup]]:
    """Groups of one kind, in the order of layers, cut where a layer is missing."""
    runs: list[list[LinearGroup]] = []
    for group in groups:
        if runs and layer_of(group) == (layer_of(runs[-1][-1]) or 0) + 1:
            runs[-1].append(group)
        else:
            runs.append([group])
    return runs


def written_units(graph: PortableGraph, kernels: Mapping[str, Scheme]) -> tuple[Unit, ...]:
    """Every linear but the head, in units as large as a plan that is written out has them."""
    found: dict[tuple[Scheme, str, int, tuple[int, ...]], list[LinearGroup]] = {}
    for group in graph.groups:
        if group.name != HEAD:
            key = (kernels[group.name], kind_of(group), group.in_features, group.out_features)
            found.setdefault(key, []).append(group)
    return tuple(unit_of(run) for groups in found.values() for run in _runs(groups))


def menu_for(columns: int, menu: Sequence[Scheme] = MENU) -> tuple[Scheme, ...]:
    """The kernels of a menu that weights of ``columns`` inputs can have, fitted to them, each once."""
    fitting = [kernel for kernel in menu if not kernel.in_blocks or columns % SMALLEST_GROUP == 0]
    return tuple(dict.fromkeys(fitted(kernel, columns) for kernel in fitting))


def table_kernels(wanted: Embeddings, columns: int) -> tuple[Scheme, ...]:
    """What the token embedding and the head, of ``columns`` channels, may get: the menu, or the one that is written."""
    return menu_for(columns, TABLE_MENU) if wanted == "auto" else (fitted(wanted, columns),)


def caches(wanted: Cache, head_size: int) -> tuple[KVCache, ...]:
    """How keys and values may be kept: as the menu has it, or as it is written. A byte holds two codes of 4 bits."""
    if wanted != "auto":
        return (wanted,)
    return tuple(cache for cache in CACHE_MENU if cache.dtype != "int4" or head_size % 2 == 0)


def fitted(kernel: Scheme, columns: int) -> Scheme:
    """The kernel with a group size that divides the columns. :class:`QuantizationError` if none does."""
    if not kernel.in_blocks:
        return kernel
    return kernel.model_copy(update={"group_size": fitting_group_size(kernel.group_size, columns)})


def format_of(kernel: Scheme, columns: int) -> Format | None:
    """How a weight of ``columns`` input channels is stored for a fitted kernel; None: in float."""
    if kernel.bits == 32:
        return None
    if kernel.activations == "int8":
        return Format(kernel.bits, columns, symmetric=True, activations="int8")
    return Format(kernel.bits, kernel.group_size, kernel.symmetric, positive=kernel.positive_scales)


def stored_plainly(kernel: Scheme, weight: FloatArray) -> QuantizedLinear | FloatArray:
    """A weight ``[N, K]`` as a checkpoint holds it for a fitted kernel, good enough for its size and its speed."""
    fmt = format_of(kernel, weight.shape[1])
    if fmt is None:
        return weight
    linear = round_to_nearest(weight, fmt)
    return replace(linear, input_scale=1 / 32) if fmt.activations == "int8" else linear


def resolve(graph: PortableGraph, rules: Sequence[Rule]) -> dict[str, Scheme]:
    """The kernel that the rules give every group but the head, as written: the first that matches decides."""

    def matching(name: str) -> Scheme:
        for rule in rules:
            if fnmatchcase(name, rule.match):
                return rule.kernel
        raise QuantizationError(
            f"no rule of plan.kernels matches {name}",
            expected="a rule for every group of linears",
            remedy='end the rules with one that matches "*"',
        )

    return {group.name: matching(group.name) for group in graph.groups if group.name != HEAD}


def formats(graph: PortableGraph, kernels: Mapping[str, Scheme], embeddings: Scheme) -> tuple[Formats, list[str]]:
    """The format of every group and of ``embedding``; notes say where a group size had to shrink."""
    found: Formats = {}
    shrunk: dict[str, list[str]] = {}
    columns = {group.name: group.in_features for group in graph.groups} | {EMBEDDING: graph.hidden_size}
    for name, width in columns.items():
        wanted = embeddings if name in (HEAD, EMBEDDING) else kernels[name]
        kernel = fitted(wanted, width)
        if kernel != wanted:
            text = f"groups of {kernel.group_size} instead of {wanted.group_size}, which does not divide {width} inputs"
            shrunk.setdefault(text, []).append(name)
        found[name] = format_of(kernel, width)
    return found, [f"{', '.join(names)}: {text}" for text, names in shrunk.items()]


def out_by_in(weight: FloatArray, group: LinearGroup) -> FloatArray:
    """A float weight the other way round where the source stores it ``[in, out]``."""
    return np.ascontiguousarray(weight.T) if group.transposed else weight


def sink_of(group: LinearGroup, graph: PortableGraph) -> ScaleSink | None:
    """Where the inverse of an input scale can go: not into a linear of another layer, which is written by itself."""
    sink = group.scale_sink
    if sink is None or sink.kind == "norm":
        return sink
    layer = layer_of(group)
    near = (other for other in graph.groups if layer is not None and layer_of(other) == layer)
    return sink if any(sink.weight in other.members for other in near) else None


def by_layer(graph: PortableGraph) -> list[tuple[str, list[LinearGroup]]]:
    layers: dict[str, list[LinearGroup]] = {}
    for group in graph.groups:
        if group.name != HEAD:
            layer = layer_of(group)
            key = group.name if layer is None else f"layers.{layer}"
            layers.setdefault(key, []).append(group)
    return list(layers.items())


def tables_of(graph: PortableGraph) -> dict[str, str | None]:
    """The embedding and, if it has a table of its own, the head; each with the parameter tied to it."""
    heads = [group.members[0] for group in graph.groups if group.name == HEAD]
    if graph.tied_embeddings:
        return {graph.embedding: "lm_head.weight"}
    return {graph.embedding: None, **dict.fromkeys(heads)}


def head_with(graph: PortableGraph, table: str) -> LinearGroup | None:
    """The head that a table is; None for an embedding of its own."""
    return next((group for group in graph.groups if group.name == HEAD and table in group.members), None)


def planned_formats(graph: PortableGraph, stored: Formats) -> dict[str, Format]:
    linears, tables, _ = formats_of(graph, stored)
    kept = tables_of(graph)
    return {**linears, **{name: fmt for name, fmt in tables.items() if name in kept}}


def formats_of(graph: PortableGraph, stored: Formats) -> tuple[dict[str, Format], dict[str, Format], list[str]]:
    """Formats of linears and of tables by parameter name, and the names of linears left in float."""
    linears: dict[str, Format] = {}
    ignored: list[str] = []
    for group in graph.groups:
        fmt = stored[group.name]
        if group.name == HEAD:
            continue
        if fmt is None:
            ignored.extend(group.members)
        else:
            linears.update(dict.fromkeys(group.members, fmt))
    tables: dict[str, Format] = {}
    for name, tied_to in tables_of(graph).items():
        fmt = stored[EMBEDDING] if name == graph.embedding else stored[HEAD]
        both = [name] if tied_to is None else [name, tied_to]
        if fmt is None:
            ignored.extend(both)
        else:
            tables.update(dict.fromkeys(both, fmt))
    return linears, tables, ignored
