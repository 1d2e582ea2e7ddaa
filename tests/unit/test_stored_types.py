"""Weights keep the type and the bytes they were published in, from the checkpoint to the portable graph."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.export.adapter import merge_adapter
from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.weights import save_model, tied_parameters
from tapeout.errors import ExportError
from tapeout.mapped_weights import weightless
from tests.checkpoints import WEIGHTS, adapter, change_json, change_weights, checkpoint, gguf_file, shard
from tests.exported import build_float, family_graph
from tests.families import FAMILIES, random_model, save_checkpoint

IDS = torch.arange(3, 30)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "bfloat16") for name in ("llama", "qwen2", "gemma2", "gpt2")]
    + [(name, "float16") for name in ("llama", "phi3", "opt", "cohere2")],
)
def test_a_16_bit_checkpoint_makes_the_engine_of_its_float32_copy(name: str, dtype: str, tmp_path: Path) -> None:
    layers = {"n_layer" if name == "gpt2" else "num_hidden_layers": 1}  # the second one has the same parameters
    stored, widened = family_graph(name, dtype, **layers), family_graph(name, dtype, "float32", **layers)
    tensors, copies = (load_file(graph.folder / WEIGHTS) for graph in (stored, widened))
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert tensors.keys() == copies.keys() and all(torch.equal(t.float(), copies[n]) for n, t in tensors.items())
    same = {"groups", "rotary", "embedding", "tied_embeddings", "stop_tokens", "heads", "kv_heads"}
    assert stored.record.model_dump(include=same) == widened.record.model_dump(include=same)
    bundles = [build_float(graph, tmp_path / f"{n}", slots=1) for n, graph in enumerate((stored, widened))]
    files = [{n: f.sha256 for n, f in bundle.files.items() if n in ("model.onnx", "weights.bin")} for bundle in bundles]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mapped_model_computes_what_its_float32_copy_does(name: str, tmp_path: Path) -> None:
    """To the bit, so that no family reads a 16-bit parameter without widening it."""
    expected = random_model(name)
    for parameter in expected.parameters():
        parameter.data = parameter.data.bfloat16().float()
    folder = save_checkpoint(deepcopy(expected).to(torch.bfloat16), tmp_path)
    model = load_checkpoint(folder).model
    ids = IDS % FAMILIES[name].vocab_size
    with torch.no_grad():
        found, wanted = (m(input_ids=ids, use_cache=False).logits for m in (model, expected))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_tensors_of_several_types_keep_theirs(tmp_path: Path) -> None:
    """Norms in float32 beside matrices in bfloat16, as some checkpoints are published."""
    folder = checkpoint(tmp_path / "checkpoint")
    change_weights(folder, lambda t: t.update({n: v.bfloat16() for n, v in t.items() if v.ndim > 1}))
    stored = load_file(folder / WEIGHTS)
    model = load_checkpoint(folder).model
    for name, parameter in model.named_parameters():
        assert parameter.dtype == stored[name].dtype and torch.equal(parameter, stored[name])
    expected = random_model("llama")
    expected.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    assert torch.equal(logits(model), logits(expected))
    assert all(parameter.dtype == stored[name].dtype for name, parameter in model.named_parameters())  # afterwards, too


def mapped(model: torch.nn.Module) -> dict[str, bool]:
    """Whether a parameter lies in the mapping of a file, also of one that was removed since."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps if ".safetensors" in " ".join(line)]
    return {
        name: any(low <= parameter.data_ptr() < high for low, high in spans)
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("stored_as", ["bfloat16", "fp8", "gguf"])
def test_parameters_of_a_checkpoint_take_no_memory_of_their_own(stored_as: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    if stored_as == "gguf":
        gguf_file(folder / "m.gguf")
    elif stored_as == "fp8":
        change_weights(folder, to_fp8)
        change_json(folder / "config.json", quantization_config={"quant_method": "fp8"})
    else:
        change_weights(folder, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
        shard(folder)
    model = load_checkpoint(folder, "m.gguf" if stored_as == "gguf" else "").model
    assert all(mapped(model).values()), mapped(model)
    adapter(tmp_path / "adapter", model)
    merge_adapter(model, tmp_path / "adapter")
    assert all(mapped(model).values()), mapped(model)


def test_dequantized_weights_lie_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux maps no file that is larger than its memory, and a float32 copy of a large model is."""
    gguf_file(tmp_path / "m.gguf")
    expected = logits(load_checkpoint(tmp_path, "m.gguf", tmp_path / "one").model)
    monkeypatch.setattr("pipeline.export.weights.SHARD_BYTES", 100_000)
    loaded = load_checkpoint(tmp_path, "m.gguf", tmp_path / "several")
    assert torch.equal(logits(loaded.model), expected) and all(mapped(loaded.model).values())
    assert [len(list((tmp_path / name).glob("*.safetensors"))) > 1 for name in ("one", "several")] == [False, True]
    graph = tmp_path / "graph"
    graph.mkdir()
    save_model(loaded.model, tied_parameters(loaded.model), loaded.weights, graph)
    for path in loaded.weights.iterdir():
        assert path.samefile(graph / path.name) or path.suffix == ".json"


def to_fp8(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1)


def test_a_trace_needs_no_weights_and_leaves_them(tmp_path: Path) -> None:
    model = load_checkpoint(checkpoint(tmp_path / "checkpoint")).model
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="stop"), weightless(model):
        assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 4 * len(before)
        raise RuntimeError("stop")
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_16_bit_weight_that_is_no_number_is_named(value: float, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")

    def break_one(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})
        tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = value

    change_weights(folder, break_one)
    with pytest.raises(ExportError, match=r"NaN or infinite weights in model\.layers\.1\.mlp\.down_proj\.weight"):
        load_checkpoint(folder)


def test_a_16_bit_head_that_is_stored_beside_the_embedding_it_shares(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint", "qwen2")
    change_weights(folder, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    change_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].float()}))
    assert load_checkpoint(folder).model.lm_head.weight.dtype == torch.bfloat16
    change_weights(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] * 1.01}))
    with pytest.raises(ExportError, match=r"stores lm_head\.weight and model\.embed_tokens\.weight with different"):
        load_checkpoint(folder)


def test_an_adapter_of_a_16_bit_model_is_merged_in_float32(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    change_weights(folder, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    model, name = load_checkpoint(folder).model, "model.layers.1.mlp.down_proj"
    tensors = adapter(tmp_path / "adapter", model)
    before = model.get_parameter(f"{name}.weight").float()
    merge_adapter(model, tmp_path / "adapter")
    up, down = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "BA")
    assert torch.equal(model.get_parameter(f"{name}.weight"), before + 2.0 * (up @ down))
    assert model.get_parameter("model.layers.1.mlp.up_proj.weight").dtype == torch.bfloat16
    expected = random_model("llama")
    expected.load_state_dict({n: value.float() for n, value in model.state_dict().items()})
    assert torch.equal(logits(model), logits(expected))
