"""What every pass shares: its signature, its report, and small graph surgery.

A pass is a function ``(Lowering) -> PassResult``. It changes ``lowering.model`` in place. ``PassResult.matched`` counts
its rewrites; ``PassResult.declined`` says why it left something that looked like its pattern, or rewrote only part of
it. These are sentences for users: each begins with its subject, a linear group, a layer, a parameter, or an operator
and its output. A pass that matched nothing says at least what the graph has none of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.bundle import LinearOutput
from engines.kernels.kernel_set import KernelSet
from tapeout.graph_analysis.linears import is_parameter
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.quantized import QuantizedWeight

INLINE_BYTES = 1024  # of a tensor that stays in the graph's own file
INTERNAL = "tapeout"  # domain of nodes that exist only between passes
CONTRIB = "com.microsoft"


class Weights(Protocol):
    """Where a build takes parameters from: a float or a quantized checkpoint (quantization.compressed_tensors)."""

    def linear(self, name: str) -> QuantizedWeight | NDArray[np.float32]: ...
    def weight(self, name: str) -> NDArray[np.float32]: ...
    def tensor(self, name: str) -> NDArray[np.float32]: ...


class QDQ(Protocol):
    """Arithmetic of graphs with QuantizeLinear and DequantizeLinear (quantization.qdq)."""

    def positive_int4(self, parts: Sequence[QuantizedWeight]) -> tuple[NDArray[np.int8], NDArray[np.float32], int]: ...


class _OutByIn:
    """A checkpoint whose linears are all ``[out, in]``, over one whose float ``names`` are stored the other way.

    Floats of ``experts`` stay as they are stored, as the graph has them: codes alone are ``[experts, out, in]``.
    """

    def __init__(self, stored: Weights, names: frozenset[str], experts: frozenset[str]) -> None:
        self._stored, self._names, self._experts = stored, names, experts

    def linear(self, name: str) -> QuantizedWeight | NDArray[np.float32]:
        found = self._stored.linear(name)
        return found.T if name in self._names and not isinstance(found, QuantizedWeight) else found

    def weight(self, name: str) -> NDArray[np.float32]:
        found = self.linear(name)
        if not isinstance(found, QuantizedWeight):
            return found
        return found.dequantize().swapaxes(-1, -2) if name in self._experts else found.dequantize()

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._stored.tensor(name)


@dataclass
class Lowering:
    """The graph on its way to a target, and what passes may read about it."""

    model: ir.Model
    graph: PortableGraph
    weights: Weights
    max_tokens: int
    kernel_set: KernelSet | None  # of the target
    kv_scales: dict[str, NDArray[np.float32]] = field(default_factory=dict)  # empty: float cache
    kv_dtype: str = "int8"  # of the codes under them: int8, fp8, or int4 and two of them a byte
    recurrent_dtype: str = "float32"  # of the state of recurrences, or bfloat16
    plan: dict[str, str] = field(default_factory=dict)  # filled by the kernel pass: group -> kernel
    linear_outputs: list[LinearOutput] = field(default_factory=list[LinearOutput])  # likewise
    # For targets that are strongly typed (engines.targets.tensorrt):
    float_type: str = "fp32"  # fp16 or bf16
    precision: str = "fp32"  # as it was asked for
    formats: frozenset[str] = frozenset()  # of linears (tapeout/formats) that the precision has; others are decoded
    qdq: QDQ | None = None  # for int4

    def __post_init__(self) -> None:
        transposed = [group for group in self.graph.groups if group.transposed]
        if transposed and not isinstance(self.weights, _OutByIn):
            linears, experts = (
                frozenset(name for group in transposed if bool(group.experts) == stacked for name in group.members)
                for stacked in (False, True)
            )
            self.weights = _OutByIn(self.weights, linears, experts)

    @property
    def kernels(self) -> KernelSet:
        assert self.kernel_set is not None, "a target that runs this pass has kernels of its own"
        return self.kernel_set

    def group_of(self, parameter: str) -> LinearGroup | None:
        return next((g for g in self.graph.groups if parameter in g.members), None)


@dataclass(frozen=True)
class PassResult:
    matched: int
    declined: tuple[str, ...] = ()


class Pass(Protocol):
    """A module with this function."""

    __name__: str

    def run(self, lowering: Lowering) -> PassResult: ...


def new_value(name: str, like: ir.Value | None = None) -> ir.Value:
    value = ir.Value(name=name)
    if like is not None:
        value.shape, value.type = like.shape, like.type
    return value


def initializer(model: ir.Model, name: str, array: NDArray[Any]) -> ir.Value:
    """A new initializer of this name and type, 4-bit and 8-bit float ones of ``ml_dtypes`` too."""
    value = ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        const_value=ir.tensor(array, name=name),
    )
    model.graph.register_initializer(value)
    return value


def deferred(
    model: ir.Model, name: str, shape: Sequence[int], dtype: ir.DataType, make: Callable[[], NDArray[Any]]
) -> ir.Value:
    """A new initializer that is made when it is written, so that one at a time is in memory."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    defer(value, make)
    model.graph.register_initializer(value)
    return value


def defer(value: ir.Value, make: Callable[[], NDArray[Any]]) -> None:
    """Give an initializer of known shape and type a value that is made whenever it is read."""
    assert value.shape is not None and value.dtype is not None
    dtype, name = value.dtype, value.name
    lazy = ir.LazyTensor(lambda: ir.tensor(make(), dtype=dtype, name=name), dtype, value.shape, name=name)
    value.const_value = lazy if lazy.nbytes > INLINE_BYTES else ir.tensor(make(), dtype=dtype, name=name)


def constant(model: ir.Model, name: str, array: NDArray[Any]) -> ir.Value:
    """The initializer of this name, made once and shared."""
    return model.graph.initializers.get(name) or initializer(model, name, array)


def replace(model: ir.Model, old: Sequence[ir.Node], new: Sequence[ir.Node], outputs: dict[ir.Value, ir.Value]) -> None:
    """Insert ``new`` before the last of ``old``, give the consumers of ``outputs``' keys its values, drop dead nodes.

    Nodes of ``old`` that still have consumers stay. Names of graph outputs are kept.
    """
    model.graph.insert_before(old[-1], list(new))
    for before, after in outputs.items():
        if before.is_graph_output():
            take_over([before], [after])
        else:
            before.replace_all_uses_with(after)
    remove_dead(model, old)


def take_over(old: Sequence[ir.Value], new: Sequence[ir.Value]) -> None:
    """``new`` values get names, shapes, types, consumers and places among the graph's outputs of ``old`` ones."""
    for before, after in zip(old, new, strict=True):
        after.name, before.name = before.name, f"{before.name}.replaced"
        after.shape, after.type = before.shape, before.type
        before.replace_all_uses_with(after, replace_graph_outputs=True)


def dimension(value: ir.Value | None, axis: int) -> int:
    """A size of a value that the graph fixes."""
    assert value is not None and value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int), f"{value.name} has {size} elements along axis {axis}"
    return size


def sizes(model: ir.Model, *numbers: int) -> ir.Value:
    """A shape for Reshape, shared by all who need the same."""
    return constant(model, f"shape.{'.'.join(map(str, numbers))}", np.array(numbers, np.int64))


def remove_dead(model: ir.Model, candidates: Sequence[ir.Node]) -> None:
    """Remove candidates without consumers, then their producers that lost their last consumer."""
    stack = list(candidates)
    while stack:
        node = stack.pop()
        if node.graph is None or any(o.uses() or o in model.graph.outputs for o in node.outputs):
            continue
        inputs = [i for i in node.inputs if i is not None]
        model.graph.remove(node, safe=True)

        for value in inputs:
            producer = value.producer()
            if producer is not None:
                stack.append(producer)


def parameter_behind(value: ir.Value) -> str:
    """The parameter that a value is or is computed from, as users find it in the checkpoint; else the value's name."""
    stack, name = [value], value.name or ""
    while stack:
        current = stack.pop()
        if is_parameter(current):
            return current.name or name
        node = current.producer()
        stack.extend(i for i in (node.inputs if node is not None else ()) if i is not None)
    return name


def last_axis_slice(node: ir.Node) -> tuple[int, int] | None:
    """What a Slice of one step takes of the last axis: from, to; None for other Slices."""
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    constants = [value.const_value if value is not None else None for value in node.inputs[1:]]
    numbers = [int(tensor.numpy().ravel()[0]) for tensor in constants if tensor is not None and tensor.size == 1]
    if shape is None or len(numbers) != len(constants) or len(numbers) < 3:
        return None
    if numbers[2] not in (-1, len(shape) - 1) or numbers[3:] not in ([], [1]):
        return None
    width = dimension(node.inputs[0], -1)
    begin, end, *_ = (number + width if number < 0 else min(number, width) for number in numbers)
    return begin, end


def only_use(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    found = node.attributes.get(name)
    return default if found is None else found.value


def producer_of(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None
