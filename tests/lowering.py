"""Graphs of a few nodes for tests of passes: written as expressions, run on ONNX Runtime before and after a pass.

x = value("x", ["batch", 8])
model = model_of([x], [named("y", op("MatMul", [x, op("Transpose", [parameter("a.weight", w)], perm=[1, 0])]))])
run(model, {"x": ...})["y"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.kernels.cpu.kernel_set import CpuKernels
from engines.passes.base import CONTRIB, Lowering, PassResult
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from tapeout.operators import DOMAIN, attention
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.quantized import QuantizedWeight

Shape = Sequence[int | str]


class FixedWeights:
    """A checkpoint held in memory: float32 arrays and quantized linears by parameter name."""

    def __init__(self, tensors: Mapping[str, NDArray[np.float32] | QuantizedWeight]) -> None:
        self.tensors = tensors

    def linear(self, name: str) -> Any:
        return self.tensors[name]

    def weight(self, name: str) -> NDArray[np.float32]:
        stored = self.tensors[name]
        return stored.dequantize() if isinstance(stored, QuantizedWeight) else stored

    def tensor(self, name: str) -> NDArray[np.float32]:
        stored = self.tensors[name]
        assert not isinstance(stored, QuantizedWeight)
        return stored


def value(name: str, shape: Shape, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def parameter(name: str, array: NDArray[Any]) -> ir.Value:
    """An initializer. A dot in its name makes it a parameter of the checkpoint, as opposed to a constant."""
    return ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        const_value=ir.tensor(array, name=name),
    )


def op(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    shape: Shape | None = None,
    *,
    domain: str = "",
    outputs: int = 1,
    **attributes: Any,
) -> ir.Value:
    """The first output of a new node, float32 of this shape; the others by ``.producer().outputs``."""
    node = ir.node(op_type, inputs, attributes=attributes, domain=domain, num_outputs=outputs)
    for output in node.outputs:
        output.type = ir.TensorType(ir.DataType.FLOAT)
        output.shape = None if shape is None else ir.Shape(shape)
    return node.outputs[0]


def linear(x: ir.Value, name: str, weight: NDArray[np.float32], bias: NDArray[np.float32] | None = None) -> ir.Value:
    """``x @ weight.T + bias`` the way the exporter writes it, with parameters ``NAME.weight`` and ``NAME.bias``."""
    shape = [*(x.shape or [])[:-1], weight.shape[0]]
    transposed = op("Transpose", [parameter(f"{name}.weight", weight)], weight.shape[::-1], perm=[1, 0])
    product = op("MatMul", [x, transposed], shape)
    return product if bias is None else op("Add", [product, parameter(f"{name}.bias", bias)], shape)


def linear_model(
    members: Mapping[str, int], columns: int = 64, *, biased: bool = False, rng: np.random.Generator
) -> ir.Model:
    """Linears of random weights over one input ``[batch, tokens, columns]``. ``members``: output channels of each."""
    x = value("x", ["batch", "tokens", columns])
    outputs: list[ir.Value] = []
    for name, rows in members.items():
        weight = rng.standard_normal((rows, columns)).astype(np.float32)
        bias = rng.standard_normal(rows).astype(np.float32) if biased else None
        result = linear(x, name, weight, bias)
        outputs.append(named(name, op("Neg", [result], result.shape)))
    return model_of([x], outputs)


def named(name: str, output: ir.Value) -> ir.Value:
    output.name = name
    return output


def model_of(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Model:
    """The nodes and initializers that ``outputs`` need, in an order that can run."""
    nodes: dict[int, ir.Node] = {}
    initializers: dict[str, ir.Value] = {}

    def visit(wanted: ir.Value) -> None:
        node = wanted.producer()
        if wanted.const_value is not None and node is None:
            assert initializers.setdefault(wanted.name or "", wanted) is wanted, f"two initializers {wanted.name}"
        if node is None or id(node) in nodes:
            return
        for needed in node.inputs:
            if needed is not None:
                visit(needed)
        nodes[id(node)] = node

    for output in outputs:
        visit(output)
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=list(nodes.values()),
        initializers=list(initializers.values()),
        opset_imports={"": 23, CONTRIB: 1, DOMAIN: 1},
        name="test",
    )
    functions = [attention.OPERATOR.function()]
    if any(node.op_type == attention.NAME_WITH_SINKS for node in graph):
        functions.append(attention.WITH_SINKS.function())
    return ir.Model(graph, ir_version=10, functions=functions)


def run(model: ir.Model, feeds: Mapping[str, NDArray[Any]], *, threads: int = 1) -> dict[str, NDArray[Any]]:
    options = cpu_options(threads, library())
    session = open_session(ir.to_proto(model).SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    wanted = {i.name for i in session.get_inputs()}
    results = session.run(names, {name: array for name, array in feeds.items() if name in wanted})
    return dict(zip(names, (np.asarray(r) for r in results), strict=True))


def lowering(
    model: ir.Model,
    tensors: Mapping[str, NDArray[np.float32] | QuantizedWeight] | None = None,
    *,
    groups: Sequence[LinearGroup] = (),
    hidden_size: int = 32,
    tied: bool = False,
    max_tokens: int = 16,
    kv_scales: dict[str, NDArray[np.float32]] | None = None,
    kv_dtype: str = "int8",
) -> Lowering:
    """What a pass is given. Parameters of the graph are in the checkpoint too; ``tensors`` adds to or replaces them."""
    stored = {
        name: found.const_value.numpy()
        for name, found in model.graph.initializers.items()
        if "." in name and found.const_value is not None
    }
    record = PortableGraph(
        architecture="Test",
        layers=1,
        state=(),
        hidden_size=hidden_size,
        heads=4,
        kv_heads=2,
        head_size=8,
        value_size=8,
        vocab_size=53,
        tied_embeddings=tied,
        embedding="embed.weight",
        rotary="half",
        max_positions=max_tokens,
        model_positions=max_tokens,
        groups=tuple(groups),
        stop_tokens=(2,),
        max_relative_error=0.0,
        versions={},
    )
    weights = FixedWeights({**stored, **(tensors or {})})
    return Lowering(model, record, weights, max_tokens, CpuKernels(), kv_scales or {}, kv_dtype)


def group(name: str, *members: str, in_features: int = 32, out_features: int = 32, biased: bool = False) -> LinearGroup:
    """A group of linears called ``members``, as the record names them."""
    return LinearGroup(
        name=name,
        members=tuple(f"{m}.weight" for m in members),
        biases=tuple(f"{m}.bias" if biased else None for m in members),
        in_features=in_features,
        out_features=(out_features,) * len(members),
    )


def apply(lowered: Lowering, *passes: ModuleType) -> PassResult:
    """Run passes as ``engines.compile.lower`` does; the outcome of the last."""
    outcome = PassResult(0)
    for step in passes:
        outcome = step.run(lowered)
        lowered.model.graph.sort()
    return outcome


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]
