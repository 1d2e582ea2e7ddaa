"""What a GGUF file says of a model beside its weights: sizes, names of tensors, rotary embedding, tokenizer.

``ARCHITECTURES`` lists the model types that were compared with llama.cpp; others are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantization.checkpoint_formats.source import ExportSource
from tapeout.errors import ExportError


@dataclass(frozen=True)
class Architecture:
    """``paired_rows``: rotary embedding turns neighbouring channels of a head, where Hugging Face's turns channel i
    with channel i + half; the rows of Q and K are reordered. ``rope_factors``: it reads factors of rotary frequencies.
    """

    gguf: str
    paired_rows: bool = False
    rope_factors: bool = False


ARCHITECTURES = {  # by model_type
    "llama": Architecture("llama", paired_rows=True, rope_factors=True),
    "mistral": Architecture("llama", paired_rows=True, rope_factors=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
}

# By the regular expression that cuts text before BPE merges it, as tokenizer.json has it: what llama.cpp calls it.
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
SPLITS = {_CONTRACTIONS + _LETTERS % "{1,3}": "llama-bpe", _CONTRACTIONS + _LETTERS % "": "qwen2"}


@dataclass(frozen=True)
class Description:
    architecture: Architecture
    config: Mapping[str, Any]
    folder: Path
    names: Any  # gguf.TensorNameMap
    rope_factors: NDArray[np.float32] | None  # [head size / 2], of the rotary frequencies

    @property
    def heads(self) -> int:
        return self.config["num_attention_heads"]

    @property
    def kv_heads(self) -> int:
        return self.config.get("num_key_value_heads") or self.heads

    @property
    def head_size(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.heads

    def name_of(self, parameter: str) -> str:
        found = self.names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ExportError(
                f"llama.cpp's {self.architecture.gguf} has no tensor for {parameter}",
                expected="the parameters of that architecture",
                remedy="choose --format compressed-tensors or autoawq",
            )
        return found

    def row_order(self, parameter: str, rows: int) -> NDArray[np.intp] | None:
        """The rows of Q and K as llama.cpp wants them; None for other parameters, and where they stay."""
        part = parameter.rpartition(".")[0].rpartition(".")[2]
        heads = {"q_proj": self.heads, "k_proj": self.kv_heads}.get(part)
        if heads is None or not self.architecture.paired_rows:
            return None
        return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)

    def add_to(self, writer: Any) -> None:
        config = self.config
        writer.add_name(Path(config.get("_name_or_path") or config["model_type"]).name)
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_dimension_count(self.head_size)
        writer.add_rope_freq_base(_rope(config)["rope_theta"])
        writer.add_vocab_size(config["vocab_size"])
        _add_tokenizer(writer, self.folder, config["vocab_size"])


def require(source: ExportSource) -> None:
    """:class:`ExportError` for a model or tokenizer that llama.cpp would compute differently."""
    config, tokenizer = source.config, _tokenizer(source.folder)
    kind = config["model_type"]
    problem = ""
    if kind not in ARCHITECTURES:
        problem = f"a model of type {kind}"
    elif config.get("sliding_window") and config.get("use_sliding_window", True):
        problem = f"a {kind} with sliding-window attention"
    elif _rope(config)["rope_type"] != "default" and not ARCHITECTURES[kind].rope_factors:
        problem = f"a {kind} with rotary scaling {_rope(config)['rope_type']}"
    elif _rope(config).get("partial_rotary_factor", 1) != 1:
        problem = f"a {kind} that turns only a part of each head"
    elif config.get("hidden_act", "silu") != "silu":
        problem = f"a {kind} with {config['hidden_act']} activations"
    elif _pre_tokenizer(tokenizer) is None:
        problem = "a tokenizer that is none of " + ", ".join(sorted({"gpt-2", "smollm", *SPLITS.values()}))
    if problem:
        raise ExportError(
            f"{source.folder} holds {problem}",
            expected=f"what was compared with llama.cpp: {', '.join(ARCHITECTURES)} with byte-level BPE",
            remedy="choose --format compressed-tensors or autoawq, or convert the float checkpoint with llama.cpp's "
            "own convert_hf_to_gguf.py",
        )


def describe(source: ExportSource) -> Description:
    import gguf

    architecture = ARCHITECTURES[source.config["model_type"]]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.gguf)
    names = gguf.get_tensor_name_map(number, source.config["num_hidden_layers"])
    return Description(architecture, source.config, source.folder, names, _rope_factors(source))


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0} | (config.get("rope_parameters") or {})


def _rope_factors(source: ExportSource) -> NDArray[np.float32] | None:
    """What each rotary frequency is divided by: the default ones over those that the model uses."""
    if _rope(source.config)["rope_type"] == "default":
        return None
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config: Any = AutoConfig.from_pretrained(source.folder)
    scaled: Any = LlamaRotaryEmbedding(config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": _rope(source.config)["rope_theta"]}
    default: Any = LlamaRotaryEmbedding(config)
    if scaled.rope_type not in ("llama3", "linear") or scaled.attention_scaling != 1:
        raise ExportError(
            f"{source.folder} holds a model with rotary scaling {scaled.rope_type}",
            expected="rotary scaling of type llama3 or linear, or none",
            remedy="choose --format compressed-tensors or autoawq",
        )
    return (default.inv_freq / scaled.inv_freq).numpy().astype(np.float32)


def _tokenizer(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))


def _pre_tokenizer(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of how text is cut before it is merged; None for what it has no name for here.

    llama.cpp does not normalize text. Most text is in NFC already, so tokenizers that ask for that pass.
    """
    found, model = tokenizer.get("pre_tokenizer") or {}, tokenizer["model"]
    steps = found["pretokenizers"] if found.get("type") == "Sequence" else [found]
    plain = (tokenizer.get("normalizer") or {}).get("type") in (None, "NFC")
    if model.get("type") != "BPE" or not plain or not steps or steps[-1].get("type") != "ByteLevel":
        return None
    if steps[-1].get("use_regex", True):
        digits = {"type": "Digits", "individual_digits": True}
        name = {0: "gpt-2", 1: "smollm" if steps[0] == digits else None}.get(len(steps) - 1)
    else:
        name = SPLITS.get(steps[0].get("pattern", {}).get("Regex", "")) if len(steps) == 2 else None
    # There llama.cpp takes a piece that is a token as it is, without merges.
    return name if model.get("ignore_merges", False) == (name == "llama-bpe") else None


def _add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Tokens by id with their kinds, merges, special tokens and the chat template."""
    from gguf import SpecialVocab, TokenType

    tokenizer = _tokenizer(folder)
    tokens = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(tokens, TokenType.NORMAL)
    for added in tokenizer.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    ids = range(vocab_size)  # an embedding may have more rows than there are tokens
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(tokenizer))
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in ids])
    writer.add_token_types([kinds.get(index, TokenType.UNUSED) for index in ids])
    special = SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
    special.add_special_token = {"bos": False} | special.add_special_token
    special.add_to_gguf(writer, quiet=True)
