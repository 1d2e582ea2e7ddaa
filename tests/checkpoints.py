"""Checkpoints that a test changes: small models with random weights as folders and as GGUF files, and adapters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quantization.checkpoint_formats.compressed import quantization_config
from tapeout.schemes import Scheme
from tests.families import random_model, save_checkpoint
from tests.tiny import tiny_checkpoint

WEIGHTS, CONFIG = "model.safetensors", "config.json"
Tensors = dict[str, torch.Tensor]


def checkpoint(folder: Path, family: str = "llama") -> Path:
    """A new checkpoint folder of a family of ``tests/families.py``."""
    return save_checkpoint(_model(family), folder)


@cache
def _model(family: str) -> Any:
    return random_model(family)


def change_weights(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def change_json(path: Path, **values: Any) -> None:
    """Set keys; None removes one."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def say_schemes(folder: Path, linears: Mapping[str, Scheme], embeddings: Mapping[str, Scheme] | None = None) -> None:
    """Describe quantized parameters in config.json, as quantize does."""
    path = folder / CONFIG
    config = json.loads(path.read_text()) if path.exists() else {}
    config["quantization_config"] = quantization_config(linears, embeddings or {}, [])
    path.write_text(json.dumps(config))


def shard(folder: Path) -> dict[str, str]:
    """Cut the weights into two shards with an index, which is returned."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name].clone() for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    body = {"metadata": {"total_size": 1}, "weight_map": dict(weight_map)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(body))


def gguf_file(
    path: Path,
    change: Callable[[Tensors], object] = lambda _: None,
    title: str = "tiny",
    types: Mapping[str, str] | None = None,
    sampling: Mapping[str, float] | None = None,
    without: str = "",
    **metadata: float | str,
) -> Path:
    """The trained tiny llama as a GGUF file; ``metadata``: more keys of it, with ``__`` for a point. ``without``: a key
    that it lacks.

    ``types``: of tensors that are not F32. ``sampling``: keys of ``general.sampling``.
    """
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize

    source = tiny_checkpoint()
    config = json.loads((source / CONFIG).read_text())
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]
    writer = GGUFWriter(path, "llama")
    writer.add_name(title)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary["vocab"], key=lambda token: vocabulary["vocab"][token]))
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_token_types([3] * 3 + [1] * (config["vocab_size"] - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.kv_data[0].pop(without, None)
    for key, value in metadata.items():
        name = f"llama.{key.replace('__', '.')}"
        writer.add_string(name, value) if isinstance(value, str) else writer.add_float32(name, value)
    for key, value in (sampling or {}).items():
        name = f"general.sampling.{key}"
        writer.add_int32(name, value) if isinstance(value, int) else writer.add_float32(name, value)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    tensors: Tensors = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        for part, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
            if part in name:  # GGUF pairs the channels of a head in another order
                shape = tensor.shape
                tensor = tensor.reshape(heads, 2, -1, shape[1]).transpose(1, 2).reshape(shape)
        tensors[stored] = tensor.float()
    change(tensors)
    for name, tensor in tensors.items():
        kind = GGMLQuantizationType[(types or {}).get(name, "F32")]
        writer.add_tensor(name, quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def adapter(folder: Path, model: Any, targets: tuple[str, ...] = ("q_proj", "down_proj"), **settings: Any) -> Tensors:
    """A LoRA adapter of rank 4 for every linear of these names, as peft saves it; its tensors."""
    generator = torch.Generator().manual_seed(5)
    tensors: Tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            for part, shape in (("A", (4, module.in_features)), ("B", (module.out_features, 4))):
                key = f"base_model.model.{name}.lora_{part}.weight"
                tensors[key] = torch.randn(shape, generator=generator) * 0.1
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/tiny", "bias": "none"}
    config |= {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": list(targets), "fan_in_fan_out": False}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return tensors
