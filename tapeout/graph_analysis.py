"""Read from the graph which linears share an input, what each is for, and what can absorb their input scales.

The dataflow decides, not a table of architectures: a linear whose output reaches an attention node is part of
``qkv``; one that reads an attention output is ``o`` (other operators have names of their own); one whose input comes
from a single other group is ``down``, and that group is ``gate_up``. The weights of experts are an operator's own, and
groups by themselves. Only layer numbers come from parameter names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from tapeout.errors import ExportError
from tapeout.operators import operator_of
from tapeout.operators.attention import is_attention
from tapeout.operators.experts import UNITS, is_experts
from tapeout.operators.operator import Operator
from tapeout.portable_graph import FoldTarget, LinearGroup

NORMS = ("RMSNormalization", "LayerNormalization")


@dataclass(frozen=True)
class Linear:
    """A matmul with a parameter, and the bias added to it, if any."""

    matmul: ir.Node
    weight: ir.Value  # [out, in], or [in, out] where ``transposed``
    bias: ir.Value | None
    output: ir.Value  # after the bias
    transposed: bool

    @property
    def input(self) -> ir.Value:
        value = self.matmul.inputs[0]
        assert value is not None
        return value

    @property
    def name(self) -> str:
        assert self.weight.name is not None
        return self.weight.name

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        first, second = size(self.weight, 0), size(self.weight, 1)
        return (second, first) if self.transposed else (first, second)


def size(value: ir.Value | None, axis: int) -> int:
    """A dimension that is a number, not a symbol such as ``batch``."""
    assert value is not None and value.shape is not None
    dimension = value.shape[axis]
    assert isinstance(dimension, int), f"{value.name} has {dimension} on axis {axis}"
    return dimension


def is_operator(node: ir.Node | None) -> bool:
    """Whether a node is an operator of ours (``tapeout/operators``)."""
    return operator_of(node) is not None


def is_parameter(value: ir.Value | None) -> bool:
    """An initializer that has a checkpoint name, not a constant of the graph."""
    return value is not None and value.is_initializer() and "." in (value.name or "")


def find_linears(graph: ir.Graph) -> list[Linear]:
    """Every matmul with a parameter, in graph order, with an ``Add`` of its bias, a vector parameter of that name.

    ``MatMul(x, Transpose(weight))`` over ``[out, in]``, or ``MatMul(x, weight)`` over ``[in, out]``.
    """
    linears: list[Linear] = []
    for node in graph:
        if node.op_type != "MatMul" or node.inputs[1] is None:
            continue
        transpose = node.inputs[1].producer()
        transposed = transpose is None
        weight = node.inputs[1] if transpose is None else transpose.inputs[0]
        if not is_parameter(weight) or (transpose is not None and transpose.op_type != "Transpose"):
            continue
        assert weight is not None
        bias, output = _bias(node.outputs[0])
        linears.append(Linear(node, weight, bias, output, transposed))
    return linears


def find_quantizable(graph: ir.Graph, dependent: Dependent | None = None) -> list[Linear]:
    """Linears but those that an operator reads in float, such as routers of experts, and those of one output channel.

    One channel is a gate of all others, such as that of shared experts: a few bytes, and an error of all that it gates.
    """
    dependent = dependent or Dependent(graph)
    linears = [linear for linear in find_linears(graph) if linear.shape[0] > 1]
    read = [(linear, operator_of(_reached(linear.output, is_operator, dependent))) for linear in linears]
    return [linear for linear, operator in read if operator is None or operator.before]


def _bias(output: ir.Value) -> tuple[ir.Value | None, ir.Value]:
    uses = list(output.uses())
    if len(uses) == 1 and uses[0].node.op_type == "Add":
        add = uses[0].node
        other = add.inputs[1 - uses[0].idx]
        assert other is not None
        # Others are added outside of the linear, such as the dt_bias of a recurrence.
        named = is_parameter(other) and (other.name or "").rpartition(".")[2] == "bias"
        if named and other.shape is not None and len(other.shape) == 1:
            return other, add.outputs[0]
    return None, output


def find_rotary(model: ir.Model) -> Literal["half", "interleaved", "none"]:
    """How the rotary embedding pairs key channels, or ``none`` if the model has no rotary embedding.

    A RotaryEmbedding node has it as an attribute. Where the exporter left the arithmetic, ``x·cos + rotate(x)·sin``,
    the negated part of the key shows it: every other channel, or one half of the channels. Where it is written as a
    complex product, the difference and the sum are concatenated as halves, or stacked as pairs.
    """
    for node in model.graph:
        if node.op_type == "RotaryEmbedding":
            attribute = node.attributes.get("interleaved")
            return "interleaved" if attribute is not None and attribute.as_int() else "half"
    projected = {id(linear.output) for linear in find_linears(model.graph)}
    for node in model.graph:
        if not is_attention(node) or node.inputs[1] is None:
            continue
        for step in _before(node.inputs[1], projected):
            part = step.inputs[0].producer() if step.op_type == "Neg" and step.inputs[0] is not None else None
            if part is not None and part.op_type in ("Slice", "Split"):
                return "interleaved" if _stride(part) == 2 else "half"
            if step.op_type == "Concat":
                parts = [value.producer() for value in step.inputs if value is not None]
                stacked = all(p is not None and p.op_type == "Unsqueeze" for p in parts)
                before = [p.inputs[0].producer() if stacked and p and p.inputs[0] else p for p in parts]
                if [p.op_type for p in before if p is not None] == ["Sub", "Add"]:
                    return "interleaved" if stacked else "half"
    return "none"


def _before(value: ir.Value, projected: set[int]) -> Iterator[ir.Node]:
    """The nodes between the outputs of linears (``projected``) and ``value``, nearest first."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        node = current.producer()
        if id(current) in projected or node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        stack.extend(_data_inputs(node))


def _stride(node: ir.Node) -> int:
    """The step of a Slice along one axis; 1 for a Split."""
    steps = node.inputs[4] if node.op_type == "Slice" and len(node.inputs) > 4 else None
    return 1 if steps is None or steps.const_value is None else int(steps.const_value.numpy().reshape(-1)[0])


def find_groups(model: ir.Model, aliases: dict[str, str]) -> tuple[LinearGroup, ...]:
    """All linears and experts that can be quantized, in groups (see :class:`LinearGroup`), in graph order.

    ``aliases`` maps tied parameters to the name both are stored under, which is the one the graph carries.
    """
    graph = model.graph
    dependent = Dependent(graph)
    linears = find_quantizable(graph, dependent)
    by_output = {id(linear.output): linear for linear in linears}
    units = {id(linear): _unit(linear, by_output, graph, dependent) for linear in linears}
    experts = list(experts_groups(graph))
    _require_own_weights([linear.name for linear in linears] + [name for _, group in experts for name in group.members])
    _require_one_head([linear for linear in linears if units[id(linear)] == "lm_head"])
    # The group before a "down" is "gate_up": known only once the downs are.
    feeding = {
        id(source)
        for linear in linears
        if units[id(linear)] == "down"
        for source in _sources(linear.input, by_output)
        if isinstance(source, Linear)
    }
    for linear in linears:
        if id(linear) in feeding and units[id(linear)] is None:
            units[id(linear)] = "gate_up"

    gathered: dict[str, list[Linear]] = {}
    for linear in linears:
        name = _group_name(linear, units[id(linear)])
        same = gathered.setdefault(name, [])
        if same and same[0].input is not linear.input:
            name = f"{name}.{_stem(linear.name)}"
            same = gathered.setdefault(name, [])
        same.append(linear)
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
                else _fold_target(members, by_output),
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


def _unit(linear: Linear, by_output: dict[int, Linear], graph: ir.Graph, dependent: Dependent) -> str | None:
    logits = graph.outputs[0]
    if linear.output is logits or _reached(linear.output, lambda node: logits in node.outputs, dependent):
        return "lm_head"
    if read := operator_of(_reached(linear.output, is_operator, dependent)):
        return read.rates if _only_rates(linear, read, dependent) else read.before
    sources = list(_sources(linear.input, by_output))
    written = [operator.after for source in sources if isinstance(source, ir.Node) if (operator := operator_of(source))]
    if named := next(filter(None, written), None):
        return named
    inputs = {id(source.input) for source in sources if isinstance(source, Linear)}
    if sources and len(inputs) == 1 and all(isinstance(source, Linear) for source in sources):
        return "down"
    return None


def _group_name(linear: Linear, unit: str | None) -> str:
    if unit == "lm_head":
        return "lm_head"
    layer = re.search(r"\.(\d+)\.", linear.name)
    unit = unit or _stem(linear.name)
    return f"layers.{layer.group(1)}.{unit}" if layer else unit


def _stem(parameter: str) -> str:
    return parameter.removesuffix(".weight").rpartition(".")[2]


def _only_rates(linear: Linear, operator: Operator, dependent: Dependent) -> bool:
    """Whether a linear only says how fast a state decays and takes in tokens (``Operator.rates``)."""
    read = [(node, number) for node, number in _ahead(linear.output, dependent) if is_operator(node)]
    numbers = {number for node, number in read if operator_of(node) is operator}
    values = {0}  # a rate may multiply them, as a time step does
    return all(operator_of(node) is operator for node, _ in read) and (
        bool(numbers & operator.rate_inputs) and numbers <= operator.rate_inputs | values
    )


def _reached(value: ir.Value, found: Callable[[ir.Node], bool], dependent: Dependent) -> ir.Node | None:
    """A node for which ``found`` holds and that follows ``value`` with no matmul, operator or residual sum between."""
    return next((node for node, _ in _ahead(value, dependent) if found(node)), None)


def _ahead(value: ir.Value, dependent: Dependent) -> Iterator[tuple[ir.Node, int]]:
    """What reads ``value``, and what is computed from it up to the next matmul, operator or residual sum; and as which
    input.
    """
    seen: set[int] = set()
    stack = [value]
    while stack:
        for node, number in stack.pop().uses():
            yield node, number
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node.op_type in ("MatMul", "Gemm") or is_operator(node) or dependent.is_residual_sum(node):
                continue
            stack.extend(node.outputs)


class Dependent:
    """Which values of a graph depend on the tokens, and which on their positions alone."""

    def __init__(self, graph: ir.Graph) -> None:
        inputs = {value.name: value for value in graph.inputs}
        self.on_tokens = _dependent(inputs.get("input_ids"))
        self.on_positions = _dependent(inputs.get("position_ids")) - self.on_tokens

    def is_residual_sum(self, node: ir.Node) -> bool:
        """A sum of two values that depend on the tokens, but not the ``x·cos + rotate(x)·sin`` of a rotary embedding.

        Only a rotary embedding multiplies both sides by values of the positions alone. A bias, an epsilon or a table
        of positions does not depend on the tokens. A scaled residual does, whatever it is multiplied by.
        """
        return (
            node.op_type == "Add"
            and all(id(value) in self.on_tokens for value in node.inputs)
            and not all(self._is_turned(value) for value in node.inputs)
        )

    def _is_turned(self, value: ir.Value | None) -> bool:
        producer = value.producer() if value is not None else None
        return (
            producer is not None
            and producer.op_type == "Mul"
            and any(id(factor) in self.on_positions for factor in producer.inputs)
        )


def _dependent(value: ir.Value | None) -> set[int]:
    """The ids of ``value`` and of all that is computed from it."""
    seen: set[int] = set()
    stack = [value] if value is not None else []
    while stack:
        current = stack.pop()
        if id(current) not in seen:
            seen.add(id(current))
            stack.extend(output for node, _ in current.uses() for output in node.outputs)
    return seen


def _gated_rows(linear: Linear, dependent: Dependent) -> int:
    """How many rows of a query alternate with as many of a gate, as they do where a query's projection holds both."""
    reshape = next((node for node, _ in linear.output.uses() if node.op_type == "Reshape"), None)
    split = next((node for node, _ in reshape.outputs[0].uses() if node.op_type == "Split"), None) if reshape else None
    if split is None or len(split.outputs) != 2 or not _along_channels(split):
        return 0
    query, gate = split.outputs
    read = [number for node, number in _ahead(query, dependent) if is_attention(node)]
    beside = any(is_operator(node) for node, _ in _ahead(gate, dependent))
    return size(query, -1) if read == [0] and not beside and size(query, -1) == size(gate, -1) else 0


def _sources(value: ir.Value, by_output: dict[int, Linear]) -> Iterator[Linear | ir.Node | None]:
    """Where a linear's input comes from: linears, operators, or None for the embedding or the residual stream."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        linear = by_output.get(id(current))
        if linear is not None:
            yield linear
            continue
        node = current.producer()
        if is_operator(node):
            assert node is not None
            yield node
        elif node is None or node.op_type == "Gather":
            if not current.is_initializer():
                yield None
        else:
            stack.extend(i for i in _data_inputs(node) if not i.is_initializer())


def _data_inputs(node: ir.Node) -> Iterable[ir.Value]:
    """The inputs that carry activations: not shapes, axes or rotary tables."""
    first_only = ("Reshape", "Transpose", "Slice", "Split", "RotaryEmbedding", "Unsqueeze", "Squeeze", *NORMS)
    inputs = node.inputs[:1] if node.op_type in first_only else node.inputs
    return [value for value in inputs if value is not None]


def _fold_target(members: list[Linear], by_output: dict[int, Linear]) -> FoldTarget | None:
    value = members[0].input
    producer = value.producer()
    if producer is None or not _only_feeds(value, members):
        return None
    if producer.op_type in NORMS:
        return _norm_target(producer)
    if producer.op_type == "Mul":
        for operand in producer.inputs:
            if operand is not None and len(list(operand.uses())) == 1:
                fold_target = _linear_target(operand, by_output)
                if fold_target is not None:
                    return fold_target
        return None
    return _value_target(value, members, by_output)


def _only_feeds(value: ir.Value, members: list[Linear]) -> bool:
    matmuls = {id(linear.matmul) for linear in members}
    return all(id(use.node) in matmuls for use in value.uses())


def _norm_target(norm: ir.Node) -> FoldTarget | None:
    weight, bias, offset = norm.inputs[1], norm.inputs[2] if len(norm.inputs) > 2 else None, 0.0
    if weight is not None and not is_parameter(weight):
        add = weight.producer()
        if add is None or add.op_type != "Add":
            return None
        constants = [
            i.const_value for i in add.inputs if i is not None and i.const_value is not None and not is_parameter(i)
        ]
        weight = next((i for i in add.inputs if is_parameter(i)), None)
        if len(constants) != 1 or weight is None:
            return None
        offset = float(constants[0].numpy())
    if weight is None or (bias is not None and not is_parameter(bias)):
        return None
    return FoldTarget(kind="norm", weight=weight.name or "", bias=bias.name if bias else None, offset=offset)


def _linear_target(value: ir.Value, by_output: dict[int, Linear]) -> FoldTarget | None:
    """The linear that produced ``value``, whole or as one part of a split or a slice along channels."""
    node, rows = value.producer(), None
    if value.producer() is not None and id(value) not in by_output and node is not None:
        if node.op_type == "Split" and node.inputs[0] is not None:
            if not _along_channels(node):
                return None
            sizes = [size(output, -1) for output in node.outputs]
            index = list(node.outputs).index(value)
            rows = (sum(sizes[:index]), sum(sizes[: index + 1]))
            value = node.inputs[0]
        elif node.op_type == "Slice" and node.inputs[0] is not None:
            rows = _slice_rows(node)
            if rows is None:
                return None
            value = node.inputs[0]
    linear = by_output.get(id(value))
    if linear is None:
        return None
    if rows is not None:
        rows = (rows[0], min(rows[1], linear.shape[0]))
    return FoldTarget(kind="linear", weight=linear.name, bias=linear.bias.name if linear.bias else None, rows=rows)


def _along_channels(split: ir.Node) -> bool:
    """Whether a Split cuts the last axis, which is that of channels between linears."""
    axis, value = split.attributes.get("axis"), split.inputs[0]
    rank = len(value.shape) if value is not None and value.shape is not None else 0
    return axis is not None and axis.as_int() in (-1, rank - 1)


def _slice_rows(node: ir.Node) -> tuple[int, int] | None:
    constants = [
        i.const_value.numpy().tolist() if i is not None and i.const_value is not None else None for i in node.inputs[1:]
    ]
    rank = len(node.inputs[0].shape) if node.inputs[0] is not None and node.inputs[0].shape is not None else 0
    starts, ends, axes, steps = (*constants, None, None)[:4]
    if not (starts and ends and axes) or len(axes) != 1 or axes[0] not in (-1, rank - 1) or (steps or [1]) != [1]:
        return None
    return int(starts[0]), int(ends[0])


def _value_target(value: ir.Value, members: list[Linear], by_output: dict[int, Linear]) -> FoldTarget | None:
    """For an attention output: the value projection, whose rows are shared by ``repeat`` query heads each."""
    node = value.producer()
    while node is not None and node.op_type in ("Reshape", "Transpose"):
        assert node.inputs[0] is not None
        node = node.inputs[0].producer()
    if not is_attention(node):
        return None
    assert node is not None
    source = node.inputs[2]
    query, past = node.inputs[0], node.inputs[-2]
    while source is not None and id(source) not in by_output:
        step = source.producer()
        if step is None or len(list(source.uses())) != 1:
            return None
        if step.op_type not in ("Reshape", "Transpose"):
            break
        source = step.inputs[0]
    if source is None:
        return None
    fold_target = _linear_target(source, by_output)
    if fold_target is None or len(members) != 1:
        return None
    heads, kv_heads, head_size = size(query, 1), size(past, 1), size(past, 3)
    rows = fold_target.rows or (0, kv_heads * head_size)
    if rows[1] - rows[0] != kv_heads * head_size or members[0].shape[1] != heads * head_size:
        return None
    return FoldTarget(
        kind="linear",
        weight=fold_target.weight,
        bias=fold_target.bias,
        rows=rows,
        repeat=heads // kv_heads,
        head_size=head_size,
    )
