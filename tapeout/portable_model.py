"""The ONNX model of a PortableGraph, whose weights may be stored in 16 bits.

On disk every parameter has the type it was published in, and a Cast beside it gives float32: any ONNX runtime can run
the file. One that is stored as codes (tapeout/coded_parameters.py) has a node beside it that decodes them. In memory a
parameter is a float32 value, whatever its bytes are: what lowers or runs the graph binds weights of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tapeout.coded_parameters import BLOCKS, SCALES, decoded, parameter_shape
from tapeout.decode_mxfp4 import NAME as DECODE
from tapeout.decode_mxfp4 import decode_function
from tapeout.float_types import as_float32
from tapeout.operators import DOMAIN

STORED = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}  # safetensors' names


class CodedTensor(ir.ExternalTensor):
    """A parameter in float32 whose elements are codes in files; its own place is that of the codes."""

    def __init__(self, name: str, blocks: ir.ExternalTensor, scales: ir.ExternalTensor) -> None:
        super().__init__(
            blocks.location,
            blocks.offset,
            blocks.length,
            ir.DataType.FLOAT,
            shape=ir.Shape(parameter_shape(blocks.shape.numpy())),
            name=name,
            base_dir=blocks.base_dir,
        )
        self.blocks, self.scales = blocks, scales


def load_graph(path: Path) -> ir.Model:
    """The model at ``path``, its parameters as float32 values; nothing is read of the weights."""
    model = ir.load(path)
    graph = model.graph
    for node in [node for node in graph if (node.domain, node.op_type) == (DOMAIN, DECODE)]:
        blocks, scales = (value for value in node.inputs if value is not None)
        codes, powers = blocks.const_value, scales.const_value
        assert isinstance(codes, ir.ExternalTensor) and isinstance(powers, ir.ExternalTensor)
        name = (blocks.name or "").removesuffix(BLOCKS)
        tensor = CodedTensor(name, codes, powers)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        graph.remove(node, safe=True)
        for part in (blocks, scales):
            del graph.initializers[part.name or ""]
        graph.initializers[name] = value
    model.functions.pop((DOMAIN, DECODE, ""), None)
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
        if isinstance(tensor, CodedTensor):
            casts.append(_decoded(graph, value, tensor))
            model.functions[(DOMAIN, DECODE, "")] = decode_function()
            continue
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


def _decoded(graph: ir.Graph, value: ir.Value, tensor: CodedTensor) -> ir.Node:
    """The node that decodes a parameter, in place of the parameter; its codes and scales are parameters then."""
    parts: list[ir.Value] = []
    for end, part in ((BLOCKS, tensor.blocks), (SCALES, tensor.scales)):
        name = f"{tensor.name}{end}"
        graph.initializers[name] = ir.Value(
            name=name, shape=part.shape, type=ir.TensorType(part.dtype), const_value=part
        )
        parts.append(graph.initializers[name])
    del graph.initializers[tensor.name]
    node = ir.node(DECODE, parts, domain=DOMAIN, name=f"{tensor.name}.decode")
    ir.convenience.replace_all_uses_with(value, node.outputs[0])
    node.outputs[0].name = f"{tensor.name}.float32"
    node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
    return node


def read_float32(tensor: ir.TensorProtocol, rows: slice | None = None) -> NDArray[np.float32]:
    """The values of a stored tensor, or of some rows of its first axis; a view of the mapped file where it is float32.

    onnx_ir refuses to read a file with several hard links, which may be a way around its checks of paths. Here links
    are how a graph shares the weights of its source, and every file of an artifact is known by its hash.
    """
    wanted = ... if rows is None else rows
    if isinstance(tensor, CodedTensor):
        return decoded(_mapped(tensor.blocks)[wanted], _mapped(tensor.scales)[wanted])
    return as_float32((_mapped(tensor) if isinstance(tensor, ir.ExternalTensor) else tensor.numpy())[wanted])


def _mapped(tensor: ir.ExternalTensor) -> NDArray[Any]:
    shape = tensor.shape.numpy()
    return np.memmap(tensor.path, tensor.dtype.numpy(), "r", tensor.offset or 0, shape or (1,)).reshape(shape)
