"""Quantized models that a test needs in a second: random weights, rounded to nearest, with no calibration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from quantization.checkpoint import KVScheme, LinearReport, QuantizedModel
from quantization.checkpoint_formats.compressed import quantization_config
from quantization.compressed_tensors import CheckpointWriter
from quantization.proof import QuantizationProof
from quantization.units import quantized_ones
from tapeout.artifact import Artifact, ArtifactRef, create, load
from tapeout.quantized import stored_by_rtn
from tapeout.recipe import Quantize
from tapeout.schemes import FLOAT, Scheme
from tests.tiny import tiny_checkpoint

VOCAB = 1024  # of the tiny llama, whose tokenizer is a real byte-level BPE
NO_SCALES = KVScheme(dtype="float32", granularity="per_tensor")
PROOF = QuantizationProof(
    quantized_tensors=1,
    planned_tensors=1,
    bits_per_weight=8,
    planned_bits_per_weight=8,
    size_bytes=1,
    size_ratio=0.5,
    reasons=(),
)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def float_checkpoint(folder: Path, model_type: str = "llama", *, dtype: Any = torch.float32, **settings: Any) -> Path:
    """A checkpoint folder with random weights and the tokenizer of the tiny llama."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(model_type, **(SIZES | settings))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.08) if parameter.dim() > 1 else parameter.add_(noise * 0.1)
    model.to(dtype).save_pretrained(folder)
    for path in tiny_checkpoint().iterdir():
        if path.suffix not in (".safetensors", ".gguf") and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    return folder


def quantized_model(
    folder: Path,
    scheme_of: Callable[[str], Scheme],
    model_type: str = "llama",
    *,
    tokenizer: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Artifact[QuantizedModel]:
    """``scheme_of`` is asked for every linear, the embedding and lm_head, by parameter name. ``tokenizer``: what
    differs in ``tokenizer.json``.
    """
    source = float_checkpoint(folder.with_name(f"{folder.name}-float"), model_type, **settings)
    config = json.loads((source / "config.json").read_text())
    reports: list[LinearReport] = []
    with create(folder, QuantizedModel) as draft:
        writer = CheckpointWriter(draft.folder)
        with safe_open(source / "model.safetensors", "numpy") as file:
            for name in sorted(file.keys()):
                weight = file.get_tensor(name)
                if weight.ndim == 1:
                    writer.add(name, weight)
                    continue
                scheme = scheme_of(name).fitted(weight.shape[1])
                group = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "lm_head"}.get(name)
                stored = stored_by_rtn(scheme, weight)
                if group is None:
                    writer.add_linear(name, stored)
                else:
                    tied = group == "embedding" and config["tie_word_embeddings"]
                    writer.add_embedding(name, stored, tied_to="lm_head.weight" if tied else None)
                reports.append(_report(name, group or _unit(name), weight.shape, scheme))
        writer.finish()
        for path in source.iterdir():
            if path.suffix != ".safetensors":
                shutil.copyfile(path, draft.folder / path.name)
        path = draft.folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(tokenizer or {})))
        embeddings = {r.name: r.scheme for r in reports if r.group in ("embedding", "lm_head")}
        if config["tie_word_embeddings"]:
            embeddings["lm_head.weight"] = embeddings["model.embed_tokens.weight"]
        linears = {r.name: r.scheme for r in reports if r.name not in embeddings}
        ignored = [name for name, scheme in (linears | embeddings).items() if scheme == FLOAT]
        config["quantization_config"] = quantization_config(
            quantized_ones(linears), quantized_ones(embeddings), ignored
        )
        (draft.folder / "config.json").write_text(json.dumps(config))
        record = QuantizedModel(
            asked=Quantize(candidates=("rtn",)),
            linears=tuple(reports),
            kv_cache=NO_SCALES,
            proof=PROOF,
            source_bytes=1,
            notes=(),
        )
        parents = {
            role: ArtifactRef(artifact_types[0], "0" * 64)
            for role, artifact_types in QuantizedModel.parent_types.items()
        }
        draft.finish(record, parents=parents)
    return load(folder, QuantizedModel)


def _unit(name: str) -> str:
    """What the stages call a linear's group, such as ``layers.0.qkv``."""
    layer, part = name.split(".")[2], name.split(".")[-2]
    kind = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}.get(part.removesuffix("_proj"))
    return f"layers.{layer}.{kind or part.removesuffix('_proj')}"


def _report(name: str, group: str, shape: tuple[int, ...], scheme: Scheme) -> LinearReport:
    return LinearReport(
        name=name,
        group=group,
        out_features=shape[0],
        in_features=shape[1],
        scheme=scheme,
        method="float" if scheme == FLOAT else "rtn",
        input_scale="identity",
        error_rtn=0.0,
        error=0.0,
    )
