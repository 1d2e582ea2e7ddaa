"""LoRA adapters are merged into the weights as PEFT defines it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.export.adapter import merge_adapter
from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.export import export
from pipeline.sources.fetch import fetch
from tapeout.adapters import read_adapter
from tapeout.errors import ExportError
from tests import checkpoints
from tests.families import MAX_POSITIONS, random_model
from tests.unit.test_sources import recipe, sound_tables


@pytest.mark.parametrize(("settings", "scale"), [({}, 2.0), ({"use_rslora": True}, 4.0), ({"lora_alpha": 1}, 0.25)])
def test_a_merge_by_hand(tmp_path: Path, settings: dict[str, Any], scale: float) -> None:
    model, before = random_model("llama"), random_model("llama").state_dict()
    tensors = checkpoints.adapter(tmp_path / "adapter", model, **settings)
    merge_adapter(model, tmp_path / "adapter")
    changed: set[str] = set()
    for name, weight in model.state_dict().items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in tensors:
            product = tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]
            torch.testing.assert_close(weight, before[name] + scale * product)
            changed.add(name)
        else:
            assert torch.equal(weight, before[name]), name
    assert len(changed) == 2 * 2  # two linears of two layers


def test_weights_that_are_stored_the_other_way_round(tmp_path: Path) -> None:
    """gpt2's are [in, out]."""
    model = random_model("gpt2")
    name = "transformer.h.1.attn.c_attn"
    before = model.get_parameter(f"{name}.weight").clone()
    up, down = torch.randn(192, 2), torch.randn(2, 64)
    (tmp_path / "adapter").mkdir()
    tensors = {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config | {"layers_to_transform": [1]}))
    merge_adapter(model, tmp_path / "adapter")
    torch.testing.assert_close(model.get_parameter(f"{name}.weight"), before + (up @ down).T)


def test_modules_that_were_trained_as_a_whole(tmp_path: Path) -> None:
    model = random_model("llama")
    tensors = checkpoints.adapter(tmp_path / "adapter", model, modules_to_save=["lm_head"])
    head = torch.randn(model.lm_head.weight.shape)
    tensors["base_model.model.lm_head.weight"] = head
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    merge_adapter(model, tmp_path / "adapter")
    assert torch.equal(model.lm_head.weight, head)


def test_an_adapter_is_read_without_a_model(tmp_path: Path) -> None:
    """Names and shapes alone, which whoever runs it has, too."""
    checkpoints.adapter(tmp_path / "adapter", random_model("llama"))
    adapter = read_adapter(tmp_path / "adapter")
    modules = dict.fromkeys([*adapter.pairs, "model.norm", "lm_head"], True)
    adapter.require_targets(modules, "Llama")
    missing = "model.layers.7." + next(iter(adapter.pairs)).rpartition(".layers.")[2].partition(".")[2]
    with pytest.raises(ExportError, match=f"lacks tensors for {missing}"):
        adapter.require_targets(modules | {missing: True}, "Llama")
    for module, (down, up) in adapter.pairs.items():
        assert down.shape[0] == up.shape[1] == adapter.rank
        adapter.require_shapes(module, up.shape[0], down.shape[1])
        with pytest.raises(ExportError, match=r"lora_A\.weight of the adapter is"):
            adapter.require_shapes(module, up.shape[0], down.shape[1] + 1)


def test_an_adapter_is_fetched_merged_and_exported(tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint")
    model = load_checkpoint(folder).model
    checkpoints.adapter(tmp_path / "adapter", model)
    asked = recipe(f"file:{folder}", f"file:{sound_tables(tmp_path / 'tables')}")
    named = asked.model.model_copy(update={"adapter": f"file:{tmp_path / 'adapter'}"})
    source = fetch(asked.model_copy(update={"model": named}), tmp_path / "source")
    assert source.record.adapter_source == f"file:{tmp_path / 'adapter'}"
    assert source.record.adapter_entry == "adapter" and "adapter/adapter_model.safetensors" in source.files
    assert fetch(asked, tmp_path / "without").digest != source.digest
    entry = source.folder / source.record.model_entry
    adapter = source.folder / source.record.adapter_entry
    limits: dict[str, Any] = {"max_positions": MAX_POSITIONS, "tolerance": 1e-3, "seed": 0}
    graph = export(entry, "", tmp_path / "graph", adapter=adapter, parents={"source": source}, **limits)
    merge_adapter(model, tmp_path / "adapter")
    exported = load_checkpoint(graph.folder).model
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), model.parameters(), strict=True))
    assert graph.parents["source"].digest == source.digest
