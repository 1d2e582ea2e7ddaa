"""GGUF files of mixtures of experts give the model of the checkpoint that they were made from; others are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch

from pipeline.export import gguf_experts
from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.export import export, find_stop_tokens
from pipeline.export.gguf import read_header
from pipeline.export.gguf_mixtures import MIXTURES, place_of
from pipeline.export.needs import BASE_BYTES, WRITTEN, needs
from pipeline.export.tokenizer import load_tokenizer
from quantization.compressed_tensors import open_checkpoint
from tapeout.errors import ExportError
from tests.checkpoints import Tensors
from tests.gguf_mixtures import ARCHITECTURES, SETTINGS, checkpoint, described, differing, values, write_mixture

EXPERT_TENSORS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
CODED = dict.fromkeys(EXPERT_TENSORS, "MXFP4")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoint folders by model_type; ``gpt_oss in MXFP4`` has its experts in codes. Do not write to them."""
    made: dict[str, Path] = {}

    def source(name: str) -> Path:
        if name not in made:
            kind, _, coded = name.partition(" in ")
            made[name] = checkpoint(tmp_path_factory.mktemp(kind), kind, coded=bool(coded))
        return made[name]

    return source


@pytest.mark.parametrize("name", [*SETTINGS, "gpt_oss in MXFP4"])
def test_a_file_gives_the_model_of_its_checkpoint(name: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    model = load_checkpoint(sources(name)).model
    write_mixture(tmp_path / "m.gguf", sources(name))
    found = load_checkpoint(tmp_path, "m.gguf").model
    assert not differing(model, found)
    assert type(found) is type(model)
    ours, theirs = ({**m.config.to_dict(), "architectures": [], "eos_token_id": 2} for m in (found, model))
    assert ours == theirs
    ids = torch.arange(3, 103)[None]  # longer than windows, and than what rotary scaling was trained for
    with torch.no_grad():
        assert torch.equal(found(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss in MXFP4"])
def test_an_export_is_that_of_the_checkpoint(name: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    source = sources(name)
    (tmp_path / "file").mkdir()
    write_mixture(tmp_path / "file/m.gguf", source)
    graphs = [
        export(folder, entry, tmp_path / f"graph{number}", max_positions=64, tolerance=1e-5, seed=0, parents={})
        for number, (folder, entry) in enumerate([(source, ""), (tmp_path / "file", "m.gguf")])
    ]
    assert plain(graphs[0].folder / "model.onnx") == plain(graphs[1].folder / "model.onnx")
    stored, found = (open_checkpoint(graph.folder) for graph in graphs)
    assert stored.names() == found.names()
    for parameter in stored.names():
        assert stored.stored_bytes(parameter) == found.stored_bytes(parameter)
        np.testing.assert_array_equal(stored.tensor(parameter), found.tensor(parameter))
    assert [graph.record.groups for graph in graphs[:1]] == [graph.record.groups for graph in graphs[1:]]
    assert graphs[1].record.dequantized == ("GGUF MXFP4" if "MXFP4" in name else None)


def plain(path: Path) -> bytes:
    """A graph without the places of its weights in their files."""
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        del tensor.external_data[:]
    return model.SerializeToString(deterministic=True)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "granitemoeshared"])
@pytest.mark.parametrize("stored", ["BF16", "F16"])
def test_matrices_keep_their_16_bits(kind: str, stored: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_mixture(tmp_path / "m.gguf", sources(kind), types={"weight": stored})
    model, found = load_checkpoint(sources(kind)).model, load_checkpoint(tmp_path, path.name).model
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16}[stored]
    for name, value in values(model).items():
        held = found.get_parameter(name)
        kept = dtype if value.ndim > 1 and not name.endswith("bias") else torch.float32
        assert held.dtype == kept and torch.equal(held, value.to(kept)), name


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_each_part_of_an_expert_is_dequantized_exactly(
    kind: str, sources: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any type, one expert at a time."""
    types = dict(zip(EXPERT_TENSORS, ("Q8_0", "Q5_1", "MXFP4"), strict=True)) | {"attn_v.weight": "Q4_0"}
    path = write_mixture(tmp_path / "m.gguf", sources(kind), types=types)
    floats = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(path).tensors}
    together: list[int] = []
    monkeypatch.setattr(gguf, "dequantize", seen(together, gguf.dequantize))
    model = load_checkpoint(tmp_path, path.name).model
    assert set(together) == {96, 32}  # rows: of one expert, of attn_v
    for layer in range(2):
        gate, up, down = (floats[f"blk.{layer}.{name}"] for name in EXPERT_TENSORS)
        experts = model.get_submodule(f"model.layers.{layer}.mlp.experts")
        if kind == "gpt_oss":
            both, down = torch.stack([gate, up], 2).flatten(1, 2).mT, down.mT
        else:
            both = torch.cat([gate, up], 1)
        assert torch.equal(experts.gate_up_proj, both) and experts.gate_up_proj.dtype == torch.float32
        if kind == "qwen3_moe":
            assert torch.equal(experts.down_proj.float(), down) and experts.down_proj.dtype == torch.bfloat16
        else:
            assert torch.equal(experts.down_proj.stored.read_float32(), down)
        name = f"model.layers.{layer}.self_attn.v_proj.weight"
        assert torch.equal(model.get_parameter(name), floats[f"blk.{layer}.attn_v.weight"])


def test_k_types_are_read_by_expert(tmp_path: Path) -> None:
    """As llama.cpp quantizes most files: super-blocks of 256 channels, here of random codes."""
    types, generator = {"ffn_gate_exps.weight": "Q4_K", "ffn_up_exps.weight": "Q6_K"}, np.random.default_rng(0)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)

    def coded(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(tuple(types))]:
            experts, rows, _ = tensors[name].shape
            octets = generator.integers(0, 256, (experts, rows, 144 if "gate" in name else 210), np.uint8)
            places = (slice(0, 2), slice(2, 4)) if "gate" in name else (slice(208, 210),)  # of the scales in float16
            for place in places:
                octets[..., place] = scale
            tensors[name] = torch.from_numpy(octets)

    source = checkpoint(tmp_path / "source", "qwen3_moe", hidden_size=256, num_hidden_layers=1)
    path = write_mixture(tmp_path / "m.gguf", source, types=types, change=coded)
    floats = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(path).tensors}
    found = load_checkpoint(tmp_path, path.name).model.model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(found, torch.cat([floats[f"blk.0.{name}"] for name in types], 1))


def seen(rows: list[int], dequantize: Callable[..., Any]) -> Callable[..., Any]:
    def watched(data: Any, kind: Any) -> Any:
        rows.append(data.shape[0])
        assert data.ndim == 2
        return dequantize(data, kind)

    return watched


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 2.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "beta_fast": 24.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "yarn"],
)
def test_rotary_scaling_is_read(rope: Mapping[str, Any], sources: Callable[[str], Path], tmp_path: Path) -> None:
    settings: Mapping[str, Any] = load_checkpoint(sources("qwen3_moe")).model.config.to_dict() | {
        "rope_parameters": rope
    }
    write_mixture(tmp_path / "m.gguf", sources("qwen3_moe"), metadata=described(settings))
    assert load_checkpoint(tmp_path, "m.gguf").model.config.rope_parameters == rope


def test_what_a_file_may_leave_out(sources: Callable[[str], Path], tmp_path: Path) -> None:
    """As llama.cpp reads it; the head size and the rotary base are what they are by default."""
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    harmless = {"expert_weights_norm": True, "expert_gating_func": 1, "expert_weights_scale": 1.0}
    harmless |= {
        "rope.scaling.finetuned": True,
        "rope.scaling.type": "none",
        "expert_shared_count": 0,
        "rope.dimension_count": 16,
    }

    def all_heads(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".attn_k.w" in name or ".attn_v." in name]:
            tensors[name] = torch.cat([tensors[name]] * 2)

    write_mixture(
        tmp_path / "m.gguf", sources("qwen3_moe"), change=all_heads, metadata=dict.fromkeys(absent) | harmless
    )
    config = load_checkpoint(tmp_path, "m.gguf").model.config
    assert (config.num_key_value_heads, config.head_dim, config.rope_parameters["rope_theta"]) == (4, 16, 10000.0)


@pytest.mark.parametrize(
    ("kind", "metadata", "message"),
    [
        ("qwen3_moe", {"expert_feed_forward_length": None}, "has no qwen3moe.expert_feed_forward_length"),
        ("qwen3_moe", {"expert_count": None}, "has no qwen3moe.expert_count"),
        ("qwen3_moe", {"expert_count": 0}, "says qwen3moe.expert_count = 0"),
        ("qwen3_moe", {"rope.freq_base": float("inf")}, "rope.freq_base = inf"),
        ("qwen3_moe", {"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon = nan"),
        ("qwen3_moe", {"expert_used_count": 7}, "expert_count = 6, qwen3moe.expert_used_count = 7"),
        ("qwen3_moe", {"expert_used_count": [2, 2]}, r"expert_used_count = \[2, 2\]"),
        ("qwen3_moe", {"expert_weights_norm": False, "expert_gating_func": 2}, "expert_gating_func = 2"),
        ("qwen2_moe", {"expert_weights_norm": True}, "expert_weights_norm = True"),
        ("qwen3_moe", {"expert_weights_scale": 2.5}, "expert_weights_scale = 2.5"),
        ("qwen3_moe", {"attention.sliding_window": 16}, "attention.sliding_window = 16"),
        ("qwen3_moe", {"attention.value_length": 32}, "attention.value_length = 32"),
        ("qwen3_moe", {"rope.dimension_count": 8}, "rope.dimension_count = 8"),
        ("qwen3_moe", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "rope.scaling.type = longrope"),
        ("qwen3_moe", {"rope.scaling.type": "yarn"}, "rope.scaling.type = yarn"),
        ("qwen3_moe", {"rope.scaling.factor": 2.0}, "rope.scaling.factor = 2.0"),
        ("gpt_oss", {"rope.scaling.yarn_attn_factor": 1.5}, "rope.scaling.yarn_attn_factor = 1.5"),
        ("gpt_oss", {"attention.sliding_window": None}, "has no gpt-oss.attention.sliding_window"),
        ("gpt_oss", {"attention.sliding_window_pattern": 3}, "attention.sliding_window_pattern = 3"),
        ("gpt_oss", {"expert_feed_forward_length": 64}, "expert_feed_forward_length = 64"),
        ("granitemoe", {"logit_scale": None}, "has no granitemoe.logit_scale"),
        ("qwen3_moe", {"block_count": 3}, r"lacks blk\.2\.attn_k.*in a qwen3moe with block_count 3"),
        ("qwen3_moe", {"block_count": 10**9}, "lacks"),
        ("qwen3_moe", {"block_count": 1}, r"holds blk\.1\.attn_k.* have no place in a qwen3moe with block_count 1"),
        ("qwen3_moe", {"expert_count": 5, "expert_used_count": 2}, r"ffn_gate_inp\.weight of m\.gguf is F32 \[6, 64\]"),
        ("qwen3_moe", {"expert_feed_forward_length": 48}, r"ffn_gate_exps\.weight of m\.gguf is F32 \[6, 96, 64\]"),
        ("qwen3_moe", {"attention.key_length": 32, "attention.value_length": 32}, r"attn_q\.weight .* \[64, 64\]"),
        ("qwen3_moe", {"vocab_size": 1000}, r"token_embd\.weight of m\.gguf is F32 \[1024, 64\]"),
    ],
)
def test_metadata_that_are_not_those_of_the_model_are_refused(
    kind: str, metadata: Mapping[str, Any], message: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    write_mixture(tmp_path / "m.gguf", sources(kind), metadata=metadata)
    with pytest.raises(ExportError, match=message) as caught:
        load_checkpoint(tmp_path, "m.gguf")
    assert caught.value.expected and caught.value.remedy


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def beside(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def fused(tensors: Tensors) -> None:
    gate, up = (tensors.pop(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up"))
    tensors["blk.0.ffn_gate_up_exps.weight"] = torch.cat([gate, up], 1)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen3_moe", without("blk.1.ffn_up_exps.weight"), r"lacks blk\.1\.ffn_up_exps\.weight in a qwen3moe"),
        ("qwen3_moe", without("token_embd.weight"), r"lacks token_embd\.weight"),
        (
            "qwen3_moe",
            fused,
            r"lacks .*ffn_gate_exps\.weight.*, and holds blk\.0\.ffn_gate_up_exps\.weight, which have",
        ),
        ("qwen3_moe", beside("blk.0.attn_q.bias", 64), r"holds blk\.0\.attn_q\.bias, which have no place"),
        ("qwen3_moe", beside("rope_freqs.weight", 8), r"holds rope_freqs\.weight \(rotary scaling\)"),
        ("gpt_oss", without("blk.0.attn_sinks.weight"), r"lacks blk\.0\.attn_sinks\.weight"),
        ("gpt_oss", without("blk.1.ffn_up_exps.bias"), r"lacks blk\.1\.ffn_up_exps\.bias"),
        ("gpt_oss", beside("blk.1.ffn_down_exps.bias", 6, 32), r"ffn_down_exps\.bias of m\.gguf is F32 \[6, 32\]"),
    ],
)
def test_tensors_that_are_not_those_of_the_architecture_are_refused(
    kind: str, change: Callable[[Tensors], object], message: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    write_mixture(tmp_path / "m.gguf", sources(kind), change=change)
    with pytest.raises(ExportError, match=message) as caught:
        load_checkpoint(tmp_path, "m.gguf")
    assert caught.value.expected and caught.value.remedy


def test_a_bias_that_is_quantized_is_refused(sources: Callable[[str], Path], tmp_path: Path) -> None:
    write_mixture(tmp_path / "m.gguf", sources("gpt_oss"), types={"ffn_down_exps.bias": "Q8_0"})
    with pytest.raises(ExportError, match=r"blk\.0\.ffn_down_exps\.bias of m\.gguf is Q8_0") as caught:
        load_checkpoint(tmp_path, "m.gguf")
    assert "of type F32, F16, BF16" in str(caught.value.expected)


@pytest.mark.parametrize("architecture", ["deepseek2", "qwen35moe", "granite"])
def test_a_mixture_of_another_architecture_is_refused_by_its_name(architecture: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_expert_count(4)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((2, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ExportError, match=f"mixture of experts of architecture {architecture}") as caught:
        load_checkpoint(tmp_path, "m.gguf")
    assert caught.value.expected == "of qwen3moe, gpt-oss, qwen2moe, olmoe, llama, granitemoe"
    assert needs(tmp_path, "m.gguf").disk_bytes == 32


def test_a_part_of_a_file_is_refused(sources: Callable[[str], Path], tmp_path: Path) -> None:
    def split(writer: Any) -> None:
        writer.add_uint16("split.count", 3)

    write_mixture(tmp_path / "m.gguf", sources("qwen3_moe"), more=split)
    with pytest.raises(ExportError, match="is one of 3 parts") as caught:
        load_checkpoint(tmp_path, "m.gguf")
    assert "llama-gguf-split --merge" in str(caught.value.remedy)


@pytest.mark.parametrize("name", ["gpt_oss in MXFP4", "qwen3_moe"])
def test_what_is_said_to_be_needed_is_what_is_written(
    name: str, sources: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.export.needs.SEGMENT_BYTES", 0)
    types = {"_exps.weight": "BF16"} if name == "qwen3_moe" else {}
    write_mixture(tmp_path / "m.gguf", sources(name), types=types)
    loaded = load_checkpoint(tmp_path, "m.gguf", tmp_path / "scratch")
    stored = open_checkpoint(loaded.weights)
    found = needs(tmp_path, "m.gguf")
    assert found.disk_bytes == sum(stored.stored_bytes(parameter) for parameter in stored.names())
    largest = max(parameter.numel() for parameter in loaded.model.parameters())
    read = loaded.model.get_input_embeddings().weight.numel()  # at once, which is more than an expert
    checked, dequantized = 2 * 4 * largest, WRITTEN * 4 * read
    assert found.memory_bytes == BASE_BYTES + max(checked, dequantized)


def test_codes_outlive_the_files_that_they_were_written_to(sources: Callable[[str], Path], tmp_path: Path) -> None:
    write_mixture(tmp_path / "m.gguf", sources("gpt_oss in MXFP4"))
    loaded = load_checkpoint(tmp_path, "m.gguf")
    assert not loaded.weights.exists()
    assert not differing(loaded.model, load_checkpoint(sources("gpt_oss in MXFP4")).model)


def test_a_scale_of_no_number_is_named(sources: Callable[[str], Path], tmp_path: Path) -> None:
    def broken(tensors: Tensors) -> None:
        tensors["blk.1.ffn_up_exps.weight"][3, 5, 17] = 255

    write_mixture(tmp_path / "m.gguf", sources("gpt_oss in MXFP4"), change=broken)
    with pytest.raises(ExportError, match=r"NaN or infinite weights in model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        load_checkpoint(tmp_path, "m.gguf")


@pytest.mark.parametrize("kind", ["olmoe", "gpt_oss", "mixtral"])
def test_tokenizers_are_those_of_the_checkpoint(kind: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] }}"
    write_mixture(tmp_path / "m.gguf", sources(kind), more=lambda writer: writer.add_chat_template(template))
    found, expected = load_tokenizer(tmp_path, "m.gguf"), load_tokenizer(sources(kind))
    assert found.chat_template == template
    text = "Once upon a time, 42 foxes.\n"
    assert found(text).input_ids == expected(text).input_ids
    assert found.get_vocab() == expected.get_vocab()


def test_a_call_of_a_tool_ends_an_answer_of_gpt_oss(sources: Callable[[str], Path], tmp_path: Path) -> None:
    write_mixture(tmp_path / "m.gguf", sources("gpt_oss"), token=(1023, "<|call|>"))
    stops = find_stop_tokens(load_checkpoint(tmp_path, "m.gguf").model, load_tokenizer(tmp_path, "m.gguf"))
    assert stops == (0, 2, 1023)  # <|endoftext|>, what the file names, <|call|>


def test_every_parameter_of_a_model_has_its_place_in_the_table(sources: Callable[[str], Path], tmp_path: Path) -> None:
    """And each tensor of the table is in the file that the gguf package's names make."""
    for kind, architecture in ARCHITECTURES.items():
        path = write_mixture(tmp_path / f"{kind}.gguf", sources(kind))
        mixture = MIXTURES[architecture]
        mixture = mixture.shared if kind == "granitemoeshared" else mixture
        assert mixture is not None and mixture.model_type == kind
        header = read_header(path)
        places = {name: place_of(mixture, name) for name in header.tensors}
        assert all(places.values())
        model = load_checkpoint(sources(kind)).model
        assert {place.parameter for place in places.values() if place} == dict(model.named_parameters()).keys()
        for name in gguf_experts.parameter_sizes(header):
            assert name.piece <= name.elements
