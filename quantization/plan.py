"""Which parameter gets which format: the rules of the recipe, applied to the groups of a graph."""

from __future__ import annotations

from fnmatch import fnmatchcase

from pipeline.errors import QuantizationError
from pipeline.graph import LinearGroup, PortableGraph
from pipeline.recipe import Quantize, Rule
from quantization.rounding import Format, fitting_group_size

EMBEDDING = "embedding"
HEAD = "lm_head"
Plan = dict[str, Format | None]  # by group name, and EMBEDDING; None leaves a group in float


def make_plan(graph: PortableGraph, settings: Quantize) -> tuple[Plan, list[str]]:
    """The format of every group (None: float) and of ``embedding``; notes say where a group size had to shrink."""
    plan: Plan = {}
    shrunk: dict[str, list[str]] = {}

    def fitted(name: str, columns: int, rule: Rule) -> Format | None:
        if rule.bits == 32:
            return None
        if rule.activations == "int8":
            return Format(rule.bits, columns, symmetric=True, activations="int8")
        size = fitting_group_size(rule.group_size, columns)
        if size != rule.group_size:
            text = f"groups of {size} instead of {rule.group_size}, which does not divide {columns} input channels"
            shrunk.setdefault(text, []).append(name)
        return Format(rule.bits, size, rule.symmetric, positive=rule.positive_scales)

    for group in graph.groups:
        rule = settings.embeddings if group.name == HEAD else _matching_rule(group.name, settings)
        plan[group.name] = fitted(group.name, group.in_features, rule)
    plan[EMBEDDING] = fitted(EMBEDDING, graph.hidden_size, settings.embeddings)
    return plan, [f"{', '.join(names)}: {text}" for text, names in shrunk.items()]


def _matching_rule(name: str, settings: Quantize) -> Rule:
    for rule in settings.rules:
        if fnmatchcase(name, rule.match):
            return rule
    raise QuantizationError(
        f"no rule of quantize.rules matches {name}",
        expected="a rule for every group of linears",
        remedy='end the rules with one that matches "*"',
    )


def by_layer(graph: PortableGraph) -> list[tuple[str, list[LinearGroup]]]:
    layers: dict[str, list[LinearGroup]] = {}
    for group in graph.groups:
        if group.name != HEAD:
            key = ".".join(group.name.split(".")[:2]) if group.name.startswith("layers.") else group.name
            layers.setdefault(key, []).append(group)
    return list(layers.items())


def tables_of(graph: PortableGraph) -> dict[str, str | None]:
    """The embedding and, if it has a table of its own, the head; each with the parameter tied to it."""
    heads = [group.members[0] for group in graph.groups if group.name == HEAD]
    if graph.tied_embeddings:
        return {graph.embedding: "lm_head.weight"}
    return {graph.embedding: None, **dict.fromkeys(heads)}


def planned_formats(graph: PortableGraph, plan: Plan) -> dict[str, Format]:
    linears, tables, _ = formats_of(graph, plan)
    stored = set(tables_of(graph))
    return {**linears, **{name: fmt for name, fmt in tables.items() if name in stored}}


def formats_of(graph: PortableGraph, plan: Plan) -> tuple[dict[str, Format], dict[str, Format], list[str]]:
    """Formats of linears and of tables by parameter name, and the names of linears left in float."""
    linears: dict[str, Format] = {}
    ignored: list[str] = []
    for group in graph.groups:
        fmt = plan[group.name]
        if group.name == HEAD:
            continue
        if fmt is None:
            ignored.extend(group.members)
        else:
            linears.update(dict.fromkeys(group.members, fmt))
    tables: dict[str, Format] = {}
    for name, tied_to in tables_of(graph).items():
        fmt = plan[EMBEDDING] if name == graph.embedding else plan[HEAD]
        both = [name] if tied_to is None else [name, tied_to]
        if fmt is None:
            ignored.extend(both)
        else:
            tables.update(dict.fromkeys(both, fmt))
    return linears, tables, ignored
