"""Parameters that stay codes from the checkpoint on: what decodes them, in numpy, in torch and in a portable graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import save_file

from pipeline.export.weights import bind_weights
from quantization.compressed_tensors import open_checkpoint
from tapeout.coded_parameters import StoredCodes, scheme, with_codes
from tapeout.formats.mxfp4 import VALUES
from tapeout.mapped_weights import CodedParameter, is_finite, widened
from tapeout.portable_model import load_graph, read_float32, save_graph
from tapeout.tensor_files import stored_tensors

NAME = "layers.0.experts.down_proj"
EXPERTS, OUTPUTS, GROUPS = 4, 8, 8
LARGEST = 252  # scale under which no element is infinite


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of one parameter, which has every scale under which all elements are finite."""
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (EXPERTS, OUTPUTS, GROUPS, 16), np.uint8)
    scales = np.minimum(np.arange(256), LARGEST).astype(np.uint8).reshape(EXPERTS, OUTPUTS, GROUPS)
    save_file({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}, tmp_path / "model.safetensors")
    return tmp_path


def expected(folder: Path) -> np.ndarray:
    """``[E, K, N]``, as the specification says it, in float64."""
    parts = stored_tensors(folder)
    blocks, scales = (parts[f"{NAME}{part}"].read().numpy() for part in ("_blocks", "_scales"))
    elements = VALUES.astype(np.float64)[np.stack([blocks & 15, blocks >> 4], axis=-1)]
    rows = elements.reshape(EXPERTS, OUTPUTS, GROUPS, 32) * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    return rows.reshape(EXPERTS, OUTPUTS, -1).transpose(0, 2, 1)


def test_a_checkpoint_has_them_as_floats_and_as_codes(folder: Path) -> None:
    checkpoint, wanted = open_checkpoint(folder), expected(folder)
    assert checkpoint.names() == (NAME,) and checkpoint.shape(NAME) == wanted.shape
    np.testing.assert_array_equal(checkpoint.tensor(NAME), wanted)
    for expert in range(EXPERTS):
        np.testing.assert_array_equal(checkpoint.part(NAME, expert), wanted[expert])
    codes = checkpoint.codes(NAME)
    assert codes is not None and codes.scheme == scheme() and not checkpoint.is_quantized(NAME)
    np.testing.assert_array_equal(codes.dequantize(), wanted.transpose(0, 2, 1))
    assert checkpoint.stored_bytes(NAME) == EXPERTS * OUTPUTS * GROUPS * 17


def test_a_parameter_is_nan_until_it_is_decoded(folder: Path) -> None:
    stored = with_codes(stored_tensors(folder))[NAME]
    assert isinstance(stored, StoredCodes)
    parameter = CodedParameter.of(stored)
    assert not is_finite(parameter)
    with widened([parameter]):
        np.testing.assert_array_equal(parameter.numpy(), expected(folder))
    assert parameter.dtype == torch.bfloat16 and not is_finite(parameter)


def test_infinite_and_missing_numbers_are_seen(folder: Path) -> None:
    tensors = {name: tensor.read().numpy() for name, tensor in stored_tensors(folder).items()}
    for scale, code, finite in ((LARGEST, 0x77, True), (253, 0x22, True), (253, 0x67, False), (255, 0x00, False)):
        tensors[f"{NAME}_blocks"][3, 0, 0], tensors[f"{NAME}_scales"][3, 0, 0] = code, scale
        save_file(tensors, folder / "model.safetensors")
        stored = with_codes(stored_tensors(folder))[NAME]
        assert isinstance(stored, StoredCodes) and stored.is_finite() == finite


def test_any_runtime_decodes_what_a_graph_holds(folder: Path) -> None:
    wanted = expected(folder)
    weight = ir.Value(name=NAME, shape=ir.Shape(wanted.shape), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Identity", [weight])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "out", weight.type, weight.shape
    graph = ir.Graph([], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 23, "tapeout": 1})
    model = ir.Model(graph, ir_version=10)
    bind_weights(model, folder, {})
    save_graph(model, folder / "model.onnx")
    (found,) = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"]).run(["out"], {})
    np.testing.assert_array_equal(found, wanted)
    value = load_graph(folder / "model.onnx").graph.initializers[NAME]
    assert value.shape == weight.shape and value.const_value is not None
    np.testing.assert_array_equal(read_float32(value.const_value), wanted)
