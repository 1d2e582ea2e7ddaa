"""The quantized torch reference: its weights, its KV grid, and its activations against ONNX Runtime's own kernel."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from quantization import kv_cache
from quantization.checkpoint import KV_SCALES, KVScales
from quantization.compressed_tensors import CheckpointWriter, open_checkpoint
from quantization.reference import QuantizedReference, round_activations, round_by_token, round_to_grid
from tapeout.errors import ModelError, QuantizationError
from tapeout.quantized import QuantizedWeight, round_to_nearest
from tapeout.schemes import Scheme
from tests.checkpoints import change_weights, say_schemes

LINEAR = Scheme(bits=4, group_size=32, symmetric=False)
TABLE = Scheme(bits=8, group_size=64, symmetric=True)
Texts = Callable[[int, int], list[str]]


IN_FLOAT = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with 4-bit asymmetric linears but for one, and an 8-bit tied table, in the published layout."""
    target = tmp_path_factory.mktemp("reference") / "quantized"
    shutil.copytree(tiny_checkpoint, target, ignore=shutil.ignore_patterns("*.safetensors"))
    source = open_checkpoint(tiny_checkpoint)
    writer = CheckpointWriter(target)
    for name in source.names():
        weight = source.tensor(name)
        if "embed" in name:
            writer.add_embedding(name, round_to_nearest(weight, TABLE), tied_to="lm_head.weight")
        elif weight.ndim == 2 and name != IN_FLOAT:
            writer.add_linear(name, round_to_nearest(weight, LINEAR))
        else:
            writer.add(name, weight)
    writer.finish()
    linears = [name for name in source.names() if name.endswith("proj.weight") and name != IN_FLOAT]
    say_schemes(target, dict.fromkeys(linears, LINEAR), {"model.embed_tokens.weight": TABLE})
    return target


@pytest.fixture(scope="module")
def tokens(tiny_checkpoint: Path, tiny_texts: Texts) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_checkpoint)
    return tokenizer(tiny_texts(1, 5)[0]).input_ids[:120]


def kl(expected: np.ndarray, actual: np.ndarray) -> float:
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (expected, actual))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_weights_are_the_decoded_ones(folder: Path, tiny_checkpoint: Path, tokens: list[int]) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    stored = open_checkpoint(folder)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(stored.weight(name)))
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    actual = QuantizedReference(folder)(tokens)
    assert actual.dtype == np.float32 and actual.shape == (len(tokens), 1024)
    np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize("bound", [0, 300_000])
def test_weights_beyond_the_bound_are_held_during_their_calls_only(
    bound: int, folder: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = QuantizedReference(folder, int8_activations=True)
    monkeypatch.setattr("quantization.reference.decoded_bytes", lambda: bound)
    bounded = QuantizedReference(folder, int8_activations=True)
    np.testing.assert_array_equal(bounded(tokens), whole(tokens))
    outputs = {"model.layers.1.mlp.down_proj.weight": np.ones((len(tokens), 128), np.float32)}
    logits, errors = bounded.teacher_forced(tokens, outputs, {})
    expected, others = whole.teacher_forced(tokens, outputs, {})
    np.testing.assert_array_equal(logits, expected)
    assert errors == others

    held = sum(
        module.weight.untyped_storage().nbytes()
        for name, module in bounded.model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    )
    assert held <= bound + 4 * 28  # a number for each of the others


def test_keys_and_values_stand_on_their_grid(folder: Path, tokens: list[int], tmp_path: Path) -> None:
    """Coarse scales hurt, fine ones hardly; values are those of the kv_cache module."""
    plain = QuantizedReference(folder)(tokens)
    divergence = {}
    for step in (1.0, 0.1, 0.005):
        rounded = shutil.copytree(folder, tmp_path / str(step))
        scales = {
            f"layers.{n}.{part}": np.full((2, 32), step, np.float32)
            for n in range(4)
            for part in ("k_scale", "v_scale")
        }
        KVScales(scales, "int8").write(rounded)
        divergence[step] = kl(plain, QuantizedReference(rounded)(tokens))
    assert divergence[1.0] > 10 * divergence[0.1] > 0
    assert divergence[0.1] < 1e-3
    assert divergence[0.005] > 10 * divergence[0.1]  # everything above 127 steps is clamped

    values = np.random.default_rng(0).normal(size=(2, 2, 7, 32)).astype(np.float32)
    scale = np.random.default_rng(1).uniform(0.005, 0.02, (2, 32)).astype(np.float32)
    values[0, 0, 0, :3] = scale[0, :3] * np.array([0.5, 1.5, -2.5], np.float32)  # ties
    values[1, 0, 0, :3] = scale[0, :3] * np.array([448.1, 500, -1e6], np.float32)
    for dtype in ("int8", "int4", "fp8"):
        expected = kv_cache.dequantize(kv_cache.quantize(values, scale, dtype), scale, dtype)
        rounded = round_to_grid(torch.from_numpy(values), torch.from_numpy(scale), dtype)
        np.testing.assert_array_equal(rounded.numpy(), expected)


def test_fewer_bits_of_the_same_steps_clip_more(folder: Path, tokens: list[int], tmp_path: Path) -> None:
    plain = QuantizedReference(folder)(tokens)
    divergence = {}
    for bits in (8, 4):
        rounded = shutil.copytree(folder, tmp_path / str(bits))
        steps = {
            f"layers.{n}.{part}": np.full((2, 32), 0.1, np.float32) for n in range(4) for part in ("k_scale", "v_scale")
        }
        KVScales(steps, f"int{bits}").write(rounded)
        divergence[bits] = kl(plain, QuantizedReference(rounded)(tokens))
    assert divergence[4] > 10 * divergence[8] > 0


def test_scales_that_do_not_say_their_bits_are_refused(folder: Path, tmp_path: Path) -> None:
    for number, metadata in enumerate((None, {"bits": "3"}, {"bits": "8", "type": "e5m2"})):
        broken = shutil.copytree(folder, tmp_path / str(number))
        save_file({"layers.0.k_scale": np.ones((2, 32), np.float32)}, broken / KV_SCALES, metadata)
        with pytest.raises(QuantizationError, match=r"codes of (no|3|8) bits"):
            QuantizedReference(broken)


def test_a_layer_without_scales_is_refused(folder: Path, tmp_path: Path) -> None:
    partial = shutil.copytree(folder, tmp_path / "partial")
    KVScales({f"layers.0.{part}": np.ones((2, 32), np.float32) for part in ("k_scale", "v_scale")}, "int8").write(
        partial
    )
    with pytest.raises(QuantizationError, match=r"no layers\.1\.k_scale"):
        QuantizedReference(partial)([1, 2, 3])


def test_every_quantized_linear_and_the_tied_head_round_their_inputs(folder: Path, tokens: list[int]) -> None:
    reference = QuantizedReference(folder, int8_activations=True)
    hooked = [name for name, module in reference.model.named_modules() if module._forward_pre_hooks]
    assert len(hooked) == 4 * 7 and "lm_head" in hooked and "model.embed_tokens" not in hooked
    divergence = kl(QuantizedReference(folder)(tokens), reference(tokens))
    assert 0 < divergence < 0.01, divergence


def test_missing_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken", ignore=shutil.ignore_patterns("*.safetensors"))
    stored = open_checkpoint(folder)
    writer = CheckpointWriter(broken)
    for name in stored.names():
        if "layers.1.mlp.up_proj" not in name:
            writer.add(name, stored.weight(name))
    writer.finish()
    with pytest.raises(ModelError, match=r"lacks 1 parameters of .*, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        QuantizedReference(broken)


def test_a_weight_of_another_shape_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    change_weights(broken, lambda tensors: tensors.update({IN_FLOAT: tensors[IN_FLOAT][:-1]}))
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj\.weight is \[\d+, \d+\] in the checkpoint"):
        QuantizedReference(broken)


def mat_mul_n_bits(inputs: np.ndarray, linear: QuantizedWeight) -> np.ndarray:
    """ONNX Runtime's product at accuracy level 4, which quantizes the inputs itself."""
    rows, columns = linear.codes.shape
    per_byte = 8 // linear.scheme.bits

    def packed(codes: np.ndarray) -> np.ndarray:
        codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_byte)))
        return codes if per_byte == 1 else codes[:, 0::2] | codes[:, 1::2] << 4

    blocks = columns // linear.group_size
    stored = {
        "codes": packed(linear.codes).reshape(rows, blocks, linear.group_size // per_byte),
        "scales": linear.scales,
    }
    if linear.zero_points is not None:
        stored["zero_points"] = packed(linear.zero_points)
    node = helper.make_node(
        "MatMulNBits",
        ["x", *stored],
        ["y"],
        domain="com.microsoft",
        K=columns,
        N=rows,
        bits=linear.scheme.bits,
        block_size=linear.group_size,
        accuracy_level=4,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, rows])],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in stored.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": inputs})[0]


def test_inputs_in_16_bits_fall_on_the_codes_of_a_division() -> None:
    """Of the largest by 448, as kernels have it: many lie as near to one code as to the next."""
    inputs = np.random.default_rng(5).normal(size=(200, 64)).astype(np.float16).astype(np.float32)
    largest = np.abs(inputs).max(axis=1, keepdims=True)
    codes = (inputs * (np.float32(448) / largest)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(round_by_token(torch.from_numpy(inputs)).numpy(), codes * (largest / np.float32(448)))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="Arm's kernels quantize whole rows")
@pytest.mark.parametrize("tokens_fed", [1, 7])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (8, 256)])
def test_activations_are_rounded_as_onnxruntime_does(
    bits: int, group_size: int, symmetric: bool, tokens_fed: int
) -> None:
    generator = np.random.default_rng(bits * group_size)
    inputs = generator.normal(size=(tokens_fed, 512)).astype(np.float32)
    inputs[:, 5] *= 50  # an outlier channel, as real activations have
    inputs[0, group_size : 2 * group_size] = 0
    weight = generator.normal(size=(96, 512)).astype(np.float32)
    linear = round_to_nearest(weight, Scheme(bits=bits, group_size=group_size, symmetric=symmetric))
    rounded = round_activations(torch.from_numpy(inputs), group_size).numpy().astype(np.float64)
    expected = rounded @ linear.dequantize().astype(np.float64).T
    actual = mat_mul_n_bits(inputs, linear)
    size = np.sqrt(np.mean(expected**2))
    error = np.sqrt(np.mean((actual - expected) ** 2)) / size
    unrounded = np.sqrt(np.mean((actual - inputs @ linear.dequantize().T) ** 2)) / size
    print(bits, group_size, symmetric, tokens_fed, error, unrounded)
    assert error < 1e-6
    assert unrounded > 1e-3  # so the bound above tells rounded inputs from unrounded ones
