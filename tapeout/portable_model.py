"""The ONNX model of a PortableGraph, whose weights may be stored in 16 bits.

On disk every parameter has the type it was published in, and a Cast beside it gives float32: any ONNX runtime can run
the file. In memory a parameter is a float32 value, whatever its bytes are: what lowers or runs the graph binds weights
of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tapeout.float_types import as_float32

STORED = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}  # safetensors' names


def load_graph(path: Path) -> ir.Model:
    """The model at ``path``, its parameters as float32 values; nothing is read of the weights."""
    model = ir.load(path)
    graph = model.graph
    for node in list(graph):
        stored = node.inputs[0] if node.op_type == "Cast" else None
        if stored is None or not isinstance(stored.const_value, ir.ExternalTensor):
            continue
        stored.type = ir.TensorType(ir.DataType.FLOAT)
        ir.convenience.replace_all_uses_with(node.outputs[0], stored)
        graph.remove(node, safe=True)
    return model


def save_graph(model: ir.Model, path: Path) -> None:
    """The reverse of :func:`load_graph`; the model is changed."""
    graph, casts = model.graph, list[ir.Node]()
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype == ir.DataType.FLOAT:
            continue
        cast = ir.node("Cast", [value], attributes={"to": ir.DataType.FLOAT}, name=f"{name}.widen")
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        cast.replace_input_with(0, value)
        cast.outputs[0].name = f"{name}.float32"
        cast.outputs[0].shape, cast.outputs[0].type = value.shape, ir.TensorType(ir.DataType.FLOAT)
        value.type = ir.TensorType(tensor.dtype)
        casts.append(cast)
    if casts:
        graph.insert_before(graph[0], casts)
    ir.save(model, path)


def read_float32(tensor: ir.TensorProtocol) -> NDArray[np.float32]:
    """The values of a stored tensor; a view of the mapped file where they are float32.

    onnx_ir refuses to read a file with several hard links, which may be a way around its checks of paths. Here links
    are how a graph shares the weights of its source, and every file of an artifact is known by its hash.
    """
    if isinstance(tensor, ir.ExternalTensor):
        shape = tensor.shape.numpy()
        return as_float32(
            np.memmap(tensor.path, tensor.dtype.numpy(), "r", tensor.offset or 0, shape or (1,)).reshape(shape)
        )
    return as_float32(tensor.numpy())
