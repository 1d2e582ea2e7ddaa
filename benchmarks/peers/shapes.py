"""Random weights in the shape of a known model, for all engines: a checkpoint, its GGUF file, and bundles of ours.

Speed does not depend on the weights' values. Quality does, so nothing of it is measured: no KL, and classes follow
from the bits per weight. Bundles are built by the pipeline's own stages, with rounding to nearest: one with the
recipe's schemes, and one for each plan that was chosen for another model, with its schemes at the same depth.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import scale
from benchmarks import shapes as known
from benchmarks.peers.environments import peers_folder
from quantization.plan import PrecisionPlan
from tapeout import artifact
from tapeout.schemes import CANDIDATE_SCHEMES, EMBEDDING_CANDIDATES, Scheme

SHARED = {"fetch": "source", "export": "graph", "calibrate": "calibration"}  # stages of a shape, and their artifacts
STAGES = ("sensitivity", "plan", "quantize", "build-candidate")  # of each bundle
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
    bundles: dict[str, Path]  # by name


def prepare(
    name: str, recipe: Path, plans: Mapping[str, Path], tokenizer: Path, progress: Callable[[str], None]
) -> Prepared:
    """Make what is missing of a shape, in the folder of the peers. All but kernels is kept between runs.

    ``plans``: artifacts of plans, by the names of the bundles that get their schemes. `default` has the recipe's.
    """
    folder = peers_folder() / "shapes" / name
    checkpoint, work, gguf = folder / "checkpoint", folder / "work", folder / "model.gguf"
    if not checkpoint.is_dir():
        progress(f"writing random weights in the shape of {name}")
        known.write(known.SHAPES[name], checkpoint, tokenizer)
    layers = known.SHAPES[name].config["num_hidden_layers"]
    settings = {"default": list(SETTINGS)} | {
        plan: [*SETTINGS, *settings_of(artifact.load(path, PrecisionPlan).record, layers)]
        for plan, path in plans.items()
    }
    bundles: dict[str, Path] = {}
    for bundle, words in settings.items():
        progress(f"building our bundle {bundle} of {name}")
        place = work if bundle == "default" else folder / f"work-{bundle}"
        _build(checkpoint, place, work / "artifacts", recipe.resolve(), words)
        bundles[bundle] = place / "artifacts/candidate"
    if not gguf.is_file():
        progress(f"writing the GGUF file of {name}")
        partial = gguf.with_suffix(".partial")
        write_gguf(known.SHAPES[name].config, checkpoint, partial)
        partial.rename(gguf)
    return Prepared(work / "artifacts/graph", work / "artifacts/source", gguf, bundles)


def _build(checkpoint: Path, work: Path, shared: Path, recipe: Path, settings: Sequence[str]) -> None:
    """Run the stages of a bundle whose settings changed, else only the last: kernels are always of this version.

    What bundles share is made once, and again only where it is missing.
    """
    (work / "artifacts").mkdir(parents=True, exist_ok=True)
    for folder in SHARED.values():
        if (shared / folder).is_dir() and not (work / "artifacts" / folder).exists():
            (work / "artifacts" / folder).symlink_to((shared / folder).resolve(), target_is_directory=True)
    params, bundle = work / "params.yaml", work / "artifacts/candidate"
    built = params.read_text() if params.is_file() and bundle.is_dir() else None
    shutil.rmtree(bundle, ignore_errors=True)  # after an interruption there is none, and all is built again
    scale.write_recipe(params, recipe, checkpoint, settings)
    stages = [stage for stage, folder in SHARED.items() if not (work / "artifacts" / folder).exists()]
    stages += STAGES[-1:] if built == params.read_text() and not stages else STAGES
    words = [str(checkpoint), str(work), "--recipe", str(recipe), "--stages", *stages]
    scale.main([*words, "--set", *settings])


def settings_of(plan: PrecisionPlan, layers: int) -> list[str]:
    """A plan as settings of a recipe for a model of so many layers: each has the schemes of the layer at its depth.

    A plan that was chosen holds the menu's schemes, with groups fitted to its model. One that is written out does not.
    """

    def asked(scheme: Scheme, candidate_schemes: Sequence[Scheme]) -> dict[str, Any]:
        return (as_in_candidates(scheme, candidate_schemes) if plan.search else scheme).model_dump()

    schemes = plan.schemes
    depth = 1 + max(int(name.split(".")[1]) for name in schemes if name.startswith("layers."))
    rules: list[dict[str, Any]] = []
    for layer in range(layers):
        here = f"layers.{layer * depth // layers}."
        for name, scheme in schemes.items():
            if name.startswith(here):
                rules.append({"match": f"layers.{layer}.{name.removeprefix(here)}"} | asked(scheme, CANDIDATE_SCHEMES))
    written = {
        "plan.schemes": rules,
        "plan.embeddings": asked(plan.embeddings.scheme, EMBEDDING_CANDIDATES),
        "plan.kv_cache": plan.kv_cache.settings.model_dump(),
    }
    return [f"{key}={json.dumps(value)}" for key, value in written.items()]


def as_in_candidates(scheme: Scheme, candidate_schemes: Sequence[Scheme]) -> Scheme:
    """The candidate scheme before its groups shrank to what divides the channels of the plan's model.

    >>> as_in_candidates(Scheme(bits=8, group_size=64, symmetric=True), CANDIDATE_SCHEMES).name
    '8-bit g128'
    """
    if scheme in candidate_schemes or scheme.group_size is None:
        return scheme
    alike = [
        other for other in candidate_schemes if other.model_copy(update={"group_size": scheme.group_size}) == scheme
    ]
    return next((other for other in alike if (other.group_size or 0) > scheme.group_size), scheme)


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
