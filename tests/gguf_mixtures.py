"""GGUF files of small mixtures of experts, written from a checkpoint folder as llama.cpp's converter writes them.

Names are those of the gguf package; how experts are split is written down here a second time, as the converter does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from tapeout.mapped_weights import CodedParameter
from tests.checkpoints import CONFIG, WEIGHTS, Tensors
from tests.quantized import float_checkpoint
from tests.stored_formats import EXAMPLES
from tests.tiny import tiny_checkpoint

ARCHITECTURES = {  # by model_type
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe",
    "olmoe": "olmoe",
    "mixtral": "llama",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
}
# Beside those of tests/quantized.py.
_GRANITE: Mapping[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
    "tie_word_embeddings": True,
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True},
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
        "sliding_window": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 160,
    },
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 96},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 96},
    "granitemoe": _GRANITE,
    "granitemoeshared": {**_GRANITE, "shared_intermediate_size": 160},
}


def checkpoint(folder: Path, kind: str, *, coded: bool = False, **settings: Any) -> Path:
    """The checkpoint folder of a mixture with random weights; ``coded``: with experts in MXFP4."""
    float_checkpoint(folder, kind, **(dict(SETTINGS[kind]) | settings))
    if coded:
        EXAMPLES["mxfp4 of gpt-oss"].store_in(folder)
    return folder


def write_mixture(
    path: Path,
    source: Path,
    *,
    types: Mapping[str, str] | None = None,
    change: Callable[[Tensors], object] = lambda _: None,
    metadata: Mapping[str, Any] | None = None,
    more: Callable[[Any], object] = lambda _: None,
    token: tuple[int, str] | None = None,
) -> Path:
    """``source``: a checkpoint folder of float32. ``types``: of matrices that are not F32, by what their names end in.

    ``change`` gets the tensors of the file. ``metadata``: keys without the architecture; None takes one out. ``more``
    gets the writer. ``token``: an id, and a control token that takes its place.
    """
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize

    config = json.loads((source / CONFIG).read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config["num_hidden_layers"])
    writer = GGUFWriter(path, architecture)
    for key, value in (described(config) | dict(metadata or {})).items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    add_tokenizer(writer, config, token)
    more(writer)
    tensors: Tensors = {}
    for name, tensor in split(load_file(source / WEIGHTS), config):
        # As Qwen3-MoE names experts, of which the package knows stacked ones.
        known = name.replace("block_sparse_moe.experts.", "mlp.experts.")
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        tensors[stored] = tensor
    change(tensors)
    for name, tensor in tensors.items():
        ending = next((end for end in types or {} if name.endswith(end) and tensor.ndim > 1), "")
        kind = GGMLQuantizationType[(types or {}).get(ending, "F32")]
        if tensor.dtype == torch.uint8:  # codes already
            coded = GGMLQuantizationType[(types or {}).get(ending, "MXFP4")]
            writer.add_tensor(name, tensor.numpy(), raw_dtype=coded)
        else:
            writer.add_tensor(name, quantize(tensor.float().contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the converter says of a model."""
    rope, heads = config["rope_parameters"], config["num_attention_heads"]
    found: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    if config.get("head_dim"):
        found |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if rope["rope_type"] != "default":
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found |= {f"rope.scaling.yarn_{name}": rope[name] for name in ("beta_fast", "beta_slow") if name in rope}
    match config["model_type"]:
        case "gpt_oss":
            found |= {"expert_feed_forward_length": config["intermediate_size"]}
            found |= {"attention.sliding_window": config["sliding_window"]}
        case "mixtral":
            found |= {"vocab_size": config["vocab_size"], "rope.dimension_count": config["hidden_size"] // heads}
        case "granitemoe" | "granitemoeshared":
            found |= {
                "vocab_size": config["vocab_size"],
                "rope.dimension_count": config["hidden_size"] // heads,
                "attention.scale": config["attention_multiplier"],
                "embedding_scale": config["embedding_multiplier"],
                "residual_scale": config["residual_multiplier"],
                "logit_scale": config["logits_scaling"],
                "expert_shared_feed_forward_length": config.get("shared_intermediate_size"),
            }
        case _:
            pass
    return found


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def add_tokenizer(writer: Any, config: Mapping[str, Any], token: tuple[int, str] | None) -> None:
    """That of the tiny llama."""
    vocabulary = json.loads((tiny_checkpoint() / "tokenizer.json").read_text())["model"]
    tokens = sorted(vocabulary["vocab"], key=lambda each: vocabulary["vocab"][each])
    kinds = [3] * 3 + [1] * (config["vocab_size"] - 3)
    merges = vocabulary["merges"]
    if token:
        old, tokens[token[0]], kinds[token[0]] = tokens[token[0]], token[1], 3
        merges = [pair for pair in merges if old not in (*pair, "".join(pair))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def split(tensors: Tensors, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint by the names that the gguf package knows, gates and ups apart, experts stacked."""
    kind, heads, kv_heads = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    for name, tensor in stacked(tensors).items():
        block, _, last = name.rpartition(".")
        if last.endswith("_scales"):
            continue
        if last.endswith("_blocks"):
            tensor = mxfp4_bytes(tensor, tensors[name.replace("_blocks", "_scales")])
            last = last.removesuffix("_blocks")
        elif kind == "gpt_oss" and last in ("gate_up_proj", "down_proj"):
            tensor = tensor.transpose(1, 2)
        if kind in ("mixtral", "granitemoe", "granitemoeshared") and block.endswith(("q_proj", "k_proj")):
            count = heads if block.endswith("q_proj") else kv_heads
            tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        bias = last.endswith("_bias")
        if last in ("gate_up_proj", "gate_up_proj_bias"):
            if kind == "gpt_oss":
                gate, up = tensor[:, ::2], tensor[:, 1::2]
            else:
                gate, up = tensor.chunk(2, 1)
            for part, value in (("gate_proj", gate), ("up_proj", up)):
                yield f"{block}.{part}.{'bias' if bias else 'weight'}", value
        elif last in ("down_proj", "down_proj_bias"):
            yield f"{block}.down_proj.{'bias' if bias else 'weight'}", tensor
        elif block.endswith("shared_mlp.input_linear"):
            for part, value in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield f"{block.removesuffix('shared_mlp.input_linear')}mlp.shared_expert.{part}.weight", value
        elif block.endswith("shared_mlp.output_linear"):
            yield f"{block.removesuffix('shared_mlp.output_linear')}mlp.shared_expert.down_proj.weight", tensor
        elif last == "sinks":
            yield f"{name}.weight", tensor
        elif block.endswith("shared_expert_gate"):
            yield name, tensor.squeeze(0)
        else:
            yield name, tensor


def stacked(tensors: Tensors) -> Tensors:
    """Names of one form: experts of a layer together, as ``mlp.experts.gate_up_proj`` and ``down_proj``."""
    found: Tensors = {}
    experts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        before, experts_, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if experts_ and number.isdigit():
            experts.setdefault(before, {}).setdefault(part, {})[int(number)] = tensor
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            found[f"{name.removesuffix('input_linear.weight')}experts.gate_up_proj"] = tensor
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            found[f"{name.removesuffix('output_linear.weight')}experts.down_proj"] = tensor
        else:
            found[name] = tensor
    for before, parts in experts.items():
        by_part = {part: torch.stack([each[n] for n in range(len(each))]) for part, each in parts.items()}
        gate, up, down = (
            by_part[ours if ours in by_part else theirs]
            for ours, theirs in (
                ("gate_proj.weight", "w1.weight"),
                ("up_proj.weight", "w3.weight"),
                ("down_proj.weight", "w2.weight"),
            )
        )
        found[f"{before}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        found[f"{before}.experts.down_proj"] = down
    return found


def mxfp4_bytes(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[E, N, K/32 * 17]``: of a block its scale, then 16 bytes: code i in the low bits of byte i, code i + 16 in the
    high ones."""
    octets: NDArray[np.uint8] = blocks.numpy()
    codes = np.empty((*octets.shape[:-1], 32), np.uint8)
    codes[..., ::2], codes[..., 1::2] = octets & 15, octets >> 4
    packed = codes[..., :16] | codes[..., 16:] << 4
    whole = np.concatenate([scales.numpy()[..., None], packed], axis=-1)
    return torch.from_numpy(whole.reshape(*blocks.shape[:2], -1).copy())


def values(model: Any) -> dict[str, torch.Tensor]:
    """Weights by name, in the type they are held in; those that are codes in float32."""
    return {
        name: p.stored.read_float32() if isinstance(p, CodedParameter) else p.detach()
        for name, p in model.named_parameters()
    }


def differing(model: Any, other: Any) -> list[str]:
    """Names of parameters that are not the same in value and type."""
    one, two = values(model), values(other)
    assert one.keys() == two.keys()
    return [name for name, value in one.items() if value.dtype != two[name].dtype or not torch.equal(value, two[name])]
