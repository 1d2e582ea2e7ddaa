"""A model that is run layer by layer, from files in any layout, computes what it computes as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tapeout.errors import ModelError
from tapeout.layer_stream import LayerState, LayerStream
from tapeout.mapped_model import unshare_layers
from tests.families import ALL_FAMILIES, VOCAB_SIZE, random_model
from tests.model_table import PAGE, rows_of

ACCEPTED = sorted(name for name, row in rows_of(PAGE.read_text()).items() if row.split(" | ")[2] == "yes")
TOKENS = torch.arange(5, 45)[None] * 7 % VOCAB_SIZE


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(**inputs, use_cache=False).logits


def test_the_table_of_models_says_which_families_are_accepted() -> None:
    assert len(ACCEPTED) > 50
    assert ALL_FAMILIES.keys() > set(ACCEPTED)


@pytest.mark.parametrize("family", ACCEPTED)
def test_every_accepted_family_computes_the_same(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    expected = logits(model, input_ids=TOKENS)
    unshare_layers(model)  # as an export writes them
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # each is in the file
    model.save_pretrained(tmp_path, save_original_format=False)
    torch.testing.assert_close(LayerStream(tmp_path).logits(input_ids=TOKENS), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_half_precision_and_sharded_checkpoints(dtype: torch.dtype, tied: bool, shard: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = random_model("llama", tie_word_embeddings=tied).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = logits(plain, input_ids=TOKENS)
    torch.testing.assert_close(LayerStream(tmp_path).logits(input_ids=TOKENS), expected, rtol=1e-6, atol=1e-6)


def test_positions_and_masks_reach_every_layer(tmp_path: Path) -> None:
    """A batch with padding and positions of its own, through a model with full and sliding attention."""
    model = random_model("gemma3")
    model.save_pretrained(tmp_path)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    inputs = {"input_ids": TOKENS.reshape(2, 20), "attention_mask": mask, "position_ids": mask.cumsum(1).clamp(min=1)}
    seen = mask.bool()
    torch.testing.assert_close(
        LayerStream(tmp_path).logits(**inputs)[seen], logits(model, **inputs)[seen], rtol=1e-6, atol=1e-6
    )


def test_a_layer_computes_the_same_loaded_or_not(tmp_path: Path) -> None:
    random_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    stream = LayerStream(tmp_path)
    with stream.loaded(0):
        loaded = stream.run(0, LayerState(), input_ids=TOKENS).hidden
    again = stream.run(0, LayerState(), input_ids=TOKENS).hidden
    assert loaded is not None and again is not None
    torch.testing.assert_close(loaded, again, rtol=0, atol=0)


def test_only_one_layer_is_in_memory(tmp_path: Path) -> None:
    random_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    stream = LayerStream(tmp_path)

    def in_memory() -> set[int]:
        """Layers whose parameters are float32; all others lie in the mapped file, in 16 bits."""
        return {n for n, layer in enumerate(stream.layers) if any(p.dtype == torch.float32 for p in layer.parameters())}

    assert {parameter.dtype for parameter in stream.model.parameters()} == {torch.bfloat16}
    with stream.loaded(1):
        assert in_memory() == {1}
    assert in_memory() == set()


def test_a_checkpoint_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    whole = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 parameters of LlamaForCausalLM, such as model\.layers\.1\.mlp"):
        LayerStream(tmp_path)
    save_file(tensors | {name: whole[:, 1:].contiguous()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj\.weight is \[64, 95\]"), LayerStream(tmp_path).loaded(1):
        pass
    tensors |= {name: whole, "model.layers.2.mlp.down_proj.weight": whole.clone()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"1 tensors beyond LlamaForCausalLM, such as model\.layers\.2\.mlp\.down_proj"
    ):
        LayerStream(tmp_path)


def test_layers_that_are_called_out_of_order_are_refused(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    stream = LayerStream(tmp_path)
    layers = stream.model.model.layers
    layers[1].forward = layers[0].forward
    with pytest.raises(ModelError, match="layer 0 of LlamaForCausalLM was called out of order"):
        stream.run(1, LayerState(), input_ids=TOKENS)
