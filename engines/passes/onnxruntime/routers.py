"""Routers of experts, and whatever else stays in float beside quantized linears, become native operators.

    MatMul(x, weight) [+ bias]                           ->   FloatLinear(x, weight in tiles of 16 outputs[, bias])
    TopK(Softmax(logits)) [, divided by their sum]       ->   ChooseExperts(logits)
    TopK(logits), Softmax of the chosen                  ->   ChooseExperts(logits)

ONNX Runtime sums a row in another order when a step has more tokens, and a last bit can choose another expert. Here a
row's bits depend on nothing else. Other ways to choose stay ONNX Runtime's: sigmoids, groups, biases that correct.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.kernels.operators import DOMAIN
from engines.passes.base import (
    Lowering,
    PassResult,
    attribute,
    deferred,
    new_value,
    only_use,
    producer_of,
    replace,
)
from engines.passes.graph.linears import trimmed
from engines.passes.onnxruntime.native_experts import LANES, tiles_of
from tapeout.graph_analysis.linears import Linear, find_linears

NAME, CHOICE = "FloatLinear", "ChooseExperts"


def run(lowering: Lowering) -> PassResult:
    linears, choices = find_linears(lowering.model.graph), [n for n in lowering.model.graph if n.op_type == "TopK"]
    if not linears and not choices:
        return PassResult(0, ("no linear stays in float",))
    reasons = dict[str, str]()
    for linear in linears:
        reasons[linear.name] = lowering.kernels.unsupported(NAME)
        if not reasons[linear.name]:
            _lower(lowering, linear)
    for node in choices:
        name = f"TopK {node.outputs[0].name}"
        reasons[name] = lowering.kernels.unsupported(CHOICE) or _choose(lowering, node)
    declined = [f"{subject}: {reason}; ONNX Runtime computes it" for subject, reason in reasons.items() if reason]
    lowering.model.opset_imports[DOMAIN] = 1
    return PassResult(len(linears) + len(choices) - len(declined), tuple(declined))


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


def _choose(lowering: Lowering, node: ir.Node) -> str:
    """Why it is left; empty where it is not."""
    values, index = node.outputs
    scores, count = node.inputs[0], node.inputs[1]
    wanted = None if count is None or count.const_value is None else count.const_value.numpy().reshape(-1)
    if scores is None or scores.shape is None or len(scores.shape) != 2 or not isinstance(scores.shape[1], int):
        return "it chooses among no rows of experts"
    if wanted is None or not attribute(node, "largest", 1) or not _is_last(node):
        return "it chooses others than the largest of a row"
    before, after = producer_of(scores, "Softmax"), only_use(values)
    logits, last, normalized = scores, node, False
    if before is not None and _is_last(before) and only_use(scores) is node:
        logits, result = before.inputs[0], values
        divided = _divided_by_sum(values)
        if divided is not None:
            last, result, normalized = divided, divided.outputs[0], True
    elif before is None and after is not None and after.op_type == "Softmax" and _is_last(after):
        last, result = after, after.outputs[0]
    else:
        return "its experts are weighted in a way without a kernel"
    lowered = ir.node(
        CHOICE,
        [logits],
        attributes={"chosen": int(wanted[0]), "normalized": int(normalized), "after": int(before is None)},
        domain=DOMAIN,
        outputs=[new_value(f"{index.name}.native", index), new_value(f"{result.name}.native", result)],
    )
    replace(
        lowering.model,
        [node, last] if last is not node else [node],
        [lowered],
        dict(zip((index, result), lowered.outputs, strict=True)),
    )
    return ""


def _is_last(node: ir.Node) -> bool:
    """Whether it works along the last of two axes."""
    return attribute(node, "axis", -1) in (-1, 1)


def _divided_by_sum(values: ir.Value) -> ir.Node | None:
    """The division of weights by their sum, if it is all that reads them."""
    readers = {use.node.op_type: use.node for use in values.uses()}
    if readers.keys() != {"ReduceSum", "Div"} or len(list(values.uses())) != 2:
        return None
    total, division = readers["ReduceSum"], readers["Div"]
    axes = total.inputs[1].const_value if len(total.inputs) > 1 and total.inputs[1] is not None else None
    of_rows = axes is not None and axes.numpy().reshape(-1).tolist() in ([-1], [1]) and attribute(total, "keepdims", 1)
    divides = list(division.inputs) == [values, total.outputs[0]] and only_use(total.outputs[0]) is division
    return division if of_rows and divides else None


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
