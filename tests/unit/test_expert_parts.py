"""Experts of a graph that are cut into parts compute what they do as one node, and no part is larger than asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from safetensors.numpy import save_file

from pipeline.export.weights import bind_weights
from tapeout.operators import DOMAIN
from tapeout.operators.experts.function import experts_function
from tapeout.portable_model import save_graph
from tapeout.segments import SegmentCall, SegmentedGraph

EXPERTS, CHOSEN, HIDDEN, INNER, TOKENS = 6, 2, 32, 64, 9
UP, DOWN = "layers.0.experts.gate_up_proj", "layers.0.experts.down_proj"
Arrays = dict[str, np.ndarray[Any, Any]]


class Kept(SegmentCall):
    def __init__(self, given: Arrays) -> None:
        self.given, self.outputs = given, Arrays()

    def feed(self, name: str) -> np.ndarray[Any, Any]:
        return self.given[name]

    def take(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self.outputs[name] = array


def stored(stored_as: str) -> Arrays:
    """``codes``: in MXFP4, as gpt-oss has them, of a parameter ``[E, K, N]``. Floats are ``[E, N, K]``."""
    random = np.random.default_rng(0)
    found: Arrays = {}
    for name, (rows, columns) in {UP: (2 * INNER, HIDDEN), DOWN: (HIDDEN, INNER)}.items():
        if stored_as == "codes":
            found[f"{name}_blocks"] = random.integers(0, 256, (EXPERTS, rows, columns // 32, 16), np.uint8)
            found[f"{name}_scales"] = random.integers(120, 126, (EXPERTS, rows, columns // 32), np.uint8)
        else:
            found[name] = random.standard_normal((EXPERTS, rows, columns), np.float32) / 8
        found[f"{name}_bias"] = random.standard_normal((EXPERTS, rows), np.float32)
    return found


def write(folder: Path, stored_as: str) -> Path:
    save_file(stored(stored_as), folder / "model.safetensors")
    shapes = {UP: (EXPERTS, 2 * INNER, HIDDEN), DOWN: (EXPERTS, HIDDEN, INNER)}
    nodes, parameters, weights = list[ir.Node](), list[ir.Value](), list[ir.Value]()

    def value(name: str, shape: Any, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))

    for name, shape in shapes.items():
        if stored_as == "codes":
            parameters.append(value(name, (shape[0], shape[2], shape[1])))
            nodes.append(ir.node("Transpose", [parameters[-1]], attributes={"perm": [0, 2, 1]}))
            weights.append(nodes[-1].outputs[0])
            weights[-1].name, weights[-1].shape, weights[-1].type = f"{name}.t", ir.Shape(shape), parameters[-1].type
        else:
            parameters.append(value(name, shape))
            weights.append(parameters[-1])
    biases = [value(f"{name}_bias", shape[:2]) for name, shape in shapes.items()]
    inputs = [value("x", ["tokens", HIDDEN]), value("index", ["tokens", CHOSEN], ir.DataType.INT64)]
    inputs.append(value("weight", ["tokens", CHOSEN]))
    gate = {"activation": "silu", "alpha": 1.0, "limit": 0.0, "offset": 0.0, "interleaved": 0}
    nodes.append(ir.node("Experts", [*inputs, *weights, *biases], attributes=gate, domain=DOMAIN))
    y = nodes[-1].outputs[0]
    y.name, y.shape, y.type = "y", ir.Shape(["tokens", HIDDEN]), ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        inputs, [y], nodes=nodes, initializers=[*parameters, *biases], opset_imports={"": 23, DOMAIN: 1}, name="g"
    )
    model = ir.Model(graph, ir_version=10, functions=[experts_function()])
    bind_weights(model, folder, {})
    save_graph(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("stored_as", ["codes", "floats"])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_parts_compute_what_the_whole_does(tmp_path: Path, stored_as: str, at_once: int) -> None:
    path, random = write(tmp_path, stored_as), np.random.default_rng(1)
    given: Arrays = {
        "x": random.standard_normal((TOKENS, HIDDEN), np.float32),
        "index": np.argsort(random.random((TOKENS, EXPERTS)), axis=1)[:, :CHOSEN].astype(np.int64),
        "weight": random.random((TOKENS, CHOSEN), np.float32),
    }
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = np.asarray(session.run(["y"], given)[0])
    expert_bytes = 4 * 3 * HIDDEN * INNER
    cut = SegmentedGraph(path, segment_bytes=at_once * expert_bytes)
    parts = [[name for name in names if name.startswith((f"{UP}[", f"{DOWN}["))] for names in cut.segments]
    assert len([names for names in parts if names]) == -(-EXPERTS // at_once)
    assert all(len(names) in (0, 2) for names in parts)
    call = Kept(given)
    cut.run([call])
    np.testing.assert_allclose(call.outputs["y"], expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected).max() > 0.1
