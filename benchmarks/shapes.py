"""Write a checkpoint with random weights in the shape of a known model, to measure stages at real sizes.

python -m benchmarks.shapes llama-3.2-1b scratch/llama-1b --tokenizer artifacts/graph
python -m benchmarks.shapes llama-3.1-8b scratch/llama-8b --tokenizer artifacts/graph --layers 4

Weights are normal with a deviation of 1/sqrt(inputs), biases of 0.02, norms are 1, so hidden states keep their size
over the layers, and routers spread tokens over all experts. Decays of recurrences are drawn as Mamba2 initializes them
(state-spaces/mamba, `mamba_ssm/modules/mamba2.py`): time steps of 0.001 to 0.1, rates of 1 to 16. Tensors have the
names and shapes in which transformers publishes them, and are written one by one in bfloat16, in shards as published
models have them, experts of gpt-oss in MXFP4. Random weights tell of time and memory, and nothing of quality. The
tokenizer is that of another model: its ids are below the rows of the embedding.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peers.judge import Kind
from tapeout.tensor_writer import ShardWriter

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHARD_BYTES = 5 * 10**9  # as transformers cuts a checkpoint
PIECE = 1 << 24  # random numbers made at a time
MXFP4_BLOCK = 32  # numbers that share a scale
MXFP4_DEVIATION = 2.93  # of its sixteen values


@dataclass(frozen=True)
class Shape:
    """``architecture``: class of transformers. ``config``: what its configuration says beyond its defaults.

    ``kind``: which bars of speed it has; a hybrid with experts is recurrent. ``converter_flags``: what llama.cpp's
    converter must be told of it.
    """

    architecture: str
    config: dict[str, Any]
    kind: Kind = "dense"
    converter_flags: tuple[str, ...] = ()

    @property
    def is_mxfp4(self) -> bool:
        return self.config.get("quantization_config", {}).get("quant_method") == "mxfp4"

    @property
    def has_experts(self) -> bool:
        return any(name in self.config for name in ("num_experts", "num_local_experts"))

    def cut(self, layers: int) -> Shape:
        """Its first ``layers``: a step of a layer takes as long as in the whole model."""
        config: dict[str, Any] = {**self.config, "num_hidden_layers": layers}
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
        return replace(self, config=config)


def _qwen(hidden: int, layers: int, heads: int, intermediate: int) -> Shape:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    common = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": 2, "vocab_size": 151936}
    return Shape("Qwen2ForCausalLM", {"model_type": "qwen2", **sizes, **heads_of, **common})


def _llama(hidden: int, layers: int, intermediate: int, rope_factor: float, tied: bool) -> Shape:
    rope = {"rope_type": "llama3", "factor": rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    common = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_scaling": rope}
    return Shape("LlamaForCausalLM", {"model_type": "llama", **sizes, **heads, **common, "tie_word_embeddings": tied})


_OLMOE = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
_QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": _GPT_OSS_ROPE,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)
_LFM2 = {
    "model_type": "lfm2",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "layer_types": ["full_attention" if layer in _LFM2_ATTENTION else "conv" for layer in range(16)],
    "block_ff_dim": 12288,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "vocab_size": 65536,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
}
_QWEN35 = {
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(24)],
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
_GRANITE_H_TINY = {
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "attention_bias": False,
    "position_embedding_type": "nope",
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "vocab_size": 100352,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_SMOLLM = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
}

SHAPES = {
    "smollm2-135m": Shape("LlamaForCausalLM", _SMOLLM),
    "qwen2.5-0.5b": _qwen(896, 24, 14, 4864),
    "llama-3.2-1b": _llama(2048, 16, 8192, 32.0, tied=True),
    "qwen2.5-3b": _qwen(2048, 36, 16, 11008),
    "llama-3.1-8b": _llama(4096, 32, 14336, 8.0, tied=False),
    "olmoe-1b-7b": Shape("OlmoeForCausalLM", _OLMOE, "experts"),
    "qwen3-30b-a3b": Shape("Qwen3MoeForCausalLM", _QWEN3_30B, "experts"),
    "gpt-oss-20b": Shape("GptOssForCausalLM", _GPT_OSS_20B, "experts"),
    "lfm2-1.2b": Shape("Lfm2ForCausalLM", _LFM2, "recurrent"),
    "qwen3.5-0.8b": Shape("Qwen3_5ForCausalLM", _QWEN35, "recurrent", ("--no-mtp",)),  # no head that drafts
    "granite-4.0-h-tiny": Shape("GraniteMoeHybridForCausalLM", _GRANITE_H_TINY, "recurrent"),
}


def write(shape: Shape, folder: Path, tokenizer: Path, *, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> int:
    """Write the checkpoint of ``shape``; returns its number of parameters. ``tokenizer``: a folder with its files."""
    config = _config(shape, tokenizer)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in TEXT_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    writer = ShardWriter(folder, shard_bytes=shard_bytes)
    parameters = 0
    for name, sizes in _shapes(config).items():
        parameters += math.prod(sizes)
        if shape.is_mxfp4 and name.endswith("_proj") and ".experts." in name:
            for part, words in _random_mxfp4(name, sizes, seed):
                writer.add(part, words)
        else:
            writer.add(name, _random(name, sizes, seed), "BF16")
    writer.finish()
    return parameters


def _config(shape: Shape, tokenizer: Path) -> dict[str, Any]:
    generation = json.loads((tokenizer / "generation_config.json").read_text())
    ids = {name: generation[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in generation}
    return {"architectures": [shape.architecture], "dtype": "bfloat16", **shape.config, **ids}


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the parameters, in the model's order, from a model without memory."""
    from transformers.core_model_loading import revert_weight_conversion

    kind: Any = getattr(import_module("transformers"), config["architectures"][0])
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(config))
    published = revert_weight_conversion(model, dict(model.named_parameters()))
    return {name: tuple(tensor.shape) for name, tensor in published.items()}


def _random(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.uint16]:
    """The words of a tensor in bfloat16."""
    generator = _generator(name, seed)
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    deviation = 0.02 if name.endswith("bias") else shape[-1] ** -0.5
    if name.endswith(".A_log"):
        tensor.copy_(torch.empty(shape).uniform_(1, 16, generator=generator).log())
    elif name.endswith(".dt_bias"):
        steps = torch.empty(shape).uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp()
        tensor.copy_(torch.log(torch.expm1(steps)))  # what softplus makes these steps of
    elif len(shape) > 1 or name.endswith("bias"):
        for piece in tensor.flatten().split(PIECE):
            piece.copy_(torch.empty(len(piece)).normal_(0, deviation, generator=generator))
    return tensor.view(torch.uint16).numpy()


def _random_mxfp4(name: str, shape: tuple[int, ...], seed: int) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Blocks and scales of stacked experts ``[E, inputs, outputs]`` as gpt-oss is published: ``[E, outputs, ...]``."""
    experts, inputs, outputs = shape
    blocks = (experts, outputs, inputs // MXFP4_BLOCK)
    codes = torch.empty((*blocks, MXFP4_BLOCK // 2), dtype=torch.uint8)
    yield f"{name}_blocks", codes.random_(0, 256, generator=_generator(name, seed)).numpy()
    exponent = round(math.log2(inputs**-0.5 / MXFP4_DEVIATION))
    yield f"{name}_scales", np.full(blocks, 127 + exponent, np.uint8)


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=Path("artifacts/graph"), help="folder with a tokenizer")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="change config.json; values are JSON"
    )
    parser.add_argument("--layers", type=int, help="only its first layers")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    shape = SHAPES[given.shape]
    changed = {name: json.loads(value) for name, _, value in (setting.partition("=") for setting in given.set)}
    shape = replace(shape, config={**shape.config, **changed})
    if given.layers:
        shape = shape.cut(given.layers)
    count = write(shape, given.folder, given.tokenizer, seed=given.seed)
    size = sum(path.stat().st_size for path in given.folder.glob("*.safetensors"))
    print(f"{given.folder}: {count / 1e9:.2f} billion parameters, {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
