"""Random weights in the shape of a known model, for all engines: a checkpoint, its GGUF file, and a bundle of ours.

Speed does not depend on the weights' values. Quality does, so nothing of it is measured: no KL, and classes follow
from the bits per weight. The bundle is built by the pipeline's own stages, with the recipe's schemes and rounding to
nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import scale
from benchmarks import shapes as known
from benchmarks.peers.environments import peers_folder

STAGES = ("fetch", "export", "calibrate", "sensitivity", "plan", "quantize", "build-candidate")
# Contexts of 8,192 tokens and an answer.
SETTINGS = (
    "quantize.candidates=[rtn]",
    "calibrate.samples=4",
    "calibrate.tokens=64",
    "plan.samples=1",
    "export.max_positions=8448",
)
# Names of llama.cpp (gguf-py, constants.py), by those of transformers.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Prepared:
    checkpoint: Path  # graph artifact
    source: Path  # source artifact
    gguf: Path
    bundle: Path


def prepare(name: str, recipe: Path, tokenizer: Path, progress: Callable[[str], None]) -> Prepared:
    """Make what is missing of a shape, in the folder of the peers. All but our bundle is kept between runs."""
    folder = peers_folder() / "shapes" / name
    artifacts = folder / "work/artifacts"
    made = Prepared(artifacts / "graph", artifacts / "source", folder / "model.gguf", artifacts / "candidate")
    checkpoint = folder / "checkpoint"
    if not checkpoint.is_dir():
        progress(f"writing random weights in the shape of {name}")
        known.write(known.SHAPES[name], checkpoint, tokenizer)
    progress(f"building our bundle of {name}")
    stages = STAGES[-1:] if made.bundle.is_dir() else STAGES  # what is measured has the kernels of this version
    words = [str(checkpoint), str(folder / "work"), "--recipe", str(recipe.resolve()), "--stages", *stages]
    scale.main([*words, "--set", *SETTINGS])
    if not made.gguf.is_file():
        progress(f"writing the GGUF file of {name}")
        partial = made.gguf.with_suffix(".partial")
        write_gguf(known.SHAPES[name].config, checkpoint, partial)
        partial.rename(made.gguf)
    return made


def write_gguf(config: dict[str, Any], checkpoint: Path, path: Path) -> None:
    """The checkpoint for llama.cpp, in float16 and without a vocabulary: engines are fed token ids.

    Rows of Q and K keep the order of transformers, where llama.cpp's converter interleaves them: random rows are alike.
    """
    import gguf

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, config["model_type"], use_temp_file=False)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    # Names and shapes first, so that the tensors themselves are read and written one by one.
    for name, tensor in _tensors(checkpoint):
        kept = np.float32 if tensor.ndim == 1 else np.float16
        writer.add_tensor_info(name, tensor.shape, np.dtype(kept), tensor.size * np.dtype(kept).itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in _tensors(checkpoint):
        writer.write_tensor_data(tensor.astype(np.float32 if tensor.ndim == 1 else np.float16))
    writer.close()


def _tensors(checkpoint: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    from safetensors import safe_open

    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(str(path), "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield gguf_name(name), tensors.get_tensor(name).float().numpy()


def gguf_name(name: str) -> str:
    """
    >>> gguf_name("model.layers.3.self_attn.q_proj.bias")
    'blk.3.attn_q.bias'
    >>> gguf_name("model.norm.weight")
    'output_norm.weight'
    """
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"
