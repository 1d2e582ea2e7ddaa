"""Planted defects for the dry run, in a process over the stand-in: a node of the CPU, and calls while capturing."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from engines.targets.ort_cuda.device import RUNTIME
from engines.targets.ort_cuda.engine import _open  # pyright: ignore[reportPrivateUsage]
from tapeout.errors import BuildError
from tests.ort_cuda.dry_run import Counts


def node_of_the_cpu(folder: Path) -> str:
    """A Det between two nodes of the GPU: the CUDA provider has none."""
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", [4, 4]), ("y", []))
    ]
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("Det", ["a"], ["d"]),
        helper.make_node("Neg", ["d"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "planted", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    try:
        _open(str(folder / "model.onnx"))
    except BuildError as error:
        return f"refused: {error.found}"
    return "opened"


def calls_while_capturing() -> str:
    counts, cuda = Counts(), ctypes.CDLL(RUNTIME)
    memory, stream, graph = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cudaStreamCreate(ctypes.byref(stream))
    counts.taken()
    cuda.cudaStreamBeginCapture(stream, 0)
    cuda.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(64))
    cuda.cudaMemcpy(memory, memory, ctypes.c_size_t(8), 3)
    cuda.cudaDeviceSynchronize()
    cuda.cudaStreamEndCapture(stream, ctypes.byref(graph))
    return json.dumps({name: count for name, count in sorted(counts.taken().items()) if name.startswith("violation")})


if __name__ == "__main__":
    print(calls_while_capturing() if sys.argv[1] == "capture" else node_of_the_cpu(Path(sys.argv[1])))
