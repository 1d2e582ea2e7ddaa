"""Which linears share an input, and what each is for.

The dataflow decides, not a table of architectures: a linear whose output reaches an attention node is part of
``qkv``; one that reads an attention output is ``o`` (other operators have names of their own); one whose input comes
from a single other group is ``down``, and that group is ``gate_up``, unless it gates what an operator gave, or says
how fast the state of one decays. The weights of experts are an operator's own, and
groups by themselves. Only layer numbers come from parameter names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator

import onnx_ir as ir

from tapeout.errors import ExportError
from tapeout.graph_analysis.dataflow import (
    Dependent,
    ahead_of,
    along_channels,
    first_reached,
    input_sources,
    is_operator,
)
from tapeout.graph_analysis.fold_targets import find_fold_target
from tapeout.graph_analysis.linears import Linear, find_linears, is_parameter, size
from tapeout.operators import operator_of
from tapeout.operators.attention import is_attention
from tapeout.operators.experts import UNITS, is_experts
from tapeout.operators.operator import Operator
from tapeout.portable_graph import LinearGroup


def find_quantizable(graph: ir.Graph, dependent: Dependent | None = None) -> list[Linear]:
    """Linears but those that an operator reads in float, such as routers of experts, and those of one output channel.

    One channel is a gate of all others, such as that of shared experts: a few bytes, and an error of all that it gates.
    """
    dependent = dependent or Dependent(graph)
    linears = [linear for linear in find_linears(graph) if linear.shape[0] > 1]
    read = [(linear, operator_of(first_reached(linear.output, is_operator, dependent))) for linear in linears]
    return [linear for linear, operator in read if operator is None or operator.before]


def find_groups(model: ir.Model, aliases: dict[str, str]) -> tuple[LinearGroup, ...]:
    """All linears and experts that can be quantized, in groups (see :class:`LinearGroup`), in graph order.

    ``aliases`` maps tied parameters to the name both are stored under, which is the one the graph carries.
    """
    graph = model.graph
    dependent = Dependent(graph)
    linears = find_quantizable(graph, dependent)
    by_output = {id(linear.output): linear for linear in linears}
    by_matmul = {id(linear.matmul): linear for linear in linears}
    units = {id(linear): _unit(linear, by_output, by_matmul, graph, dependent) for linear in linears}
    experts = list(experts_groups(graph))
    _require_own_weights([linear.name for linear in linears] + [name for _, group in experts for name in group.members])
    _require_one_head([linear for linear in linears if units[id(linear)] == "lm_head"])
    # The group before a "down" is "gate_up": known only once the downs are.
    feeding = {
        id(source)
        for linear in linears
        if units[id(linear)] == "down"
        for source in input_sources(linear.input, by_output)
        if isinstance(source, Linear)
    }
    for linear in linears:
        if id(linear) in feeding and units[id(linear)] is None:
            units[id(linear)] = "gate_up"

    gathered: dict[str, list[Linear]] = {}
    first = dict[tuple[str, int], str]()  # by unit and input, the group of the linear that came first
    for linear in linears:
        unit = _group_name(linear, units[id(linear)])
        name = first.setdefault((unit, id(linear.input)), _unused(unit, linear, gathered))
        gathered.setdefault(name, []).append(linear)
    found = [
        (
            members[0].matmul,
            LinearGroup(
                name=name,
                members=tuple(linear.name for linear in members),
                biases=tuple(linear.bias.name if linear.bias is not None else None for linear in members),
                in_features=members[0].shape[1],
                out_features=tuple(linear.shape[0] for linear in members),
                # a tied head's columns are the embedding's too, so no scale may be folded into them
                fold_target=None
                if any(m.name in aliases.values() for m in members)
                else find_fold_target(members, by_output),
                transposed=members[0].transposed,
                gated=rows if any(rows := tuple(_gated_rows(linear, dependent) for linear in members)) else (),
            ),
        )
        for name, members in gathered.items()
    ]
    order = {id(node): number for number, node in enumerate(graph)}
    return tuple(group for _, group in sorted([*found, *experts], key=lambda pair: order[id(pair[0])]))


def experts_groups(graph: ir.Graph) -> Iterator[tuple[ir.Node, LinearGroup]]:
    """The projections of every node of experts, as far as they are parameters, stored as they are or transposed."""
    names = Counter[str]()
    for node in filter(is_experts, graph):
        for number, unit in UNITS.items():
            weight, bias = node.inputs[number], node.inputs[number + 2]
            step = None if weight is None else weight.producer()
            transposed = step is not None and step.op_type == "Transpose"
            if transposed:
                assert step is not None
                weight = step.inputs[0]
            if weight is None or not is_parameter(weight):
                continue
            experts, *sizes = (size(weight, axis) for axis in range(3))
            outputs, inputs = reversed(sizes) if transposed else sizes
            layer = re.search(r"\.(\d+)\.", weight.name or "")
            name = f"layers.{layer.group(1)}.{unit}" if layer else unit
            names[name] += 1
            yield (
                node,
                LinearGroup(
                    name=name if names[name] == 1 else f"{name}.{names[name]}",
                    members=(weight.name or "",),
                    biases=(bias.name if is_parameter(bias) and bias is not None else None,),
                    in_features=inputs,
                    out_features=(outputs,),
                    transposed=transposed,
                    experts=experts,
                    chosen=size(node.inputs[1], 1),
                ),
            )


def _require_own_weights(names: list[str]) -> None:
    """A weight has one input statistic and one scheme, so one linear may read it."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ExportError(
                f"{count} linears read {name}",
                expected="a weight of its own for each linear",
                remedy="choose a decoder whose layers share no weights",
            )


def _require_one_head(heads: list[Linear]) -> None:
    if len(heads) != 1:
        raise ExportError(
            f"{len(heads)} linears compute the logits ({', '.join(head.name for head in heads) or 'none'})",
            expected="one: lm_head",
            remedy="choose a decoder whose logits are the output of one linear",
        )


def _unit(
    linear: Linear, by_output: dict[int, Linear], by_matmul: dict[int, Linear], graph: ir.Graph, dependent: Dependent
) -> str | None:
    logits = graph.outputs[0]
    if linear.output is logits or first_reached(linear.output, lambda node: logits in node.outputs, dependent):
        return "lm_head"
    if read := operator_of(first_reached(linear.output, is_operator, dependent)):
        return read.rates if _only_rates(linear, read, dependent) else read.before
    if rates := _rates_behind(linear, by_matmul, dependent):
        return rates
    sources = list(input_sources(linear.input, by_output))
    written = [operator.after for source in sources if isinstance(source, ir.Node) if (operator := operator_of(source))]
    if named := next(filter(None, written), None):
        return named
    inputs = {id(source.input) for source in sources if isinstance(source, Linear)}
    if _gates_operator(linear, by_output, by_matmul, dependent):
        return None
    if sources and len(inputs) == 1 and all(isinstance(source, Linear) for source in sources):
        return "down"
    return None


def _group_name(linear: Linear, unit: str | None) -> str:
    if unit == "lm_head":
        return "lm_head"
    layer = re.search(r"\.(\d+)\.", linear.name)
    unit = unit or _stem(linear.name)
    return f"layers.{layer.group(1)}.{unit}" if layer else unit


def _unused(unit: str, linear: Linear, names: Container[str]) -> str:
    """The unit's name; with the end of the parameter's where it is taken, and as much of that as tells groups apart."""
    if unit not in names:
        return unit
    *before, stem = linear.name.removesuffix(".weight").split(".")
    while f"{unit}.{stem}" in names:
        *before, part = before
        stem = f"{part}.{stem}"
    return f"{unit}.{stem}"


def _stem(parameter: str) -> str:
    return parameter.removesuffix(".weight").rpartition(".")[2]


def _only_rates(linear: Linear, operator: Operator, dependent: Dependent) -> bool:
    """Whether a linear only says how fast a state decays and takes in tokens (``Operator.rates``)."""
    read = [(node, number) for node, number in ahead_of(linear.output, dependent) if is_operator(node)]
    numbers = {number for node, number in read if operator_of(node) is operator}
    values = {0}  # a rate may multiply them, as a time step does
    return all(operator_of(node) is operator for node, _ in read) and (
        bool(numbers & operator.rate_inputs) and numbers <= operator.rate_inputs | values
    )


def _rates_behind(linear: Linear, by_matmul: dict[int, Linear], dependent: Dependent) -> str:
    """What rates are called, where a linear is read by linears alone that are such: the first half of a low rank."""
    found = set[str]()
    for node, _ in ahead_of(linear.output, dependent):
        if dependent.is_residual_sum(node):
            return ""
        if node.op_type in ("MatMul", "Gemm"):
            behind = by_matmul.get(id(node))
            read = operator_of(first_reached(behind.output, is_operator, dependent)) if behind is not None else None
            rates = behind is not None and read is not None and _only_rates(behind, read, dependent)
            found.add(read.rates if read is not None and rates else "")
    return found.pop() if len(found) == 1 else ""


def _gates_operator(
    linear: Linear, by_output: dict[int, Linear], by_matmul: dict[int, Linear], dependent: Dependent
) -> bool:
    """Whether a linear is read with what an operator gave, with no residual sum between."""
    behind = (by_matmul.get(id(node)) for node, _ in ahead_of(linear.output, dependent))
    sources = (source for each in behind if each is not None for source in input_sources(each.input, by_output))
    operators = (operator_of(source) for source in sources if isinstance(source, ir.Node))
    return any(operator is not None and operator.after for operator in operators)


def _gated_rows(linear: Linear, dependent: Dependent) -> int:
    """How many rows of a query alternate with as many of a gate, as they do where a query's projection holds both."""
    reshape = next((node for node, _ in linear.output.uses() if node.op_type == "Reshape"), None)
    split = next((node for node, _ in reshape.outputs[0].uses() if node.op_type == "Split"), None) if reshape else None
    if split is None or len(split.outputs) != 2 or not along_channels(split):
        return 0
    query, gate = split.outputs
    read = [number for node, number in ahead_of(query, dependent) if is_attention(node)]
    beside = any(is_operator(node) for node, _ in ahead_of(gate, dependent))
    return size(query, -1) if read == [0] and not beside and size(query, -1) == size(gate, -1) else 0
