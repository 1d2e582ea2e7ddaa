"""The linears of a graph: matmuls with a parameter."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


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
