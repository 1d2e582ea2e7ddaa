"""Checkpoints as they are published load with every weight where it belongs: tied, sharded, GGUF, quantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.export import find_stop_tokens
from pipeline.export.gguf import quickly_read
from pipeline.export.tokenizer import save_tokenizer
from quantization.checkpoint_formats.autoawq import ORDER
from runtime.gateway.text.sampling_defaults import read_defaults
from tapeout.errors import ArtifactError, ExportError
from tests import checkpoints
from tests.checkpoints import CONFIG, WEIGHTS, Tensors, change_json, change_weights, gguf_file, shard
from tests.families import VOCAB_SIZE

TOKENS = torch.arange(3, 40)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def stored(folder: Path) -> Tensors:
    return load_file(folder / WEIGHTS)


def assert_loaded(folder: Path, expected: Tensors) -> Any:
    """Every expected tensor is a parameter of the model, bit for bit."""
    model = load_checkpoint(folder).model
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert expected.keys() <= parameters.keys()
    for name, tensor in expected.items():
        assert torch.equal(parameters[name].float(), tensor.float()), name
    return model


def test_a_tied_head_may_be_left_out_or_repeated(tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint", "qwen2")
    weights = stored(folder)
    assert "lm_head.weight" not in weights
    model = assert_loaded(folder, weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    change_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert_loaded(folder, weights)


def test_shards_and_buffers_of_old_releases(tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint")
    weights = stored(folder)
    change_weights(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    shard(folder)
    assert_loaded(folder, weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_read_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint")
    change_weights(folder, lambda t: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
    assert_loaded(folder, stored(folder))


def test_a_stale_pickle_beside_the_weights_is_not_read(tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint")
    torch.save(
        {name: torch.zeros_like(tensor) for name, tensor in stored(folder).items()}, folder / "pytorch_model.bin"
    )
    assert_loaded(folder, stored(folder))


def test_a_gguf_file_is_the_model_that_it_was_made_from(tiny_checkpoint: Path, tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf")
    loaded = load_checkpoint(tmp_path, "m.gguf")
    assert loaded.dequantized is None
    torch.testing.assert_close(logits(loaded.model), logits(load_checkpoint(tiny_checkpoint).model))
    (tmp_path / "written").mkdir()
    tokenizer = save_tokenizer(tmp_path, "m.gguf", tmp_path / "written", 1024)
    assert find_stop_tokens(loaded.model, tokenizer) == (2,)


def test_the_tokenizer_is_kept_byte_for_byte(tmp_path: Path) -> None:
    """Although transformers has a tokenizer of its own for this type, with another vocabulary."""
    folder = checkpoints.checkpoint(tmp_path / "checkpoint", "qwen2")
    (tmp_path / "written").mkdir()
    save_tokenizer(folder, "", tmp_path / "written", VOCAB_SIZE)
    assert (tmp_path / "written/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_the_template_file_wins_as_in_transformers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    (folder / "chat_template.jinja").write_text("from the file")
    change_json(folder / "tokenizer_config.json", chat_template="from the configuration")
    (tmp_path / "written").mkdir()
    save_tokenizer(folder, "", tmp_path / "written", 1024)
    assert (tmp_path / "written/chat_template.jinja").read_text() == "from the file"


def test_every_stop_token_is_found(tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint")
    model = load_checkpoint(folder).model
    (tmp_path / "written").mkdir()
    tokenizer = save_tokenizer(folder, "", tmp_path / "written", VOCAB_SIZE)
    model.generation_config.eos_token_id = [7, 9]
    assert find_stop_tokens(model, tokenizer) == (2, 7, 9)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = 5
    assert find_stop_tokens(model, tokenizer) == (2, 5)


# --- quantized checkpoints


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"top_p": 1.5}', "top_p is 1.5"),
        ('{"top_p": -0.1}', "top_p is -0.1"),
        ('{"top_k": -2}', "top_k is -2"),
        ('{"top_k": 3.5}', "top_k is 3.5"),
        ('{"temperature": "0.7"}', "temperature is '0.7'"),
        ('{"temperature": true}', "temperature is True"),
        ('{"temperature": -1}', "temperature is -1"),
        ('{"temperature": Infinity}', "temperature is inf"),
        ('{"min_p": [0]}', r"min_p is \[0\]"),
        ('{"repetition_penalty": 0}', "repetition_penalty is 0"),
        ('{"top_k": 9223372036854775808}', "top_k is 9223372036854775808"),  # no request of it can be sent
        (f'{{"temperature": 1{"0" * 400}}}', "temperature is 1"),
    ],
)
def test_sampling_defaults_that_no_request_may_have_are_refused(tmp_path: Path, config: str, said: str) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint")
    (folder / "generation_config.json").write_text(config)
    with pytest.raises(ArtifactError, match=f"{said}.*generation_config|generation_config.*{said}"):
        load_checkpoint(folder)


def test_sampling_defaults_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint")
    config = {"temperature": 0, "top_p": 0, "top_k": -1, "min_p": None, "do_sample": False, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(config))
    load_checkpoint(folder)
    assert read_defaults(folder) == {"temperature": 0, "top_p": 0, "top_k": 0}
    assert read_defaults(tmp_path) == {}


def test_an_unknown_scaling_of_rotary_embeddings_is_named(tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint", "qwen2")
    change_json(folder / "config.json", rope_parameters={"rope_type": "magic", "rope_theta": 1e4})
    with pytest.raises(ExportError, match=r"unknown rope_type: 'magic'"):
        load_checkpoint(folder)


def test_sampling_defaults_of_a_gguf_file_are_kept(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them, float32 and all."""
    written = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.1, "mirostat": 0}
    gguf_file(tmp_path / "m.gguf", sampling=written)
    load_checkpoint(tmp_path, "m.gguf").model.generation_config.save_pretrained(tmp_path)
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    assert read_defaults(tmp_path) == expected


@pytest.mark.parametrize(
    ("sampling", "said"), [({"top_p": 1.5}, "top_p is 1.5"), ({"penalty_repeat": 0.0}, "repetition_penalty is 0.0")]
)
def test_sampling_defaults_of_a_gguf_file_that_no_request_may_have_are_refused(
    tmp_path: Path, sampling: dict[str, float], said: str
) -> None:
    gguf_file(tmp_path / "m.gguf", sampling=sampling)
    with pytest.raises(ArtifactError, match=rf"{said}.* in m\.gguf"):
        load_checkpoint(tmp_path, "m.gguf")


def linears(weights: Tensors) -> list[str]:
    return [name for name in weights if name.endswith("proj.weight")]


def awq_words(codes: np.ndarray[Any, Any]) -> torch.Tensor:
    """``[R, C]`` codes as AutoAWQ packs them: eight channels in a word, in its order."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for at, channel in enumerate(ORDER):
        words |= codes[:, channel::8].astype(np.uint32) << np.uint32(4 * at)
    return torch.from_numpy(words.view(np.int32))


def test_an_autoawq_checkpoint_is_what_its_codes_stand_for(tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint")
    generator, expected = np.random.default_rng(0), stored(folder)
    written = dict(expected)
    for name in linears(expected):
        outputs, inputs = expected[name].shape
        codes, zeros = generator.integers(0, 16, (inputs, outputs)), generator.integers(0, 16, (inputs // 32, outputs))
        scales = (generator.random((inputs // 32, outputs)) * 0.01).astype(np.float16)
        weight = (codes - zeros.repeat(32, 0)) * scales.astype(np.float32).repeat(32, 0)
        expected[name] = torch.from_numpy(weight.T.astype(np.float32))
        del written[name]
        module = name.removesuffix("weight")
        written |= {f"{module}qweight": awq_words(codes), f"{module}qzeros": awq_words(zeros)}
        written[f"{module}scales"] = torch.from_numpy(scales)
    save_file(written, folder / WEIGHTS)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    change_json(folder / CONFIG, quantization_config=awq)
    assert_loaded(folder, expected)
    loaded = load_checkpoint(folder)
    assert loaded.dequantized == "awq, 4 bits, groups of 32"
    assert not hasattr(loaded.model.config, "quantization_config")
    assert loaded.model.generation_config.eos_token_id == 2


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_quantization_config_beside_floats_says_nothing_of_them(tmp_path: Path, method: str) -> None:
    """Somebody has dequantized the weights, and left it."""
    folder = checkpoints.checkpoint(tmp_path / "checkpoint")
    expected = stored(folder)
    change_json(folder / CONFIG, quantization_config={"quant_method": method})
    assert_loaded(folder, expected)
    loaded = load_checkpoint(folder)
    assert loaded.dequantized is None and loaded.weights == folder


def test_an_awq_word_holds_its_channels_in_the_published_order() -> None:
    """AutoAWQ packs channels 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on."""
    assert int(awq_words(np.arange(8)[None])[0, 0]) & 0xFFFFFFFF == 0x75316420


def compressed(kind: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Tensors of a linear and its weight, by the compressed-tensors library; and its quantization arguments."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    rows, columns = weight.shape
    settings: dict[str, dict[str, Any]] = {
        "pack-quantized": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 16},
        "int-quantized": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        "float-quantized": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"},
    }
    args = QuantizationArgs(**settings[kind])
    groups = {"group": columns // 16, "channel": 1, "tensor": 1}[settings[kind]["strategy"]]
    blocks = weight.reshape(rows if kind != "float-quantized" else 1, groups, -1)
    low, high = blocks.amin(-1), blocks.amax(-1)
    if settings[kind]["symmetric"]:
        scale = blocks.abs().amax(-1) / (448 if kind == "float-quantized" else 127)
        zeros = torch.zeros_like(scale, dtype=torch.int8)
    else:
        scale = (high - low) / 15
        zeros = (torch.round(-low / scale) - 8).clamp(-8, 7).to(torch.int8)
    if kind == "float-quantized":
        scale, zeros = scale.reshape(1), zeros.reshape(1)
    state = {"weight": weight, "weight_scale": scale}
    if not settings[kind]["symmetric"]:
        state["weight_zero_point"] = zeros
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor: Any = BaseCompressor.load_from_registry(kind)
    tensors: Tensors = compressor.compress(dict(state), scheme)
    read = compressor.decompress(dict(tensors), scheme)["weight"].float()
    return (
        {name: tensor.contiguous() for name, tensor in tensors.items() if name != "weight_g_idx"},
        read,
        settings[kind],
    )


@pytest.mark.parametrize("kind", ["pack-quantized", "int-quantized", "float-quantized"])
def test_a_compressed_tensors_checkpoint_is_read_as_its_library_reads_it(kind: str, tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint")
    expected = stored(folder)
    written, arguments = dict(expected), dict[str, Any]()
    for name in linears(expected):
        tensors, expected[name], arguments = compressed(kind, written.pop(name))
        written |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in tensors.items()}
    save_file(written, folder / WEIGHTS)
    group = {"targets": ["Linear"], "weights": arguments}
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    change_json(folder / CONFIG, quantization_config=config | {"ignore": ["lm_head"]})
    model = load_checkpoint(folder).model
    for name in linears(expected):
        torch.testing.assert_close(model.get_parameter(name), expected[name], rtol=2e-3, atol=1e-6)


def test_block_scaled_fp8_with_blocks_that_end_early(tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint")
    expected = stored(folder)
    written = dict(expected)
    for name in linears(expected):
        weight = written[name] = expected[name].to(torch.float8_e4m3fn)
        rows, columns = (-(-size // 40) for size in weight.shape)
        scale = torch.rand(rows, columns) + 0.5
        spread = scale.repeat_interleave(40, 0)[: weight.shape[0]].repeat_interleave(40, 1)[:, : weight.shape[1]]
        written[f"{name}_scale_inv"], expected[name] = scale, weight.float() * spread
    save_file(written, folder / WEIGHTS)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [40, 40]}
    change_json(folder / CONFIG, quantization_config=config)
    assert_loaded(folder, expected)


def test_what_quantize_writes_can_be_read_as_a_checkpoint(tmp_path: Path) -> None:
    """Our own compressed-tensors checkpoints: packed in 4 and 6 bits, static int8, a tied embedding in bytes."""
    from quantization.checkpoint_formats.compressed import quantization_config
    from quantization.compressed_tensors import CheckpointWriter, open_checkpoint
    from tapeout.quantized import stored_by_rtn
    from tapeout.schemes import Scheme

    folder = checkpoints.checkpoint(tmp_path / "checkpoint", "qwen2")
    source = stored(folder)
    (folder / WEIGHTS).unlink()
    writer = CheckpointWriter(folder)
    schemes = {
        name: Scheme(bits=bits, group_size=32, symmetric=bits != 4)
        for name, bits in zip(linears(source), (4, 6, 8, 4, 6, 8, 6) * 2, strict=True)
    }
    embedding = Scheme(bits=6, group_size=32, symmetric=True)
    for name, tensor in source.items():
        if name in schemes:
            writer.add_linear(name, stored_by_rtn(schemes[name], tensor.numpy()))
        elif name == "model.embed_tokens.weight":
            writer.add_embedding(name, stored_by_rtn(embedding, tensor.numpy()), tied_to="lm_head.weight")
        else:
            writer.add(name, tensor.numpy())
    writer.finish()
    config = quantization_config(schemes, {"model.embed_tokens.weight": embedding}, [])
    change_json(folder / CONFIG, quantization_config=config)
    reader = open_checkpoint(folder)
    assert_loaded(folder, {name: torch.from_numpy(reader.weight(name)) for name in source})
    assert json.loads((folder / CONFIG).read_text())["tie_word_embeddings"]


def test_gguf_files_are_read_quickly_and_the_same(tmp_path: Path) -> None:
    """transformers uses what the context puts in the place of gguf's own, and its own is back afterwards."""
    import gguf
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = checkpoints.gguf_file(tmp_path / "m.gguf")
    plain, own, expected = gguf.GGUFReader(path), gguf.GGUFReader, load_gguf_checkpoint(str(path))
    with quickly_read(), pytest.MonkeyPatch.context() as patch:
        opened: list[gguf.GGUFReader] = []
        reader = gguf.GGUFReader
        patch.setattr(gguf, "GGUFReader", lambda *given: opened.append(reader(*given)) or opened[-1])
        assert load_gguf_checkpoint(str(path)) == expected
    assert [type(one.data) for one in opened] == [np.ndarray] and type(plain.data) is np.memmap
    assert [field.contents() for field in opened[0].fields.values()] == [f.contents() for f in plain.fields.values()]
    assert gguf.GGUFReader is own
