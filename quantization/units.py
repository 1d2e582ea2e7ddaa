"""Which tensor gets which scheme: units of linears, what each may get, and the scheme of every group of a graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from quantization.plan import EMBEDDINGS
from tapeout.errors import QuantizationError, RecipeError
from tapeout.formats import formats
from tapeout.number_format import FloatArray
from tapeout.operators import operators, rate_in
from tapeout.operators.experts import UNITS
from tapeout.portable_graph import FoldTarget, LinearGroup, PortableGraph
from tapeout.recipe import Cache, Embeddings, KVCache, Plan, Rule
from tapeout.schemes import CANDIDATE_SCHEMES, EMBEDDING_CANDIDATES, FLOAT, SMALLEST_GROUP, Scheme

EMBEDDING = "embedding"
HEAD = "lm_head"
ATTENTION_INPUTS = "qkv"
CACHE_CANDIDATES = (KVCache(dtype="float32"), KVCache(dtype="int8"), KVCache(dtype="int4"))  # of the CPU
ALL_CACHES = (*CACHE_CANDIDATES, KVCache(dtype="fp8"))
Schemes = dict[str, Scheme]  # by group name, and EMBEDDING; fitted


@dataclass(frozen=True)
class Candidates:
    """What a plan chooses from, as its target has kernels.

    Schemes of linears, how keys and values are kept, and the state of recurrences. ``int8_inputs``: of linears over
    integer codes, which kernels then round by token and block.
    """

    schemes: tuple[Scheme, ...] = CANDIDATE_SCHEMES
    caches: tuple[KVCache, ...] = CACHE_CANDIDATES
    int8_inputs: bool = True
    states: tuple[str, ...] = ("float32", "bfloat16")


ALL_CANDIDATES = Candidates()


@dataclass(frozen=True)
class Unit:
    """Groups of one kind and shape in neighbouring layers, which take one scheme: ``layers.5-9.gate_up``."""

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


def planned_units(wanted: Plan, graph: PortableGraph) -> tuple[Unit, ...]:
    """What a plan chooses schemes for."""
    return units_of(graph, wanted.layers_per_group, experts_apart=wanted.experts == "per_expert")


def units_of(graph: PortableGraph, layers_per_group: int, *, experts_apart: bool = False) -> tuple[Unit, ...]:
    """Every linear but the head, in units of at most ``layers_per_group`` layers.

    ``experts_apart``: experts in units of one layer, as those of another layer are other experts.
    """
    found: dict[tuple[int, str, tuple[int, ...]], list[LinearGroup]] = {}
    for group in graph.groups:
        if group.name != HEAD:
            layer = layer_of(group)
            layers = 1 if group.experts and experts_apart else layers_per_group
            key = (
                -1 if layer is None else layer // layers,
                kind_of(group),
                _shape(group),
            )
            found.setdefault(key, []).append(group)
    return tuple(unit_of(run) for groups in found.values() for run in _runs(groups))


def _shape(group: LinearGroup) -> tuple[int, ...]:
    return (group.experts, group.in_features, *group.out_features)


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


def written_units(graph: PortableGraph, schemes: Mapping[str, Scheme]) -> tuple[Unit, ...]:
    """Every linear but the head, in units as large as a plan that is written out has them."""
    found: dict[tuple[Scheme, str, tuple[int, ...]], list[LinearGroup]] = {}
    for group in graph.groups:
        if group.name != HEAD:
            key = (schemes[group.name], kind_of(group), _shape(group))
            found.setdefault(key, []).append(group)
    return tuple(unit_of(run) for groups in found.values() for run in _runs(groups))


def candidates_for(columns: int, candidate_schemes: Sequence[Scheme] = CANDIDATE_SCHEMES) -> tuple[Scheme, ...]:
    """The candidate schemes that weights of ``columns`` inputs can have, fitted to them, each once."""
    fitting = [scheme for scheme in candidate_schemes if scheme.group_size is None or columns % SMALLEST_GROUP == 0]
    return tuple(dict.fromkeys(scheme.fitted(columns) for scheme in fitting))


def candidates_of(group: LinearGroup, candidates: Candidates = ALL_CANDIDATES) -> tuple[Scheme, ...]:
    """What the planner may choose of ``candidates`` for a group of linears or experts, fitted to it.

    Rates of a recurrence stay in float; inputs of experts have no static grid.
    """
    if rate_in(group.name):
        return (FLOAT,)
    possible = [scheme for scheme in candidates.schemes if scheme.activations == "float" or not group.experts]
    return candidates_for(group.in_features, possible)


def embedding_schemes(wanted: Embeddings, columns: int) -> tuple[Scheme, ...]:
    """What the embedding and lm_head, of ``columns`` channels, may get: its candidates, or the one that is written."""
    return candidates_for(columns, EMBEDDING_CANDIDATES) if wanted == "auto" else (wanted.fitted(columns),)


def caches(wanted: Cache, graph: PortableGraph, candidates: Candidates = ALL_CANDIDATES) -> tuple[KVCache, ...]:
    """How keys and values may be kept: any of the candidates, or as it is written. A byte holds two codes of 4 bits.

    Of a model that keeps none there is nothing to choose.
    """
    if wanted != "auto":
        return (wanted,)
    if not graph.cached_layers:
        return (KVCache(dtype="float32"),)
    odd = any(size % 2 for size in (graph.head_size, graph.value_size))
    return tuple(cache for cache in candidates.caches if cache.dtype != "int4" or not odd)


def resolve(graph: PortableGraph, rules: Sequence[Rule]) -> dict[str, Scheme]:
    """The scheme that the rules give every group but the head, as written: the first that matches decides.

    Rates of a recurrence stay in float unless a rule names them, as ``layers.*.delta_rates`` does.
    """

    def matching(name: str, experts: int, expert: int = 0) -> Scheme:
        for rule in rules:
            if _matches(rule, name) and (not rule.experts or (experts and expert in rule.experts)):
                if experts and rule.scheme != FLOAT and rule.scheme.group_size is None:
                    raise QuantizationError(
                        f"rule {rule.match!r} of plan.schemes gives {name} {rule.scheme.name}",
                        expected="codes in groups, or float: no kernel of experts takes one scale per output channel",
                        remedy='add a rule that matches "layers.*.experts_*" before it',
                    )
                return rule.scheme
        if rate_in(name):
            return FLOAT
        raise QuantizationError(
            f"no rule of plan.schemes matches {name}",
            expected="a rule for every group of linears",
            remedy='end the rules with one that matches "*"',
        )

    groups = {group.name: group for group in graph.groups if group.name != HEAD}
    units = {
        "gate_up",
        "down",
        *UNITS.values(),
        *(unit for operator in operators().values() for unit in (operator.before, operator.after, operator.rates)),
    } - {""}
    _require_used(rules, {*groups, *(f"layers.{n}.{unit}" for n in range(graph.layers) for unit in units)})
    _require_experts(rules, groups.values())
    return {
        name: _one_scheme(name, [matching(name, group.experts, expert) for expert in range(max(1, group.experts))])
        for name, group in groups.items()
    }


def _one_scheme(name: str, schemes: Sequence[Scheme]) -> Scheme:
    """Of a group whose experts have these."""
    found = Scheme.of_experts(schemes)
    if found is None:
        raise QuantizationError(
            f"rules of plan.schemes give experts of {name} {' and '.join(sorted({s.name for s in schemes}))}",
            expected="experts of one layer that differ in bits alone, all of them integers in the same groups",
            remedy="give these rules one group_size, symmetric and positive_scales, and no bits: 32",
        )
    return found


def _matches(rule: Rule, name: str) -> bool:
    return fnmatchcase(name, rule.match) and rate_in(name) in ("", rate_in(rule.match))


def _require_used(rules: Sequence[Rule], names: Collection[str]) -> None:
    """Refuse a rule that matches nothing, or only what rules before it match. A last ``*`` may be left over.

    ``names``: also of units that a decoder can have and this one has not, so that one recipe fits several models.
    """
    for number, rule in enumerate(rules):
        mine = [name for name in names if _matches(rule, name)]
        before = [other.match for other in rules[:number]]
        hidden = [name for name in mine if any(_hides(other, rule, name) for other in rules[:number])]
        if rule.match != "*" and len(hidden) == len(mine):
            raise RecipeError(
                f"rule {rule.match!r} of plan.schemes "
                + (f"is never used: {', '.join(map(repr, before))} match first" if mine else "matches no unit"),
                expected=f"a glob over units such as {', '.join(sorted(names)[:5])}",
                remedy="correct the glob, remove the rule, or move it before the rules that match first",
            )


def _hides(before: Rule, rule: Rule, name: str) -> bool:
    return _matches(before, name) and (not before.experts or set(before.experts).issuperset(rule.experts or (-1,)))


def _require_experts(rules: Sequence[Rule], groups: Collection[LinearGroup]) -> None:
    """Refuse a rule that names experts that no group has that it matches."""
    for rule in rules:
        counts = [group.experts for group in groups if _matches(rule, group.name)]
        if rule.experts and counts and max(rule.experts) >= min(counts):
            raise RecipeError(
                f"rule {rule.match!r} of plan.schemes names expert {max(rule.experts)}",
                expected=f"experts up to {min(counts) - 1}" if min(counts) else "a glob over experts of mixtures alone",
                remedy='correct plan.schemes[].experts, or let it match "layers.*.experts_*"',
            )


def fitted_schemes(
    graph: PortableGraph, schemes: Mapping[str, Scheme], embeddings: Scheme
) -> tuple[Schemes, list[str]]:
    """The scheme of every group and of ``embedding``; notes say where a group size had to shrink."""
    found: Schemes = {}
    shrunk: dict[str, list[str]] = {}
    columns = {group.name: group.in_features for group in graph.groups} | {EMBEDDING: graph.hidden_size}
    for name, width in columns.items():
        wanted = embeddings if name in (HEAD, EMBEDDING) else schemes[name]
        found[name] = wanted.fitted(width)
        if found[name] != wanted:
            text = f"groups of {found[name].group_size} instead of {wanted.group_size}, which does not divide {width}"
            shrunk.setdefault(f"{text} inputs", []).append(name)
    return found, [f"{', '.join(names)}: {text}" for text, names in shrunk.items()]


def out_by_in(weight: FloatArray, group: LinearGroup) -> FloatArray:
    """A float weight ``[..., out, in]``, transposed where the source stores it ``[..., in, out]``; or back again."""
    return np.ascontiguousarray(weight.swapaxes(-1, -2)) if group.transposed else weight


def fold_target_of(
    group: LinearGroup, graph: PortableGraph, stored: Mapping[str, Scheme] | None = None
) -> FoldTarget | None:
    """Where the inverse of an input scale can go: not into a linear of another layer, which is written by itself.

    ``stored``: schemes by group. A linear whose scales cannot be divided takes none either.
    """
    fold_target = group.fold_target
    if fold_target is None or fold_target.kind == "norm":
        return fold_target
    layer = layer_of(group)
    near = (other for other in graph.groups if layer is not None and layer_of(other) == layer)
    producer = next((other for other in near if fold_target.weight in other.members), None)
    if producer is None:
        return None
    scheme = FLOAT if stored is None else stored[producer.name]
    return fold_target if formats()[scheme.format].divisible else None


def by_layer(graph: PortableGraph) -> list[tuple[str, list[LinearGroup]]]:
    layers: dict[str, list[LinearGroup]] = {}
    for group in graph.groups:
        if group.name != HEAD:
            layer = layer_of(group)
            key = group.name if layer is None else f"layers.{layer}"
            layers.setdefault(key, []).append(group)
    return list(layers.items())


def embeddings_of(graph: PortableGraph) -> dict[str, str | None]:
    """The embedding and, if it is not tied, lm_head; each with the parameter that is tied to it."""
    heads = [group.members[0] for group in graph.groups if group.name == HEAD]
    if graph.tied_embeddings:
        return {graph.embedding: "lm_head.weight"}
    return {graph.embedding: None, **dict.fromkeys(heads)}


def head_with(graph: PortableGraph, name: str) -> LinearGroup | None:
    """The head whose weight this parameter is; None for an embedding that is not tied."""
    return next((group for group in graph.groups if group.name == HEAD and name in group.members), None)


def embedding_scheme(graph: PortableGraph, stored: Schemes, name: str) -> Scheme:
    """Of the embedding or of lm_head."""
    return stored[EMBEDDING] if name == graph.embedding else stored[HEAD]


def stored_schemes(graph: PortableGraph, stored: Schemes) -> tuple[Schemes, Schemes]:
    """Of linears, and of the embedding and lm_head, by parameter name. Tied parameters are both there."""
    linears = {name: stored[group.name] for group in graph.groups if group.name != HEAD for name in group.members}
    embeddings: Schemes = {}
    for name, tied_to in embeddings_of(graph).items():
        both = [name] if tied_to is None else [name, tied_to]
        embeddings.update(dict.fromkeys(both, embedding_scheme(graph, stored, name)))
    return linears, embeddings


def quantized_ones(schemes: Schemes) -> Schemes:
    return {name: scheme for name, scheme in schemes.items() if scheme != FLOAT}


@dataclass(frozen=True)
class UnitCandidates:
    """What each unit may get: linears by the unit's name, the embeddings, and the KV cache.

    ``int8_inputs``: see :class:`Candidates`.
    """

    units: Mapping[str, Unit]
    schemes: Mapping[str, tuple[Scheme, ...]]  # of units and of the embeddings
    caches: tuple[KVCache, ...]
    int8_inputs: bool

    @classmethod
    def of(cls, wanted: Plan, graph: PortableGraph, candidates: Candidates) -> UnitCandidates:
        units = {unit.name: unit for unit in planned_units(wanted, graph)}
        schemes = {name: candidates_of(unit.groups[0], candidates) for name, unit in units.items()}
        embeddings = embedding_schemes(wanted.embeddings, graph.hidden_size)
        kept = caches(wanted.kv_cache, graph, candidates)
        return cls(units, schemes | {EMBEDDINGS: embeddings}, kept, candidates.int8_inputs)

    def scheme(self, unit: str, name: str) -> Scheme:
        return next(scheme for scheme in self.schemes[unit] if scheme.name == name)

    def cache(self, name: str) -> KVCache:
        return next(cache for cache in self.caches if cache.name == name)
