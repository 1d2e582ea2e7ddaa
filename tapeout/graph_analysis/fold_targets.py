"""What can absorb the input scale of linears: a norm, or the linear before them."""

from __future__ import annotations

import onnx_ir as ir

from tapeout.graph_analysis.dataflow import NORMS, along_channels
from tapeout.graph_analysis.linears import Linear, is_parameter, size
from tapeout.operators.attention import is_attention
from tapeout.portable_graph import FoldTarget


def find_fold_target(members: list[Linear], by_output: dict[int, Linear]) -> FoldTarget | None:
    value = members[0].input
    producer = value.producer()
    if producer is None or not _only_feeds(value, members):
        return None
    if producer.op_type in NORMS:
        return _norm_target(producer)
    if producer.op_type == "Mul":
        alone = (operand for operand in producer.inputs if operand is not None and len(operand.uses()) == 1)
        return next(filter(None, (_linear_target(operand, by_output) for operand in alone)), None)
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
    if node is not None and id(value) not in by_output:
        if node.op_type == "Split" and node.inputs[0] is not None:
            if not along_channels(node):
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
    query, past = node.inputs[0], node.inputs[-1]
    while source is not None and id(source) not in by_output:
        step = source.producer()
        if step is None or len(source.uses()) != 1:
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
