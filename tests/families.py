"""Families of decoders that transformers ships, at two layers with random weights: what the exporter must carry over.

Each row of ``FAMILIES`` is a model type of transformers and what its configuration says beyond ``DENSE``; rows of one
type differ in what they exercise. Vocabularies are odd, so that nothing downstream may count on round sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph

VOCAB_SIZE = 203
MAX_POSITIONS = 64
LAYERS = 2

DENSE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
}
# gpt2 and its relatives name the same sizes differently and have no grouped queries.
GPT: Mapping[str, Any] = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": MAX_POSITIONS}


@dataclass(frozen=True)
class Family:
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=lambda: DENSE)
    rotary: Literal["half", "interleaved", "none"] = "half"  # how key channels are paired
    vocab_size: int = VOCAB_SIZE


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama"),
    "llama-rope-scaling": Family(
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama-group-of-8": Family("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128}),
    "llama-odd-sizes": Family(  # groups of 64 and 32 channels divide neither 80 nor 208
        "llama",
        {
            "hidden_size": 80,
            "intermediate_size": 208,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        vocab_size=997,
    ),
    "llama-biases": Family("llama", {"attention_bias": True, "mlp_bias": True}),  # on every linear but the head
    "mistral-short-window": Family("mistral", {"sliding_window": 8}),
    "mistral-long-window": Family("mistral", {"sliding_window": 48}),
    "qwen2": Family("qwen2", {"tie_word_embeddings": True}),  # biases on q, k and v alone
    "qwen3": Family("qwen3"),  # norms of query and key heads
    "gemma2": Family("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 24}),  # soft caps, 1 + weight norms
    "gemma3": Family("gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 24}),  # two rotary tables
    "phi3": Family("phi3"),  # fused projections
    "phi": Family("phi"),  # partial rotary, parallel blocks, a biased head
    "olmo2": Family("olmo2"),  # norms after the blocks
    "starcoder2": Family("starcoder2", {"sliding_window": 8}),  # layer norms, biases
    "cohere2": Family("cohere2", {"sliding_window": 8}, rotary="interleaved"),  # and layers without any rotary
    "glm4": Family("glm4", rotary="interleaved"),  # of half a head; fused gate and up
    "stablelm": Family("stablelm"),  # partial rotary
    "opt": Family(
        "opt",
        {"ffn_dim": 96, "word_embed_proj_dim": 64},
        {k: DENSE[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")},
        rotary="none",
    ),  # learned positions
    "gpt2": Family("gpt2", {}, GPT, rotary="none"),  # weights stored [in, out]
    "gpt_neox": Family(
        "gpt_neox", {}, {k: v for k, v in DENSE.items() if k not in ("num_key_value_heads", "head_dim")}
    ),
}


def random_model(name: str, *, seed: int = 0) -> Any:
    """The family's causal language model in float32, its weights drawn so that every part matters to the logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family = FAMILIES[name]
    config: Any = AutoConfig.for_model(
        family.model_type,
        vocab_size=family.vocab_size,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{**family.sizes, **family.settings},
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # matrices anew; vectors (norms near one or zero, biases near zero) away from where they start
            parameter.copy_(noise * 0.08) if parameter.dim() > 1 else parameter.add_(noise * 0.1)
    return model


def save_checkpoint(model: Any, folder: Path) -> Path:
    """The model as a Hugging Face checkpoint folder; its tokenizer knows a word for each row: ``w3 w4 w5``, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, model.config.vocab_size)}
    by_word = Tokenizer(models.WordLevel(words, unk_token="w3"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=by_word,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def export_family(name: str, folder: Path, *, tolerance: float = 1e-3) -> Artifact[PortableGraph]:
    """The family's portable graph in ``folder / "graph"``, by way of a checkpoint in ``folder / "checkpoint"``."""
    from pipeline.export.export import export

    checkpoint = save_checkpoint(random_model(name), folder / "checkpoint")
    graph = folder / "graph"
    return export(checkpoint, "", graph, max_positions=MAX_POSITIONS, tolerance=tolerance, seed=0, parents={})
