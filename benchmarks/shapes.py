"""Write a checkpoint with random weights in the shape of a known model, to measure stages at real sizes.

python -m benchmarks.shapes llama-3.2-1b scratch/llama-1b --tokenizer artifacts/graph
python -m benchmarks.shapes llama-3.1-8b scratch/llama-8b --tokenizer artifacts/graph --set num_hidden_layers=4

Weights are normal with a deviation of 1/sqrt(inputs), biases of 0.02, norms are 1, so hidden states keep their size
over the layers. Tensors are written one by one in bfloat16, in shards as published models have them. Random weights
tell of time and memory, and nothing of quality. The tokenizer is that of another model: its ids are below the rows of
the embedding.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tapeout.tensor_writer import ShardWriter

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHARD_BYTES = 5 * 10**9  # as transformers cuts a checkpoint
PIECE = 1 << 24  # random numbers made at a time


@dataclass(frozen=True)
class Shape:
    """``architecture``: class of transformers. ``config``: what its configuration says beyond its defaults."""

    architecture: str
    config: dict[str, Any]


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


def _experts(kind: str, hidden: int, layers: int, experts: int, chosen: int, **config: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "tie_word_embeddings": False}
    return {"model_type": kind, **sizes, "num_experts": experts, "num_experts_per_tok": chosen, **config}


_QWEN3_30B = {
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
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
    "qwen3-30b-a3b": Shape("Qwen3MoeForCausalLM", _experts("qwen3_moe", 2048, 48, 128, 8, **_QWEN3_30B)),
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
    for name, sizes in _shapes(config).items():
        writer.add(name, _random(name, sizes, seed), "BF16")
    writer.finish()
    return writer.total_bytes // 2


def _config(shape: Shape, tokenizer: Path) -> dict[str, Any]:
    generation = json.loads((tokenizer / "generation_config.json").read_text())
    ids = {name: generation[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in generation}
    return {"architectures": [shape.architecture], "dtype": "bfloat16", **shape.config, **ids}


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the parameters, in the model's order, from a model without memory."""
    kind: Any = getattr(import_module("transformers"), config["architectures"][0])
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    return {name: shape for stacked, sizes in shapes.items() for name, shape in _published(stacked, sizes)}


def _published(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Experts that transformers stacks are published one by one, gates apart from ups."""
    module, _, kind = name.rpartition(".experts.")
    if kind == "gate_up_proj":
        parts = [("gate_proj", (shape[1] // 2, shape[2])), ("up_proj", (shape[1] // 2, shape[2]))]
    elif kind == "down_proj":
        parts = [("down_proj", shape[1:])]
    else:
        return [(name, shape)]
    return [(f"{module}.experts.{e}.{part}.weight", sizes) for e in range(shape[0]) for part, sizes in parts]


def _random(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.uint16]:
    """The words of a tensor in bfloat16."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    deviation = 0.02 if name.endswith("bias") else shape[-1] ** -0.5
    if len(shape) > 1 or name.endswith("bias"):
        for piece in tensor.flatten().split(PIECE):
            piece.copy_(torch.empty(len(piece)).normal_(0, deviation, generator=generator))
    return tensor.view(torch.uint16).numpy()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=Path("artifacts/graph"), help="folder with a tokenizer")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="change config.json; values are JSON"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    shape = SHAPES[given.shape]
    changed = {name: json.loads(value) for name, _, value in (setting.partition("=") for setting in given.set)}
    shape = Shape(shape.architecture, {**shape.config, **changed})
    count = write(shape, given.folder, given.tokenizer, seed=given.seed)
    print(f"{given.folder}: {count / 1e9:.2f} billion parameters, {2 * count / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
