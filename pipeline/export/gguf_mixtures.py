"""GGUF files of mixtures of experts: which tensors and settings a file of each architecture holds.

transformers 5.23 cannot read the rotary scaling of a gpt-oss file, and takes a default for the size of Qwen3-MoE's
experts. So one table says here what llama.cpp's converter writes. What is missing, left over or of another type or
shape is refused by name, before any weight is read.

Letters of shapes: V rows of the vocabulary, H hidden size, E experts, I inner channels of an expert, S of the shared
expert, A heads, D channels of a head, Q and K channels of all heads of queries and of keys.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.export.gguf import NEUTRAL, REMEDY, TOKENS, GgufHeader, decimal
from quantization.stored import GGUF_TYPES
from tapeout.errors import ExportError, one_line
from tapeout.tensor_files import FLOATS, few

LAYERS = "model.layers.{}."  # before the names of parameters of a layer; in a file: blk.{}.
EXPERTS = "E"
SINGLE = "1"  # a dimension that a file may leave out


@dataclass(frozen=True)
class TensorPlace:
    """The parameter that a tensor is; of two tensors with one parameter the first is the gate, the second up."""

    parameter: str
    shape: str

    @property
    def types(self) -> Collection[str]:
        """Only what multiplies is quantized."""
        vector = len(self.shape) == 1 or self.parameter.endswith("_bias")
        return [name for name in GGUF_TYPES if name in FLOATS] if vector else GGUF_TYPES


@dataclass(frozen=True)
class Mixture:
    """``keys``: of the metadata, beside ``KEYS``, and their names in the configuration. ``settings``: what llama.cpp
    computes with for this architecture, whatever a file says; ``implied``: keys that may only say just that.

    ``paired_rows``: rotary embedding turns neighbouring channels of a head, where transformers turns channel i with
    channel i + half. ``keeps_codes``: experts in MXFP4 stay codes (tapeout/coded_parameters.py). ``stops``: tokens that
    end an answer, beside the one that a file names. ``shared``: the same with an expert that every token visits, where
    the metadata has its size.
    """

    model_type: str
    keys: Mapping[str, str]
    layer: Mapping[str, TensorPlace]
    settings: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    paired_rows: bool = False
    keeps_codes: bool = False
    stops: tuple[str, ...] = ()
    shared: Mixture | None = None

    @cached_property
    def sizes(self) -> Mapping[str, str]:
        """By letter, names in the configuration."""
        names = self.keys.values()
        inner = "moe_intermediate_size" if "moe_intermediate_size" in names else "intermediate_size"
        shared = self.keys.get("expert_shared_feed_forward_length", "")
        return {
            "H": "hidden_size",
            "V": "vocab_size",
            "A": "num_attention_heads",
            "D": "head_dim",
            EXPERTS: self.keys["expert_count"],
            "I": inner,
            "S": shared,
        }


MODEL = {
    "token_embd.weight": TensorPlace("model.embed_tokens.weight", "VH"),
    "output_norm.weight": TensorPlace("model.norm.weight", "H"),
    "output.weight": TensorPlace("lm_head.weight", "VH"),  # where the embedding is not shared
}
ATTENTION = {
    "attn_norm.weight": TensorPlace("input_layernorm.weight", "H"),
    "attn_q.weight": TensorPlace("self_attn.q_proj.weight", "QH"),
    "attn_k.weight": TensorPlace("self_attn.k_proj.weight", "KH"),
    "attn_v.weight": TensorPlace("self_attn.v_proj.weight", "KH"),
    "attn_output.weight": TensorPlace("self_attn.o_proj.weight", "HQ"),
}
FFN_NORM = {"ffn_norm.weight": TensorPlace("post_attention_layernorm.weight", "H")}
QKV_BIASES = {
    "attn_q.bias": TensorPlace("self_attn.q_proj.bias", "Q"),
    "attn_k.bias": TensorPlace("self_attn.k_proj.bias", "K"),
    "attn_v.bias": TensorPlace("self_attn.v_proj.bias", "K"),
}


def _experts(block: str, router: str) -> dict[str, TensorPlace]:
    return {
        "ffn_gate_inp.weight": TensorPlace(f"{block}.{router}.weight", "EH"),
        "ffn_gate_exps.weight": TensorPlace(f"{block}.experts.gate_up_proj", "EIH"),
        "ffn_up_exps.weight": TensorPlace(f"{block}.experts.gate_up_proj", "EIH"),
        "ffn_down_exps.weight": TensorPlace(f"{block}.experts.down_proj", "EHI"),
    }


KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}
DEFAULTS = {  # of keys that a file may leave out: another key, or a number
    "attention.head_count_kv": ("attention.head_count", None),
    "rope.freq_base": ("", 10000.0),
}
FRACTIONS = frozenset(
    {
        *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
        *("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    }
)
SOFTMAX, SOFTMAX_OF_CHOSEN = 1, 3  # expert_gating_func, as llama.cpp counts them
NORMALIZED: Mapping[str, Any] = {"expert_weights_norm": True, "expert_gating_func": SOFTMAX}
ROPE_SCALING: Mapping[
    str, Mapping[str, str]
] = {  # by type, keys beside the type and the factor; those of yarn may be left out
    "linear": {},
    "yarn": {
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    },
}
_SIZED = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
_LOCAL = {"expert_count": "num_local_experts"}
_GRANITE_KEYS = {
    **_LOCAL,
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_GRANITE = {**ATTENTION, **FFN_NORM, **_experts("block_sparse_moe", "router")}
MIXTURES: Mapping[str, Mixture] = {  # by general.architecture
    "qwen3moe": Mixture(
        "qwen3_moe",
        _SIZED,
        {
            **ATTENTION,
            "attn_q_norm.weight": TensorPlace("self_attn.q_norm.weight", "D"),
            "attn_k_norm.weight": TensorPlace("self_attn.k_norm.weight", "D"),
            **FFN_NORM,
            **_experts("mlp", "gate"),
        },
        settings={"norm_topk_prob": True},
        implied=NORMALIZED,
    ),
    "gpt-oss": Mixture(
        "gpt_oss",
        {**_LOCAL, "attention.sliding_window": "sliding_window"},
        {
            **ATTENTION,
            **QKV_BIASES,
            "attn_output.bias": TensorPlace("self_attn.o_proj.bias", "H"),
            "attn_sinks.weight": TensorPlace("self_attn.sinks", "A"),
            "post_attention_norm.weight": TensorPlace("post_attention_layernorm.weight", "H"),
            **_experts("mlp", "router"),
            "ffn_gate_inp.bias": TensorPlace("mlp.router.bias", "E"),
            "ffn_gate_exps.bias": TensorPlace("mlp.experts.gate_up_proj_bias", "EI"),
            "ffn_up_exps.bias": TensorPlace("mlp.experts.gate_up_proj_bias", "EI"),
            "ffn_down_exps.bias": TensorPlace("mlp.experts.down_proj_bias", "EH"),
        },
        implied={"expert_gating_func": SOFTMAX_OF_CHOSEN, "attention.sliding_window_pattern": 2},
        keeps_codes=True,
        stops=("<|call|>", "<|endoftext|>"),  # as its generation_config.json has them, beside <|return|>
    ),
    "qwen2moe": Mixture(
        "qwen2_moe",
        {**_SIZED, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {
            **ATTENTION,
            **QKV_BIASES,
            **FFN_NORM,
            **_experts("mlp", "gate"),
            "ffn_gate_inp_shexp.weight": TensorPlace("mlp.shared_expert_gate.weight", SINGLE + "H"),
            "ffn_gate_shexp.weight": TensorPlace("mlp.shared_expert.gate_proj.weight", "SH"),
            "ffn_up_shexp.weight": TensorPlace("mlp.shared_expert.up_proj.weight", "SH"),
            "ffn_down_shexp.weight": TensorPlace("mlp.shared_expert.down_proj.weight", "HS"),
        },
        settings={"norm_topk_prob": False},
        implied={"expert_gating_func": SOFTMAX},
    ),
    "olmoe": Mixture(
        "olmoe",
        {"expert_count": "num_experts"},
        {
            **ATTENTION,
            "attn_q_norm.weight": TensorPlace("self_attn.q_norm.weight", "Q"),
            "attn_k_norm.weight": TensorPlace("self_attn.k_norm.weight", "K"),
            **FFN_NORM,
            **_experts("mlp", "gate"),
        },
        settings={"norm_topk_prob": False},
        implied={"expert_gating_func": SOFTMAX},
    ),
    "llama": Mixture(  # Mixtral
        "mixtral",
        _LOCAL,
        {**ATTENTION, **FFN_NORM, **_experts("mlp", "gate")},
        implied=NORMALIZED,
        paired_rows=True,
    ),
    "granitemoe": Mixture(
        "granitemoe",
        _GRANITE_KEYS,
        _GRANITE,
        implied=NORMALIZED,
        paired_rows=True,
        shared=Mixture(
            "granitemoeshared",
            {**_GRANITE_KEYS, "expert_shared_feed_forward_length": "shared_intermediate_size"},
            {
                **_GRANITE,
                "ffn_gate_shexp.weight": TensorPlace("shared_mlp.input_linear.weight", "SH"),
                "ffn_up_shexp.weight": TensorPlace("shared_mlp.input_linear.weight", "SH"),
                "ffn_down_shexp.weight": TensorPlace("shared_mlp.output_linear.weight", "HS"),
            },
            implied=NORMALIZED,
            paired_rows=True,
        ),
    ),
}
DENSE_TOO = frozenset({"llama"})  # architectures of dense models, too


def is_mixture(metadata: Mapping[str, Any]) -> bool:
    """Whether a file with this metadata holds experts."""
    architecture = metadata["general.architecture"]
    counted = bool(metadata.get(f"{architecture}.expert_count"))
    return counted or (architecture in MIXTURES and architecture not in DENSE_TOO)


def holds_experts(path: Path) -> bool:
    """Of a file that was read before."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    return is_mixture(read_gguf_metadata(str(path))[0])


def mixture_of(metadata: Mapping[str, Any]) -> Mixture | None:
    """None for a mixture that is not read."""
    architecture = metadata["general.architecture"]
    found = MIXTURES.get(architecture)
    shared = metadata.get(f"{architecture}.expert_shared_feed_forward_length")
    return found.shared if found and found.shared and shared else found


def place_of(mixture: Mixture, tensor: str) -> TensorPlace | None:
    """Of a tensor by its name; None for one that has none.

    >>> place_of(MIXTURES["qwen3moe"], "blk.3.ffn_up_exps.weight")
    TensorPlace(parameter='model.layers.3.mlp.experts.gate_up_proj', shape='EIH')
    """
    block, _, rest = tensor.partition(".")
    number, _, name = rest.partition(".")
    if block != "blk":
        return MODEL.get(tensor)
    place = mixture.layer.get(name)
    return place and TensorPlace(LAYERS.format(number) + place.parameter, place.shape)


@dataclass(frozen=True)
class MixtureFile:
    """A file of experts whose tensors were compared with its metadata.

    ``tensors``: by name of the parameter those that it is made of, a gate first.
    """

    path: Path
    mixture: Mixture
    config: Any
    tensors: Mapping[str, tuple[str, ...]]

    def shape(self, tensor: str) -> str:
        place = place_of(self.mixture, tensor)
        assert place is not None
        return place.shape


def describe(path: Path, header: GgufHeader) -> MixtureFile:
    """:class:`ExportError` for a file whose metadata or tensors are not those of its architecture."""
    mixture = mixture_of(header.metadata)
    if mixture is None:
        raise ExportError(
            f"{path.name} holds a mixture of experts of architecture {header.architecture}",
            expected=f"of {', '.join(MIXTURES)}",
            remedy=REMEDY,
        )
    values = _values(path, header, mixture)
    found = _tensors(path, header, mixture, values)
    return MixtureFile(path, mixture, _config(path, mixture, values), found)


def _values(path: Path, header: GgufHeader, mixture: Mixture) -> dict[str, Any]:
    """Of the configuration, by name."""
    prefix, keys = f"{header.architecture}.", {**KEYS, **mixture.keys}
    metadata = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    stated = _stated(path, prefix, metadata, keys)
    values: dict[str, Any] = {name: stated[key] for key, name in keys.items()}
    values |= {"num_key_value_heads": stated["attention.head_count_kv"], **mixture.settings}
    values["head_dim"] = stated.get("attention.key_length") or values["hidden_size"] // values["num_attention_heads"]
    values["vocab_size"] = stated.get("vocab_size") or len(header.metadata[TOKENS])
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    values["rope_parameters"], read = _rope(stated, mixture)
    implied = {
        "attention.key_length": values["head_dim"],
        "attention.value_length": values["head_dim"],
        "rope.dimension_count": values["head_dim"],
        "vocab_size": values["vocab_size"],
        "expert_feed_forward_length": values["intermediate_size"],
        "expert_weights_scale": 1.0,
        "rope.scaling.finetuned": True,  # how the model was trained
        **mixture.implied,
    }
    known = {*keys, *DEFAULTS, *read}
    unread = {key: value for key, value in metadata.items() if key not in known and value not in NEUTRAL}
    if unread := {prefix + key: value for key, value in unread.items() if value != implied.get(key)}:
        raise _unread(path, unread, "metadata that the model's configuration has a place for")
    if stated["expert_used_count"] > stated["expert_count"]:
        counts = {prefix + key: stated[key] for key in ("expert_count", "expert_used_count")}
        raise _unread(path, counts, "no more experts for a token than there are")
    return values | _special(header, mixture)


def _stated(path: Path, prefix: str, metadata: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The metadata with their defaults; the numbers that a configuration is made of were looked at."""
    stated: dict[str, Any] = {
        key: metadata.get(other) if other else default for key, (other, default) in DEFAULTS.items()
    }
    stated |= {key: value for key, value in metadata.items() if value is not None}
    if absent := [key for key in keys if key not in stated]:
        raise ExportError(
            f"{path.name} has no {few(prefix + key for key in absent)}",
            expected="the metadata that llama.cpp's converter writes for this architecture",
            remedy=REMEDY,
        )
    numbers = {*keys, *DEFAULTS, "attention.key_length", "vocab_size"}
    if (kind := str(stated.get("rope.scaling.type"))) in ROPE_SCALING:
        numbers |= {"rope.scaling.factor", *ROPE_SCALING[kind]}
    for key in sorted(numbers & stated.keys()):
        value, whole = stated[key], key not in FRACTIONS
        number = not isinstance(value, bool) and isinstance(value, int if whole else (int, float))
        if not number or not 0 < value < math.inf:
            raise _unread(path, {prefix + key: value}, "a whole number of at least 1" if whole else "a positive number")
        stated[key] = value if whole else decimal(value)
    return stated


def _unread(path: Path, stated: Mapping[str, Any], expected: str) -> ExportError:
    shown = few(f"{key} = {value}" for key, value in stated.items())
    return ExportError(f"{path.name} says {shown}, which is not read", expected=expected, remedy=REMEDY)


def _rope(stated: Mapping[str, Any], mixture: Mixture) -> tuple[dict[str, Any], set[str]]:
    """rope_parameters, and the keys that they are made of.

    llama.cpp always rounds where yarn's ramp begins and ends (``truncate``), and so no file says it. gpt-oss was
    trained without.
    """
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": stated["rope.freq_base"]}
    kind = str(stated.get("rope.scaling.type", "none"))
    if kind not in ROPE_SCALING or "rope.scaling.factor" not in stated:
        return parameters, {"rope.scaling.type"} if kind == "none" else set()
    keys = {"rope.scaling.factor": "factor", **ROPE_SCALING[kind]}
    parameters |= {"rope_type": kind} | {name: stated[key] for key, name in keys.items() if key in stated}
    if kind == "yarn" and mixture.model_type == "gpt_oss":
        parameters["truncate"] = False
    return parameters, {"rope.scaling.type", *keys}


def _special(header: GgufHeader, mixture: Mixture) -> dict[str, Any]:
    """Tokens that begin and end a text, by id."""
    tokens: list[str] = header.metadata[TOKENS]
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    values: dict[str, Any] = {
        name: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()
    }
    more = [tokens.index(token) for token in mixture.stops if token in tokens]
    if more and values["eos_token_id"] is not None:
        values["eos_token_id"] = [values["eos_token_id"], *(id for id in more if id != values["eos_token_id"])]
    return values


def _tensors(path: Path, header: GgufHeader, mixture: Mixture, values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """By parameter, in the order of the table, which has gates first."""
    layers = range(min(values["num_hidden_layers"], len(header.tensors)))  # a layer has more than one
    expected = [name for name in MODEL if name in header.tensors or name != "output.weight"]
    expected += [f"blk.{layer}.{name}" for layer in layers for name in mixture.layer]
    missing, over = sorted(set(expected) - header.tensors.keys()), sorted(header.tensors.keys() - set(expected))
    if missing or over:
        lacks = [f"lacks {few(missing)}"] if missing else []
        reason = " (rotary scaling)" if any(name.startswith("rope_") for name in over) else ""
        holds = [f"holds {few(over)}{reason}, which have no place"] if over else []
        kind = f"{header.architecture} with block_count {values['num_hidden_layers']}"
        raise ExportError(
            f"{path.name} {', and '.join(lacks + holds)} in a {kind}",
            expected=f"the tensors that llama.cpp's converter writes: {', '.join(mixture.layer)} of every layer",
            remedy=REMEDY,
        )
    sizes = {letter: values[name] for letter, name in mixture.sizes.items() if name} | {SINGLE: 1}
    sizes |= {
        letter: values[name] * values["head_dim"]
        for letter, name in (("Q", "num_attention_heads"), ("K", "num_key_value_heads"))
    }
    grouped: dict[str, tuple[str, ...]] = {}
    for name in expected:
        place = place_of(mixture, name)
        assert place is not None
        shape, found = [sizes[letter] for letter in place.shape], list(header.shapes[name])
        fits = found == shape or (place.shape.startswith(SINGLE) and found == shape[1:])
        if not fits or header.tensors[name] not in place.types:
            raise ExportError(
                f"{name} of {path.name} is {header.tensors[name]} {found}",
                expected=f"{shape}, as the metadata say, of type {', '.join(place.types)}",
                remedy="fetch it again, or " + REMEDY,
            )
        grouped[place.parameter] = (*grouped.get(place.parameter, ()), name)
    return grouped


def _config(path: Path, mixture: Mixture, values: Mapping[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import AutoConfig

    try:
        return AutoConfig.for_model(mixture.model_type, **values)
    except Exception as error:  # a library's own words about sizes that do not fit
        raise ExportError(
            f"{path.name} describes no {mixture.model_type} that transformers knows: {one_line(error)}",
            expected="metadata whose sizes fit together",
            remedy=REMEDY,
        ) from error
