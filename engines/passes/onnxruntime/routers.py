"""Routers of experts, and whatever else stays in float beside quantized linears, become native operators.

    MatMul(x, weight) [+ bias]                           ->   FloatLinear(x, weight in tiles of 16 outputs[, bias])
    TopK(scores), scores = Softmax or Sigmoid(logits)    ->   ChooseExperts(logits)
    TopK(logits), Softmax of the chosen                  ->   ChooseExperts(logits)
    TopK(scores + bias), scores at its index             ->   ChooseExperts(logits, bias)
    the same of the best groups of experts               ->   ChooseExperts(logits[, bias]), ``groups``

Weights may be divided by their sum, and multiplied by a number. ONNX Runtime sums a row in another order when a step
has more tokens, and a last bit can choose another expert. Here a row's bits depend on nothing else. Other ways to
choose stay ONNX Runtime's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.kernels.operators import DOMAIN
from engines.passes.base import (
    Lowering,
    PassResult,
    attribute,
    deferred,
    dimension,
    new_value,
    only_use,
    producer_of,
    replace,
)
from engines.passes.graph.linears import trimmed
from engines.passes.onnxruntime.native_experts import LANES, tiles_of
from tapeout.graph_analysis.linears import Linear, find_linears

NAME, CHOICE = "FloatLinear", "ChooseExperts"
SCORES = SOFTMAX, LOGITS, SIGMOID = "Softmax", "logits", "Sigmoid"  # in the order of source/choose_experts.c


def run(lowering: Lowering) -> PassResult:
    linears, choices = find_linears(lowering.model.graph), [n for n in lowering.model.graph if n.op_type == "TopK"]
    if not linears and not choices:
        return PassResult(0, ("no linear stays in float",))
    reasons = dict[str, str]()
    for linear in linears:
        reasons[linear.name] = lowering.kernels.unsupported(NAME)
        if not reasons[linear.name]:
            _lower(lowering, linear)
    for node in reversed(choices):
        if node.graph is not None:  # a choice of groups comes before that of experts, and goes with it
            name = f"TopK {node.outputs[0].name}"
            reasons[name] = lowering.kernels.unsupported(CHOICE) or _choose(lowering, node)
    declined = [f"{subject}: {reason}; ONNX Runtime computes it" for subject, reason in reasons.items() if reason]
    lowering.model.opset_imports[DOMAIN] = 1
    return PassResult(len(reasons) - len(declined), tuple(declined))


def float_linear(
    model: ir.Model,
    name: str,
    x: ir.Value,
    shape: tuple[int, int],
    read: Callable[[], NDArray[np.float32]],
    bias: ir.Value | None,
    like: ir.Value,
) -> ir.Node:
    """A linear of ``x`` over the weight ``[out, in]`` of this shape that ``read`` gives. ``like``: its output."""
    outputs, columns = shape

    def made() -> NDArray[np.float32]:
        return np.ascontiguousarray(tiles_of(read()[None])[0].transpose(0, 2, 1))

    weight = deferred(model, f"{name}.tiles", (-(-outputs // LANES), columns, LANES), ir.DataType.FLOAT, made)
    return ir.node(
        NAME,
        trimmed([x, weight, bias]),
        attributes={"N": outputs},
        domain=DOMAIN,
        outputs=[new_value(f"{name}.native", like)],
    )


@dataclass(frozen=True)
class _Scores:
    """What the last TopK of a router chooses among: ``logits`` and what is made of them, as the operator has it."""

    logits: ir.Value
    kind: str
    values: ir.Value  # what weights are taken from
    bias: ir.Value | None
    groups: dict[str, int]

    @property
    def experts(self) -> int:
        return dimension(self.values, 1)


@dataclass(frozen=True)
class _Weights:
    """What becomes of the chosen scores: ``last`` gives the weights of the experts."""

    last: ir.Value
    attributes: dict[str, int | float]


def _choose(lowering: Lowering, node: ir.Node) -> str:
    """Why it is left; empty where it is not."""
    values, index = node.outputs
    among = node.inputs[0]
    chosen = _number(node.inputs[1])
    if among is None or among.shape is None or len(among.shape) != 2 or not isinstance(among.shape[1], int):
        return "it chooses among no rows of experts"
    if chosen is None or not attribute(node, "largest", 1) or not _is_last(node):
        return "it chooses others than the largest of a row"
    scores = _scores(among)
    few = not scores.groups or chosen <= scores.groups["kept"] * scores.experts // scores.groups["groups"]
    if not few:  # those that are masked may be chosen
        return "its experts are chosen in a way without a kernel"
    taken, gather = values, _gathered(scores.values, index)
    if gather is not None and not values.uses():
        taken = gather
    elif scores.bias is not None:
        return "its experts are weighted in a way without a kernel"
    kind, weights = scores.kind, _weights(taken)
    if kind == LOGITS:
        soft = only_use(taken)
        if soft is None or soft.op_type != "Softmax" or not _is_last(soft):
            return "its experts are weighted in a way without a kernel"
        weights = _weights(soft.outputs[0])
    lowered = ir.node(
        CHOICE,
        trimmed([scores.logits, scores.bias]),
        attributes={"chosen": int(chosen), "scores": SCORES.index(kind), **scores.groups, **weights.attributes},
        domain=DOMAIN,
        outputs=[new_value(f"{index.name}.native", index), new_value(f"{weights.last.name}.native", weights.last)],
    )
    end = weights.last.producer()
    assert end is not None
    replace(
        lowering.model,
        [node, end] if end is not node else [node],
        [lowered],
        dict(zip((index, weights.last), lowered.outputs, strict=True)),
    )
    return ""


def _scores(among: ir.Value) -> _Scores:
    kept, groups, fill = _groups(among)
    found = _scores_of(kept, groups)
    # DeepSeek-V2 masks by zeros, below which no softmax is.
    is_least = fill == -np.inf or (fill == 0 and found.kind != LOGITS and found.bias is None)
    return found if is_least else _Scores(among, LOGITS, among, None, {})


def _scores_of(among: ir.Value, groups: dict[str, int]) -> _Scores:
    total = producer_of(among, "Add")
    for values, added in (total.inputs, total.inputs[::-1]) if total is not None else ((among, None),):
        bias = _row(added, among)
        for kind in (SOFTMAX, SIGMOID) if total is None or bias is not None else ():
            made = producer_of(values, kind)
            if values is not None and made is not None and made.inputs[0] is not None and _is_last(made):
                return _Scores(made.inputs[0], kind, values, bias, groups)
    return _Scores(among, LOGITS, among, None, groups)


def _row(bias: ir.Value | None, like: ir.Value) -> ir.Value | None:
    """A constant of each expert."""
    squeezed = producer_of(bias, "Squeeze")
    bias = bias if squeezed is None else squeezed.inputs[0]
    if bias is None or not bias.is_initializer() or bias.dtype != ir.DataType.FLOAT or bias.shape is None:
        return None
    experts = dimension(like, 1)
    return bias if dimension(bias, -1) == experts == np.prod(bias.shape.numpy()) else None


def _groups(among: ir.Value) -> tuple[ir.Value, dict[str, int], float]:
    """The scores of which all but those of the best groups are masked, which groups these are, and what masks them.

    A group counts by the sum of its ``best`` largest scores, or by its largest.
    """
    masked = producer_of(among, "Where")
    if masked is None or len(masked.inputs) != 3:
        return among, {}, -np.inf
    mask, scores = masked.inputs[0], masked.inputs[2]
    fill = _number(masked.inputs[1])
    if mask is None or scores is None or fill is None:
        return among, {}, -np.inf
    inverted = producer_of(mask, "Not")
    spread = producer_of(_uncast(inverted.inputs[0]) if inverted is not None else None, "Reshape")
    wide = producer_of(spread.inputs[0], "Expand") if spread is not None else None
    apart = producer_of(wide.inputs[0], "Unsqueeze") if wide is not None else None
    marked = producer_of(apart.inputs[0], "ScatterElements") if apart is not None else None
    if spread is None or marked is None or attribute(marked, "axis", 0) not in (-1, 1) or not _marks(marked):
        return among, {}, -np.inf
    best_groups = marked.inputs[1].producer() if marked.inputs[1] is not None else None
    if best_groups is None or best_groups.op_type != "TopK" or not attribute(best_groups, "largest", 1):
        return among, {}, -np.inf
    kept, sums = _number(best_groups.inputs[1]), best_groups.inputs[0]
    best, members = _of_group(sums)
    if best is None or members is None or kept is None or members.inputs[0] is not scores:
        return among, {}, -np.inf
    groups, size = dimension(members.outputs[0], 1), dimension(members.outputs[0], 2)
    if groups * size != dimension(scores, 1) or marked.inputs[1] is not best_groups.outputs[1]:
        return among, {}, -np.inf
    return scores, {"groups": groups, "kept": int(kept), "best": best}, fill


def _of_group(sums: ir.Value | None) -> tuple[int | None, ir.Node | None]:
    """How many scores of a group count, and the node that puts groups apart."""
    total = producer_of(sums, "ReduceSum")
    if total is not None and _reduces_last(total, 2):
        top = total.inputs[0].producer() if total.inputs[0] is not None else None
        if top is not None and top.op_type == "TopK" and total.inputs[0] is top.outputs[0] and _is_last(top, 3):
            best = _number(top.inputs[1])
            return (None if best is None else int(best)), producer_of(top.inputs[0], "Reshape")
    largest = producer_of(sums, "ReduceMax")
    if largest is not None and _reduces_last(largest, 2):
        return 1, producer_of(largest.inputs[0], "Reshape")
    return None, None


def _marks(marked: ir.Node) -> bool:
    """Whether ones are put where zeros were."""
    zeros, ones = (producer_of(marked.inputs[place], kind) for place, kind in ((0, "Expand"), (2, "ConstantOfShape")))
    if zeros is None or ones is None:
        return False
    value = attribute(ones, "value", None)
    return _number(zeros.inputs[0]) == 0 and value is not None and bool((value.numpy() == 1).all())


def _uncast(value: ir.Value | None) -> ir.Value | None:
    cast = producer_of(value, "Cast")
    return value if cast is None else cast.inputs[0]


def _gathered(scores: ir.Value, index: ir.Value) -> ir.Value | None:
    """The scores at an index."""
    readers = [use.node for use in index.uses() if use.node.op_type == "GatherElements"]
    if (
        len(readers) != 1
        or list(readers[0].inputs) != [scores, index]
        or attribute(readers[0], "axis", 0) not in (-1, 1)
    ):
        return None
    return readers[0].outputs[0]


def _weights(values: ir.Value) -> _Weights:
    """Values, divided by their sum or a bound of it, and times a number, as far as that is what becomes of them."""
    attributes: dict[str, int | float] = {"normalized": 0}
    found = _divided_by_sum(values)
    if found is not None:
        division, attributes = found
        values = division.outputs[0]
    product = only_use(values)
    if product is not None and product.op_type == "Mul":
        factor = next((number for value in product.inputs if (number := _number(value)) is not None), None)
        if factor is not None and product.outputs[0].shape == values.shape:
            return _Weights(product.outputs[0], {**attributes, "factor": factor})
    return _Weights(values, attributes)


def _is_last(node: ir.Node, rank: int = 2) -> bool:
    """Whether it works along the last axis."""
    return attribute(node, "axis", -1) in (-1, rank - 1)


def _reduces_last(node: ir.Node, last: int) -> bool:
    axes = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
    return axes is not None and axes.numpy().reshape(-1).tolist() in ([-1], [last])


def _number(value: ir.Value | None) -> float | None:
    tensor = value.const_value if value is not None and value.is_initializer() else None
    return float(tensor.numpy().ravel()[0]) if tensor is not None and tensor.size == 1 else None


def _divided_by_sum(values: ir.Value) -> tuple[ir.Node, dict[str, int | float]] | None:
    """The division of weights by their sum, if it is all that reads them, and what is added to it or bounds it."""
    readers = {use.node.op_type: use.node for use in values.uses()}
    if readers.keys() != {"ReduceSum", "Div"} or len(list(values.uses())) != 2:
        return None
    total, division = readers["ReduceSum"], readers["Div"]
    if not _reduces_last(total, 1) or not attribute(total, "keepdims", 1):
        return None
    attributes: dict[str, int | float] = {"normalized": 1}
    end = total.outputs[0]
    bounded = only_use(end)
    if bounded is not None and bounded.op_type == "Add":
        added = next((number for value in bounded.inputs if (number := _number(value)) is not None), None)
        if added is None:
            return None
        end, attributes = bounded.outputs[0], {**attributes, "added": added}
    elif bounded is not None and bounded.op_type == "Clip":
        least = _number(bounded.inputs[1]) if len(bounded.inputs) > 1 else None
        if least is None or any(value is not None for value in bounded.inputs[2:]):
            return None
        end, attributes = bounded.outputs[0], {**attributes, "least": least}
    divides = list(division.inputs) == [values, end] and only_use(end) is division
    return (division, attributes) if divides else None


def _lower(lowering: Lowering, linear: Linear) -> None:
    name, as_stored = linear.name, linear.transposed

    def read() -> NDArray[np.float32]:
        stored = lowering.weights.weight(name)
        return stored.T if as_stored else stored

    node = float_linear(lowering.model, name, linear.input, linear.shape, read, linear.bias, linear.output)
    last = linear.output.producer()
    assert last is not None
    replace(lowering.model, [last], [node], {linear.output: node.outputs[0]})
    if not linear.weight.uses() and name in lowering.model.graph.initializers:
        del lowering.model.graph.initializers[name]
