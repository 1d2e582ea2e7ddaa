"""Random checkpoints of a named shape load in transformers, whole, and with the scales that are promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.shapes import SHAPES, Shape, write

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 300}


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama-3.1-8b"])
def test_a_written_checkpoint_loads_without_a_missing_tensor(name: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    (texts / "tokenizer.json").write_text("{}")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    shape = Shape(SHAPES[name].architecture, {**SHAPES[name].config, **SMALL, **heads})
    count = write(shape, tmp_path / "model", texts, shard_bytes=60_000)
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == torch.bfloat16
    assert count == sum(parameter.numel() for parameter in model.parameters())
    down = model.model.layers[1].mlp.down_proj.weight.float()
    assert down.std().item() == pytest.approx(96**-0.5, rel=0.05)
    assert torch.equal(model.model.norm.weight.float(), torch.ones(64))
    again = write(shape, tmp_path / "again", texts, shard_bytes=60_000)
    assert again == count
    for path in (tmp_path / "model").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
