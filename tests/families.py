"""Families of decoders that transformers ships, at two layers with random weights: what the exporter must carry over.

Each row of ``FAMILIES`` is a model type of transformers and what its configuration says beyond ``DENSE``; rows of one
type differ in what they exercise. Vocabularies are odd, so that nothing downstream may count on round sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
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
HYBRID = ["linear_attention", "full_attention"]
DELTA: Mapping[str, Any] = {  # the gated delta rule, two heads of values to one of keys
    "layer_types": HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}


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
    "lfm2": Family("lfm2", {"layer_types": ["conv", "full_attention"]}),  # short convolutions
    "qwen3_5": Family("qwen3_5_text", DELTA),
    "gpt2": Family("gpt2", {}, GPT, rotary="none"),  # weights stored [in, out]
    "gpt_neox": Family(
        "gpt_neox", {}, {k: v for k, v in DENSE.items() if k not in ("num_key_value_heads", "head_dim")}
    ),
}


# Families that only the table of docs/models.md covers (tests/model_table.py).
LATENT: Mapping[str, Any] = {  # multi-head latent attention, its keys and values of one size
    **{k: v for k, v in DENSE.items() if k not in ("num_key_value_heads", "head_dim")},
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# Heads of DeepSeek-V2 and V3, as published: keys of 192 channels, values of 128.
LATENT_UNEVEN: Mapping[str, Any] = {
    **LATENT,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LONGROPE: Mapping[str, Any] = {
    "original_max_position_embeddings": 24,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0 + 0.05 * n for n in range(8)],
        "long_factor": [2.0 + 0.5 * n for n in range(8)],
        "original_max_position_embeddings": 24,
    },
}
SCALED: Mapping[str, Any] = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
ROUTED: Mapping[str, Any] = {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}  # as DeepSeek-V3 names them
# The gated delta rule with a decay for each key channel.
KIMI: Mapping[str, Any] = {**ROUTED, "layer_types": HYBRID, "linear_num_heads": 4, "linear_head_dim": 16}
BAILING: Mapping[str, Any] = {**ROUTED, "layer_group_size": 2, "n_group": 2, "topk_group": 1}
INKLING: Mapping[str, Any] = {
    **ROUTED,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 8,
}
GEMMA4: Mapping[str, Any] = {
    **DENSE,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
PLAIN: Mapping[str, Any] = {k: v for k, v in DENSE.items() if k not in ("num_key_value_heads", "head_dim")}

MORE_FAMILIES: Mapping[str, Family] = {
    "lfm2_moe": Family("lfm2_moe", {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
    "llama-yarn": Family(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-linear-scaling": Family(
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}}
    ),
    "llama-dynamic-scaling": Family(
        "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}}
    ),
    "phi3-longrope": Family("phi3", LONGROPE),
    "apertus": Family("apertus"),
    "arcee": Family("arcee"),
    "biogpt": Family("biogpt", {}, PLAIN, rotary="none"),
    "bitnet": Family("bitnet"),
    "cohere": Family("cohere", rotary="interleaved"),
    "cwm": Family("cwm", {"sliding_window": 8}),
    "deepseek_v3": Family(
        "deepseek_v3",
        {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        LATENT,
    ),
    "deepseek_v3-dense": Family("deepseek_v3", {"first_k_dense_replace": LAYERS}, LATENT),
    "deepseek_v3-published-heads": Family(
        "deepseek_v3", {**ROUTED, "n_group": 2, "topk_group": 1}, {**LATENT_UNEVEN, "kv_lora_rank": 64}
    ),
    "diffllama": Family("diffllama"),
    "doge": Family("doge"),
    "ernie4_5": Family("ernie4_5", rotary="interleaved"),
    "exaone4": Family("exaone4", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "gemma": Family("gemma"),
    "gemma3n": Family(
        "gemma3n_text",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "laurel_rank": 8,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "activation_sparsity_pattern": [0.0] * LAYERS,
        },
    ),
    "gemma4": Family("gemma4_text", {}, GEMMA4),
    "gemma4-per-layer-inputs": Family(
        "gemma4_text", {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE}, GEMMA4
    ),
    "gemma4-shared-caches": Family(
        "gemma4_text",
        {
            "layer_types": ["full_attention"] * LAYERS,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
        GEMMA4,
    ),
    "glm": Family("glm", rotary="interleaved"),
    "gpt_bigcode": Family("gpt_bigcode", {}, GPT, rotary="none"),
    "glm4_moe": Family("glm4_moe", {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "granite": Family("granite", {**SCALED, "logits_scaling": 1.0}),
    "granite-scaled-logits": Family("granite", {**SCALED, "logits_scaling": 3.0}),
    "granite-no-scaling": Family("granite"),
    "granitemoehybrid-dense": Family(
        "granitemoehybrid",
        {
            **SCALED,
            "num_local_experts": 0,
            "layer_types": ["attention"] * LAYERS,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
        },
    ),
    "granitemoehybrid-scans": Family(
        "granitemoehybrid",
        {
            **SCALED,
            "num_local_experts": 0,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 96,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
        },
    ),
    "helium": Family("helium", rotary="interleaved"),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense"),
    "hyperclovax": Family("hyperclovax", {**SCALED, "logits_scaling": 1.0}),
    "internlm3": Family("internlm3"),
    "iquestcoder": Family("iquestcoder"),
    "jais2": Family("jais2"),
    "minicpm3": Family("minicpm3", {"scale_emb": 2.0, "scale_depth": 1.4, "dim_model_base": 32}, LATENT),
    "ministral": Family("ministral", {"sliding_window": 8}),
    "ministral3": Family(
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "modernbert-decoder": Family("modernbert-decoder", {"local_attention": 8}, PLAIN),
    "nanochat": Family("nanochat"),
    "nemotron": Family("nemotron"),
    "olmo": Family("olmo"),
    "olmo3": Family("olmo3", {"sliding_window": 8}),
    "persimmon": Family("persimmon", {}, PLAIN),
    "qwen2-sliding": Family("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "seed_oss": Family("seed_oss"),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0]}),
    "vaultgemma": Family("vaultgemma", {"sliding_window": 8}),
    "youtu": Family("youtu", {}, LATENT),
    "bailing_hybrid": Family("bailing_hybrid", BAILING, {**LATENT, "head_dim": 16}),  # decays that have a least
    "bailing_hybrid-any-decay": Family(
        "bailing_hybrid", {**BAILING, "kda_safe_gate": False}, {**LATENT, "head_dim": 16}
    ),
    "bamba": Family("bamba", {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}),
    "falcon_h1": Family(
        "falcon_h1",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            # as in the published models: constants that multiply keys, gates and what linears read and give
            "embedding_multiplier": 5.6,
            "lm_head_multiplier": 0.3,
            "key_multiplier": 0.4,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.4, 0.5, 0.6, 0.7, 0.8],
            "mlp_multipliers": [0.9, 0.3],
        },
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
        },
    ),
    "cohere2_moe": Family("cohere2_moe", {**EXPERTS, "sliding_window": 8}, rotary="interleaved"),
    "dots1": Family("dots1", {**ROUTED, "n_shared_experts": 1, "sliding_window": 8}),
    "exaone_moe": Family("exaone_moe", {**ROUTED, "sliding_window": 8}),
    "flex_olmo": Family("flex_olmo", EXPERTS),
    "gemma4-experts": Family("gemma4_text", {**EXPERTS, "enable_moe_block": True, "top_k_experts": 2}, GEMMA4),
    "glm4_moe_lite": Family("glm4_moe_lite", ROUTED, LATENT),
    "granitemoeshared": Family("granitemoeshared", {**EXPERTS, "shared_intermediate_size": 32}),
    "hunyuan_v1_moe": Family("hunyuan_v1_moe", {**EXPERTS, "moe_topk": 2}),
    "hy_v3": Family("hy_v3", EXPERTS),
    "mellum": Family("mellum", {**EXPERTS, "sliding_window": 8}),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        {
            **ROUTED,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "head_dim": 192,
            "v_head_dim": 128,  # as published
        },
    ),
    "minimax_m2": Family("minimax_m2", EXPERTS),
    "solar_open": Family("solar_open", ROUTED),
    # Refused. Sizes are those of a real model of the family, reduced.
    "afmoe": Family("afmoe", EXPERTS),
    "bloom": Family("bloom", {}, {"hidden_size": 64, "n_layer": LAYERS, "n_head": 4}),
    "codegen": Family("codegen", {"rotary_dim": 8}, {**GPT, "n_ctx": MAX_POSITIONS}),
    "deepseek_v2": Family("deepseek_v2", {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}, LATENT),
    "deepseek_v2-published-heads": Family(  # queries of one linear, as in DeepSeek-V2-Lite
        "deepseek_v2",
        {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
        {**LATENT_UNEVEN, "q_lora_rank": None},
    ),
    "ernie4_5_moe": Family("ernie4_5_moe", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}),
    "falcon": Family("falcon", {}, {**PLAIN, "num_kv_heads": 4}),
    "falcon-alibi": Family("falcon", {"alibi": True}, {**PLAIN, "num_kv_heads": 4}),
    "falcon_mamba": Family("falcon_mamba", {}, {"hidden_size": 64, "num_hidden_layers": LAYERS, "state_size": 4}),
    "gpt_neo": Family(
        "gpt_neo",
        {"attention_types": [[["global", "local"], 1]], "window_size": 8},
        {"hidden_size": 64, "num_layers": LAYERS, "num_heads": 4, "max_position_embeddings": MAX_POSITIONS},
    ),
    "gpt_oss": Family("gpt_oss", {**EXPERTS, "sliding_window": 8}),
    "gptj": Family("gptj", {"rotary_dim": 8}, GPT),
    "granite_swa": Family("granite_swa", {"sliding_window": 8}),
    "granitemoe": Family("granitemoe", EXPERTS),
    "granitemoe_swa": Family("granitemoe_swa", {**EXPERTS, "sliding_window": 8}),
    "inkling": Family("inkling_text", INKLING),
    "inkling2": Family("inkling2_text", {**INKLING, "unpadded_vocab_size": VOCAB_SIZE}),
    "jamba": Family("jamba", {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "kimi_linear": Family("kimi_linear", KIMI, {**LATENT, "q_lora_rank": None}),
    "kimi_linear-published-heads": Family(
        "kimi_linear", {**KIMI, "linear_num_heads": 2, "linear_head_dim": 128}, {**LATENT_UNEVEN, "q_lora_rank": None}
    ),
    "llama4": Family("llama4_text", {**EXPERTS, "intermediate_size_mlp": 96}),
    "mamba": Family("mamba", {}, {"hidden_size": 64, "num_hidden_layers": LAYERS, "state_size": 4}),
    "mamba2": Family(
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2},
        {"hidden_size": 64, "num_hidden_layers": LAYERS, "state_size": 4},
    ),
    "mamba2-codestral": Family(  # as many groups as heads
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 8},
        {"hidden_size": 64, "num_hidden_layers": LAYERS, "state_size": 8},
    ),
    "minicpm3-uneven-heads": Family("minicpm3", {"v_head_dim": 32}, LATENT),
    "minimax": Family("minimax", {**EXPERTS, "layer_types": ["full_attention"] * LAYERS}),
    "mixtral": Family("mixtral", EXPERTS),
    "mpt": Family("mpt", {}, {"d_model": 64, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": MAX_POSITIONS}),
    "olmo_hybrid": Family("olmo_hybrid", DELTA),
    "olmoe": Family("olmoe", EXPERTS),
    "phimoe": Family("phimoe", EXPERTS),
    "qwen2_moe": Family("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": Family("qwen3_moe", EXPERTS),
    "qwen3_5_moe": Family("qwen3_5_moe_text", {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 32}),
    "qwen3_next": Family("qwen3_next", {**EXPERTS, "layer_types": HYBRID}),
    "qwen4_exp": Family(
        "qwen4_exp_text",
        {
            **EXPERTS,
            **DELTA,
            "shared_expert_intermediate_size": 32,
            "hc_count": 2,
            "hc_lowrank": 16,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
    "recurrent_gemma": Family("recurrent_gemma", {"block_types": ["recurrent", "attention"], "lru_width": 64}),
    "rwkv": Family("rwkv", {}, {"hidden_size": 64, "num_hidden_layers": LAYERS, "context_length": MAX_POSITIONS}),
    "xglm": Family(
        "xglm",
        {},
        {
            "d_model": 64,
            "ffn_dim": 96,
            "num_layers": LAYERS,
            "attention_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
        },
    ),
    "zamba2": Family("zamba2", {"layers_block_type": ["mamba", "hybrid"], "mamba_headdim": 16, "n_mamba_heads": 8}),
    "zamba2-shared-blocks": Family(  # two blocks of attention and MLP, one of them at two layers, with adapters each
        "zamba2",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["hybrid", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 2,
            "attention_head_dim": 32,
            "num_key_value_heads": 4,
            "adapter_rank": 32,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "mamba_headdim": 16,
            "n_mamba_heads": 8,
        },
    ),
}

ALL_FAMILIES: Mapping[str, Family] = {**FAMILIES, **MORE_FAMILIES}


def vocab_size(name: str) -> int:
    return ALL_FAMILIES[name].vocab_size


def random_model(name: str, *, seed: int = 0, **settings: Any) -> Any:
    """The family's causal language model in float32, its weights drawn so that every part matters to the logits.

    ``settings``: of its configuration, beyond those of the family.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family = ALL_FAMILIES[name]
    config: Any = AutoConfig.for_model(
        family.model_type,
        vocab_size=family.vocab_size,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **deepcopy({**family.sizes, **family.settings, **settings}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # some vectors are drawn where they begin
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


def export_model(
    model: Any, folder: Path, *, max_positions: int = MAX_POSITIONS, tolerance: float = 1e-3
) -> Artifact[PortableGraph]:
    """The model's portable graph in ``folder / "graph"``, by way of a checkpoint in ``folder / "checkpoint"``."""
    from pipeline.export.export import export

    checkpoint = save_checkpoint(model, folder / "checkpoint")
    graph = folder / "graph"
    return export(checkpoint, "", graph, max_positions=max_positions, tolerance=tolerance, seed=0, parents={})


def export_family(name: str, folder: Path, *, tolerance: float = 1e-3) -> Artifact[PortableGraph]:
    """The family's portable graph, as :func:`export_model` makes it."""
    return export_model(random_model(name), folder, tolerance=tolerance)
