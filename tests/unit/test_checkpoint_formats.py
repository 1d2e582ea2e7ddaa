"""Exported checkpoints: what others read from them is what the quantized model holds, bit for bit."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pipeline.cli.main import main
from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.export import export
from quantization.calibrate import calibrate
from quantization.checkpoint import QuantizedModel
from quantization.checkpoint_formats import autoawq, gguf, gguf_metadata, write
from quantization.checkpoint_formats.source import narrowed
from quantization.checkpoint_formats.write import Exported, export_checkpoint
from quantization.compressed_tensors import open_checkpoint
from quantization.quantize import quantize
from quantization.reference import QuantizedReference
from tapeout.artifact import Artifact
from tapeout.errors import ArtifactError, ExportError, QuantizationError
from tapeout.quantized import QuantizedWeight, round_to_nearest, stored_by_rtn
from tapeout.recipe import BaseRecipe, Calibrate, DataSource, KVCache, ModelSource, Plan, Quantize, Rule
from tapeout.schemes import FLOAT, STATIC_INT8, Scheme
from tapeout.tensor_files import INDEX
from tapeout.tensor_writer import ShardWriter
from tests.checkpoints import shard
from tests.llama_server import Predict, llama_server
from tests.plans import written_plan
from tests.quantized import VOCAB, float_checkpoint, quantized_model
from tests.tiny import tiny_checkpoint, tiny_texts

INT4 = Scheme(bits=4, group_size=32, symmetric=True)
INT4_ASYMMETRIC = Scheme(bits=4, group_size=32)
INT6, INT8 = (Scheme(bits=bits, group_size=64, symmetric=True) for bits in (6, 8))
SCALES = "scales are float16, and some of its scales are not"
AWQ_PARTS = ("qweight", "qzeros", "scales")
TOKENS = list(range(3, 120, 3))
MODELS = {"llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {}}


def only_linears(scheme: Scheme) -> Callable[[str], Scheme]:
    return lambda name: FLOAT if name in ("model.embed_tokens.weight", "lm_head.weight") else scheme


def mixed(name: str) -> Scheme:
    """Every kind of scheme that has codes."""
    kinds = {"q_proj": INT4, "k_proj": INT4_ASYMMETRIC, "v_proj": INT6, "down_proj": INT4, "embed_tokens": INT6}
    return kinds.get(name.split(".")[-2], INT8)


def exported(model: Artifact[QuantizedModel], name: str, to: Path, *, wider: bool = False) -> Exported:
    return export_checkpoint(model.folder, name, to, wider=wider, progress=lambda done, total: None)


def linear(scheme: Scheme, rows: int = 16, columns: int = 256, seed: int = 0) -> QuantizedWeight:
    weight = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return round_to_nearest(weight, scheme)


def assert_same_weights(model: Artifact[QuantizedModel], folder: Path) -> None:
    """As our reader of sources has them: every parameter, bit for bit."""
    entry = "model.gguf" if (folder / "model.gguf").is_file() else ""
    ours, theirs = open_checkpoint(model.folder), dict(load_checkpoint(folder, entry).model.named_parameters())
    assert set(ours.names()) == set(theirs)
    for name in ours.names():
        assert np.array_equal(ours.weight(name), theirs[name].detach().numpy()), name


# --- AutoAWQ


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5))
def test_awq_words_are_unpacked_to_the_same_codes(seed: int, rows: int, words: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 16, (rows, 8 * words), np.uint8)
    assert np.array_equal(autoawq.codes_of(autoawq.words(codes)), codes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("group_size", "stored_group"), [(32, 32), (128, 128), (128, 32), (256, 128)])
def test_an_awq_linear_round_trips_bit_for_bit(symmetric: bool, group_size: Any, stored_group: Any) -> None:
    ours = linear(Scheme(bits=4, group_size=group_size, symmetric=symmetric))
    read = QuantizedWeight.of(
        autoawq.decode(autoawq.encode(ours, stored_group)), Scheme(bits=4, group_size=stored_group)
    )
    repeat = group_size // stored_group
    zeros = np.full(ours.scales.shape, 8, np.uint8) if ours.zero_points is None else ours.zero_points
    assert read.zero_points is not None
    assert np.array_equal(read.codes, ours.codes)
    assert np.array_equal(read.scales, np.repeat(ours.scales, repeat, axis=1))
    assert np.array_equal(read.zero_points, np.repeat(zeros, repeat, axis=1))
    assert np.array_equal(read.dequantize(), ours.dequantize())


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """AutoAWQ words as a kernel of another project reads them: shift, mask, then put in order."""
    shifts = torch.arange(0, 32, 4)
    lanes = torch.bitwise_right_shift(words[:, :, None], shifts[None, None, :]).to(torch.int8)
    order = torch.arange(lanes.shape[1] * 8).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1)
    return (lanes.reshape(len(words), -1)[:, order]) & 0xF


def test_an_awq_linear_is_what_another_unpacking_reads() -> None:
    ours = linear(INT4_ASYMMETRIC)
    parts = {name: torch.from_numpy(part) for name, part in autoawq.encode(ours, 32).items()}
    codes, zeros = unpack_words(parts["qweight"]), unpack_words(parts["qzeros"])
    scales = parts["scales"].float().repeat_interleave(32, 0)
    weight = (codes - zeros.repeat_interleave(32, 0)).float() * scales
    assert np.array_equal(weight.T.numpy(), ours.dequantize())


@pytest.mark.parametrize("tied", [True, False])
def test_an_awq_checkpoint_holds_the_same_model(tmp_path: Path, tied: bool) -> None:
    model = quantized_model(tmp_path / "q", only_linears(INT4_ASYMMETRIC), tie_word_embeddings=tied)
    found = exported(model, "autoawq", tmp_path / "out")
    assert found.stored == {"4-bit g32 asym as 4-bit": 14, "float": 6 if tied else 7} and not found.wider
    assert_same_weights(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["model.embed_tokens", "lm_head"] if tied else ["lm_head", "model.embed_tokens"],
    }
    stored = load_file(tmp_path / "out" / "model.safetensors")
    shape = {part: tuple(stored[f"model.layers.0.mlp.down_proj.{part}"].shape) for part in AWQ_PARTS}
    assert shape == {"qweight": (192, 8), "qzeros": (6, 8), "scales": (6, 64)}


def test_awq_takes_all_linears_of_a_unit_or_none(tmp_path: Path) -> None:
    """vLLM computes Q, K and V as one matmul."""
    schemes = {"k_proj": INT8, "embed_tokens": FLOAT}
    model = quantized_model(
        tmp_path / "q", lambda name: schemes.get(name.split(".")[-2], INT4), tie_word_embeddings=True
    )
    with pytest.raises(
        QuantizationError, match=r"cannot hold 6 tensors(.|\n)*k_proj.*8-bit g64: the layout holds 4-bit"
    ):
        exported(model, "autoawq", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
    assert len(exported(model, "autoawq", tmp_path / "out", wider=True).wider) == 6
    assert_same_weights(model, tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {f"model.layers.1.self_attn.{part}_proj" for part in "qkv"} < set(kept)


def test_awq_refuses_a_model_without_4_bit_linears(tmp_path: Path) -> None:
    model = quantized_model(tmp_path / "q", only_linears(INT8))
    with pytest.raises(QuantizationError, match="no linear that AutoAWQ"):
        exported(model, "autoawq", tmp_path / "out", wider=True)


# --- compressed-tensors


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]


@pytest.mark.parametrize(
    "scheme_of",
    [only_linears(INT4), only_linears(INT6), only_linears(INT8), only_linears(INT4_ASYMMETRIC), mixed],
    ids=["int4", "int6", "int8", "int4-asymmetric", "mixed"],
)
def test_transformers_loads_compressed_tensors_with_equal_logits(
    tmp_path: Path, scheme_of: Callable[[str], Scheme]
) -> None:
    from transformers import AutoModelForCausalLM

    model = quantized_model(tmp_path / "q", scheme_of, tie_word_embeddings=True)
    exported(model, "compressed-tensors", tmp_path / "out", wider=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    expected = QuantizedReference(model.folder)(TOKENS)
    assert float((logits_of(loaded) - torch.from_numpy(expected)).abs().max()) < 1e-5
    assert_same_weights(model, tmp_path / "out")


def test_compressed_tensors_keep_static_int8(tmp_path: Path) -> None:
    model = quantized_model(tmp_path / "q", only_linears(STATIC_INT8))
    found = exported(model, "compressed-tensors", tmp_path / "out")
    assert not found.wider
    ours, theirs = open_checkpoint(model.folder), open_checkpoint(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj.weight"
    one, other = ours.linear(name), theirs.linear(name)
    assert isinstance(one, QuantizedWeight) and isinstance(other, QuantizedWeight)
    assert one.input_scale == other.input_scale and np.array_equal(one.codes, other.codes)


@pytest.mark.parametrize("name", ["compressed-tensors", "gguf"])
def test_codes_that_a_format_is_not_written_with_are_stored_in_float(tmp_path: Path, name: str) -> None:
    model = quantized_model(tmp_path / "q", only_linears(Scheme.model_validate({"format": "mxfp4"})))
    found = exported(model, name, tmp_path / "out", wider=True)
    assert found.wider
    assert_same_weights(model, tmp_path / "out")


def test_compressed_tensors_refuse_what_only_one_reader_loads(tmp_path: Path) -> None:
    model = quantized_model(tmp_path / "q", mixed)
    with pytest.raises(QuantizationError, match=r"(.|\n)*embed_tokens.weight in 6-bit g64: vLLM loads(.|\n)*--wider"):
        exported(model, "compressed-tensors", tmp_path / "out")
    with pytest.raises(QuantizationError, match=r"k_proj.weight, in 4-bit g32 asym: transformers loads no packed zero"):
        exported(model, "compressed-tensors", tmp_path / "out")


# --- GGUF


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        (INT4, "Q4_0"),
        (Scheme(bits=4, group_size=128, symmetric=True), "Q4_0"),
        (INT4_ASYMMETRIC, "Q5_0"),
        (Scheme(bits=4, group_size=64), "Q5_0"),
        (Scheme(bits=5, group_size=64, symmetric=True), "Q5_0"),
        (Scheme(bits=5, group_size=32), "Q8_0"),
        (INT6, "Q8_0"),
        (Scheme(bits=6, group_size=32), "Q8_0"),
        (INT8, "Q8_0"),
    ],
    ids=str,
)
def test_blocks_of_gguf_are_what_its_own_library_reads(scheme: Scheme, kind: str) -> None:
    from gguf import GGMLQuantizationType, dequantize

    for seed in range(4):
        ours = linear(scheme, seed=seed)
        read = dequantize(gguf.encode(ours, kind), GGMLQuantizationType[kind])
        assert np.array_equal(read, ours.dequantize())


def test_levels_that_a_type_lacks_are_not_cut_off() -> None:
    with pytest.raises(ValueError, match="do not fit Q4_0"):
        gguf.encode(linear(INT6), "Q4_0")


@pytest.mark.parametrize("model_type", MODELS)
def test_llama_cpp_predicts_the_same_from_float_weights(tmp_path: Path, model_type: str) -> None:
    """With nothing rounded on either side: names, order of rows, rotary embedding and norms are right."""
    model = quantized_model(tmp_path / "q", lambda _: FLOAT, model_type, **MODELS[model_type])
    exported(model, "gguf", tmp_path / "out")
    assert_llama_cpp_agrees(model, tmp_path / "out", 1e-6)


@pytest.mark.parametrize("model_type", MODELS)
def test_llama_cpp_predicts_the_same_from_codes(tmp_path: Path, model_type: str) -> None:
    """llama.cpp rounds the inputs of quantized matmuls to 8 bits, so predictions agree up to that."""
    settings = MODELS[model_type] | {"tie_word_embeddings": True}
    model = quantized_model(tmp_path / "q", mixed, model_type, **settings)
    found = exported(model, "gguf", tmp_path / "out", wider=True)
    assert set(found.stored) >= {
        "4-bit g32 as Q4_0",
        "4-bit g32 asym as Q5_0",
        "6-bit g64 as Q8_0",
        "8-bit g64 as Q8_0",
    }
    assert_llama_cpp_agrees(model, tmp_path / "out", 2e-3)


@pytest.mark.parametrize("scaling", ["llama3", "linear"])
def test_llama_cpp_turns_heads_by_the_scaled_frequencies(tmp_path: Path, scaling: str) -> None:
    rope: dict[str, Any] = {"rope_type": scaling, "rope_theta": 10000.0, "factor": 4.0}
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = quantized_model(tmp_path / "q", lambda _: FLOAT, rope_parameters=rope)
    exported(model, "gguf", tmp_path / "out")
    assert_llama_cpp_agrees(model, tmp_path / "out", 1e-6)


def assert_llama_cpp_agrees(model: Artifact[QuantizedModel], folder: Path, bound: float) -> None:
    with llama_server(folder / "model.gguf", VOCAB) as (predict, _):
        assert divergence(model, predict) < bound


def divergence(model: Artifact[QuantizedModel], predict: Predict) -> float:
    """The largest KL after a short and a long prompt."""
    logits = QuantizedReference(model.folder)(TOKENS).astype(np.float64)
    found: list[float] = []
    for end in (2, 17, len(TOKENS)):
        ours, theirs = logits[end - 1], predict(TOKENS[:end])
        ours, theirs = (row - np.logaddexp.reduce(row) for row in (ours, theirs))
        found.append(float((np.exp(ours) * (ours - theirs)).sum()))
    assert np.isfinite(found).all()
    return max(found)


@pytest.mark.parametrize("defect", ["rows", "rope"])
def test_the_comparison_with_llama_cpp_notices_a_wrong_layout(
    tmp_path: Path, defect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of Q and K in Hugging Face's order; rotary scaling left out."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    settings = {"rope_parameters": rope} if defect == "rope" else {}
    model = quantized_model(tmp_path / "q", lambda _: FLOAT, **settings)
    if defect == "rope":
        monkeypatch.setattr(gguf_metadata, "_rope_factors", lambda _: None)
    else:
        monkeypatch.setitem(gguf_metadata.ARCHITECTURES, "llama", gguf_metadata.Architecture("llama"))
    exported(model, "gguf", tmp_path / "out")
    with llama_server(tmp_path / "out" / "model.gguf", VOCAB) as (predict, _):
        assert divergence(model, predict) > 1e-4


def test_a_gguf_file_is_read_as_a_source_with_the_same_weights(tmp_path: Path) -> None:
    """Q5_0 apart, which transformers does not read."""
    model = quantized_model(
        tmp_path / "q", lambda name: INT8 if "k_proj" in name else mixed(name), tie_word_embeddings=True
    )
    exported(model, "gguf", tmp_path / "out", wider=True)
    assert_same_weights(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("gemma2", {}, "a model of type gemma2"),
        ("mistral", {"sliding_window": 64}, "sliding-window"),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "scaling linear"),
    ],
)
def test_gguf_refuses_models_that_llama_cpp_computes_differently(
    tmp_path: Path, model_type: str, settings: dict[str, Any], message: str
) -> None:
    model = quantized_model(tmp_path / "q", lambda _: FLOAT, model_type, **settings)
    with pytest.raises(ExportError, match=message):
        exported(model, "gguf", tmp_path / "out")


TEXTS = (
    "def f(x):\n    return 10 * x  # naïve\n\n\n",
    "don't  DON'T we'll\t1234567 3.14, ½ ²",
    " Ünïcode 日本語 emoji 🙂🙂 <|im_start|>user\nhi<|im_end|>",
    "camelCaseWord /path/to/file\r\n;;;   ",
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
BYTES_ONLY = BYTES | {"use_regex": False}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


PRE_TOKENIZERS = {"gpt-2": [BYTES], "smollm": [{"type": "Digits", "individual_digits": True}, BYTES]} | {
    name: [split(pattern), BYTES_ONLY] for pattern, name in gguf_metadata.SPLITS.items()
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_llama_cpp_cuts_text_into_the_same_tokens(tmp_path: Path, name: str) -> None:
    merges = json.loads((tiny_checkpoint() / "tokenizer.json").read_text())["model"]
    changed = {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name]},
        "model": merges | {"ignore_merges": name == "llama-bpe"},
    }
    model = quantized_model(tmp_path / "q", lambda _: FLOAT, tokenizer=changed)
    exported(model, "gguf", tmp_path / "out")
    tokenizer: Any = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    with llama_server(tmp_path / "out" / "model.gguf", VOCAB) as (_, tokenize):
        for text in TEXTS:
            assert tokenize(text) == tokenizer.encode(text).ids, text


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"\d+"), BYTES_ONLY]}},
        {"normalizer": {"type": "Lowercase"}},
    ],
    ids=["metaspace", "another split", "normalizer"],
)
def test_gguf_refuses_a_tokenizer_that_llama_cpp_would_cut_differently(
    tmp_path: Path, tokenizer: dict[str, Any]
) -> None:
    model = quantized_model(tmp_path / "q", lambda _: FLOAT, tokenizer=tokenizer)
    with pytest.raises(ExportError, match="a tokenizer that is none of gpt-2"):
        exported(model, "gguf", tmp_path / "out")


# --- all formats


@pytest.mark.parametrize("name", write.FORMATS)
def test_scales_outside_float16_are_never_rounded(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny_down_projections(scheme: Scheme, weight: Any) -> Any:
        found = stored_by_rtn(scheme, weight)
        return replace(found, scales=found.scales * np.float32(1e-7)) if weight.shape == (64, 192) else found

    monkeypatch.setattr("tests.quantized.stored_by_rtn", tiny_down_projections)
    model = quantized_model(tmp_path / "q", only_linears(INT4))
    found = exported(model, name, tmp_path / "out", wider=True)
    wider = {item["tensor"].split(".")[-2]: item["reason"] for item in found.wider}
    assert wider == ({} if name == "compressed-tensors" else {"down_proj": SCALES})
    assert_same_weights(model, tmp_path / "out")


@pytest.mark.parametrize("name", ["autoawq", "compressed-tensors"])
def test_companions_are_carried_byte_for_byte(tmp_path: Path, name: str) -> None:
    model = quantized_model(tmp_path / "q", only_linears(INT4))
    exported(model, name, tmp_path / "out")
    companions = {path.name for path in model.folder.iterdir()} - {"record.json", "model.safetensors", "config.json"}
    assert companions >= {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == companions | {"model.safetensors", "config.json"}
    for file in companions:
        assert (tmp_path / "out" / file).read_bytes() == (model.folder / file).read_bytes()


@pytest.mark.parametrize("name", write.FORMATS)
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized_model(tmp_path / "q", only_linears(INT4))

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(model.folder, name, tmp_path / "out", wider=False, progress=stop)
    assert not list(tmp_path.glob("*out*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
    with pytest.raises(ArtifactError, match=r"0.0 GB are free"):
        exported(model, name, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_folder_that_exists_is_kept(tmp_path: Path) -> None:
    model = quantized_model(tmp_path / "q", only_linears(INT4))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(ArtifactError, match="out exists"):
        exported(model, "autoawq", tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "mine"


def test_the_command_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = quantized_model(tmp_path / "q", mixed)
    words = ["export-checkpoint", str(model.folder), "--to", str(tmp_path / "out"), "--json", "--format"]
    assert main([*words, "gguf"]) == 2 and "--wider" in capsys.readouterr().err
    assert main([*words, "awq"]) == 2 and "autoawq, compressed-tensors, gguf" in capsys.readouterr().err
    assert main([*words, "gguf", "--wider"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == model.digest and found["bytes"] == (tmp_path / "out" / "model.gguf").stat().st_size
    assert {"tensor", "scheme", "stored", "reason"} == set(found["wider"][0])


@pytest.mark.parametrize("name", ["autoawq", "compressed-tensors"])
def test_large_checkpoints_are_cut_into_shards(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized_model(tmp_path / "q", only_linears(INT4))
    monkeypatch.setattr("quantization.checkpoint_formats.source.SHARD_BYTES", 100_000)
    exported(model, name, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert_same_weights(model, tmp_path / "out")


ODD = [
    ("a", (3, 5), np.int8),
    ("b", (7,), np.float16),
    ("c", (4, 4), np.float32),
    ("d", (3,), np.int32),
    ("e", (2,), np.int64),
]


@given(st.permutations(ODD * 2), st.integers(1, 120))
def test_shards_hold_tensors_of_any_size_in_any_order(order: list[Any], shard_bytes: int) -> None:
    """Readers in torch refuse a tensor that does not begin at a multiple of its element size."""
    generator = np.random.default_rng(0)
    tensors = {
        f"{name}{at}": generator.integers(-100, 100, shape).astype(dtype)
        for at, (name, shape, dtype) in enumerate(order)
    }
    with tempfile.TemporaryDirectory() as folder:
        writer = ShardWriter(Path(folder), shard_bytes=shard_bytes)
        for name, array in tensors.items():
            writer.add(name, array)
        writer.finish()
        read = {name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in load_file(path).items()}
        index = Path(folder) / INDEX
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        assert files == {path.name for path in Path(folder).glob("*.safetensors")}
    assert read.keys() == tensors.keys()
    assert all(np.array_equal(read[name].numpy(), array) for name, array in tensors.items())


def test_a_shard_ends_where_the_room_for_its_header_does(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=1 << 30)
    for at in range(3000):
        writer.add(f"model.layers.{at}.{'a' * 40}", np.array([at], np.float32))
    writer.finish()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 3 and sum(len(load_file(path)) for path in files) == 3000


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=4))
def test_floats_are_narrowed_only_where_nothing_is_lost(values: list[float]) -> None:
    weight = np.array(values, np.float32)
    dtype, stored = narrowed(weight)
    read = (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else stored.astype(np.float32)
    assert np.array_equal(read.view(np.uint32), weight.view(np.uint32))
    fits = [
        torch.equal(torch.tensor(weight).to(t).float(), torch.tensor(weight)) for t in (torch.float16, torch.bfloat16)
    ]
    assert (dtype == "F32") == (not any(fits))


def through_the_stages(checkpoint: Path, folder: Path) -> Artifact[QuantizedModel]:
    """Exported, calibrated and quantized: the MLPs in 4 bits, all else in float."""
    recipe = BaseRecipe(
        model=ModelSource(source="file:m"),
        data=DataSource(source="file:d"),
        calibrate=Calibrate(samples=4, tokens=32),
        plan=Plan(
            schemes=(
                Rule(match="*.gate_up", bits=4, group_size=32),
                Rule(match="*.down", bits=4, group_size=32),
                Rule(match="*", bits=32),
            ),
            embeddings=FLOAT,
            kv_cache=KVCache(dtype="float32"),
        ),
        quantize=Quantize(candidates=("rtn",)),
    )
    graph = export(checkpoint, "", folder / "graph", max_positions=128, tolerance=1e-3, seed=0, parents={})
    calibration = calibrate(recipe.calibrate, graph, tiny_texts(4, 0), folder / "calibration")
    plan = written_plan(recipe, graph, folder / "plan")
    return quantize(recipe.quantize, graph, calibration, plan, folder / "q")


@pytest.mark.parametrize(
    ("dtype", "tied"), [(torch.bfloat16, True), (torch.float16, False)], ids=["bfloat16-tied", "float16-untied"]
)
def test_a_sharded_half_checkpoint_stays_the_same_through_all_stages(
    tmp_path: Path, dtype: torch.dtype, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """export -> calibrate -> quantize (float and 4-bit linears) -> export-checkpoint, both in shards."""
    settings = {"tie_word_embeddings": tied, "intermediate_size": 1024}  # mostly linears: else it is no smaller
    source = float_checkpoint(tmp_path / "checkpoint", dtype=dtype, **settings)
    original = load_file(source / "model.safetensors")
    assert ("lm_head.weight" in original) != tied and {t.dtype for t in original.values()} == {dtype}
    shard(source)
    monkeypatch.setattr("quantization.checkpoint_formats.source.SHARD_BYTES", 100_000)
    exported(through_the_stages(source, tmp_path), "autoawq", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    stored = {name: part for path in (tmp_path / "out").glob("*.safetensors") for name, part in load_file(path).items()}
    floats = {name for name in original if "mlp" not in name}
    for name in floats:
        assert torch.equal(stored[name].float(), original[name].float()), name
        assert stored[name].dtype in (torch.float16, torch.bfloat16), name
    assert set(stored) == floats | {
        f"model.layers.{layer}.mlp.{part}_proj.{tensor}"
        for layer in range(2)
        for part in ("gate", "up", "down")
        for tensor in AWQ_PARTS
    }
