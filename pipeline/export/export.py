"""Export: a checkpoint to a PortableGraph, whose parameters are stored in the safetensors files beside it.

The traced graph (:mod:`pipeline.export.trace`) holds no weights of its own (:mod:`pipeline.export.weights`). It is kept
only if it computes what transformers computes (:mod:`pipeline.export.check`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pipeline.export.adapter import merge_adapter
from pipeline.export.check.difference import largest_difference
from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.needs import needs
from pipeline.export.rotary import fix_rotary
from pipeline.export.tokenizer import save_tokenizer
from pipeline.export.trace import longest, trace
from pipeline.export.weights import bind_weights, save_model, tied_parameters
from tapeout import artifact, segments
from tapeout.artifact import Parents
from tapeout.errors import ExportError
from tapeout.file_hashes import sha256_file
from tapeout.graph_analysis.groups import find_groups
from tapeout.graph_analysis.rotary import find_rotary
from tapeout.mapped_model import unshare_layers
from tapeout.operators import graph_state
from tapeout.operators.attention import AttentionNode
from tapeout.portable_graph import PortableGraph
from tapeout.portable_model import save_graph
from tapeout.resources import require
from tapeout.work_folder import scratch_folder, source_hash, work_folder

MODEL_FILE = "model.onnx"
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")


def export(
    checkpoint: Path,
    entry: str,
    folder: Path,
    *,
    adapter: Path | None = None,
    max_positions: int,
    tolerance: float,
    seed: int,
    parents: Parents,
    progress: Callable[[str], None] = lambda _: None,
) -> artifact.Artifact[PortableGraph]:
    """Export a checkpoint and check it: max relative logit error of the graph on ONNX Runtime at most ``tolerance``.

    ``adapter``: the folder of a LoRA adapter, which is merged into the weights first. An interrupted check goes on at
    its last finished segment or layer; what comes before it, minutes for no model, is done again.
    """
    versions = {name: version(name) for name in LIBRARIES}
    with scratch_folder(folder) as scratch, artifact.create(folder, PortableGraph) as draft:  # without a killed run's
        require("export", needs(checkpoint, entry, adapter), folder.parent, progress)
        progress("loading the checkpoint")
        loaded = load_checkpoint(checkpoint, entry, scratch / "model")
        model = loaded.model
        if adapter is not None:
            progress("merging the adapter")
            merge_adapter(model, adapter, scratch / "adapter")
        unshare_layers(model)
        model_positions = longest(model)
        positions = min(max_positions, model_positions)
        factors = fix_rotary(model, positions)
        progress("comparing the tokenizer with transformers'")
        tokenizer = save_tokenizer(checkpoint, entry, draft.folder, int(model.get_input_embeddings().weight.shape[0]))
        stop_tokens = find_stop_tokens(model, tokenizer)
        graph_model = trace(model, progress)
        progress("writing the weights")
        aliases = tied_parameters(model)
        save_model(model, aliases, loaded.weights, draft.folder)
        bind_weights(graph_model, draft.folder, aliases)
        for node in graph_model.graph:
            node.metadata_props.clear()  # the exporter's stack traces, with paths of this machine
        groups, rotary = find_groups(graph_model, aliases), find_rotary(graph_model)
        state = graph_state(graph_model.graph, "float32")
        attention = next(iter(AttentionNode.all(graph_model.graph)), None)
        save_graph(graph_model, draft.folder / MODEL_FILE)
        progress("comparing with transformers")
        key = {
            "graph": sha256_file(draft.folder / MODEL_FILE),
            "weights": _files(checkpoint),
            "adapter": _files(adapter),
        }
        code = [source_hash(Path(file).parent) for file in (__file__, segments.__file__)]
        key |= {"positions": positions, "seed": seed, "versions": versions, "code": code}
        with work_folder(folder, key) as work:
            difference = largest_difference(model, draft.folder / MODEL_FILE, work, positions=positions, seed=seed)
        if not difference.error <= tolerance:
            raise ExportError(
                f"the exported graph's logits differ from transformers by {difference.error:.2e} (relative) at "
                f"{difference.where}",
                expected=f"at most {tolerance:.0e} (export.tolerance)",
                remedy="report the model; its graph was not kept",
            )
        config = model.config.get_text_config()
        record = PortableGraph(
            architecture=type(model).__name__,
            layers=config.num_hidden_layers,
            state=state,
            hidden_size=config.hidden_size,
            heads=attention.heads if attention else 0,
            kv_heads=attention.kv_heads if attention else 0,
            head_size=attention.head_size if attention else 0,
            value_size=attention.value_size if attention else 0,
            vocab_size=int(model.get_output_embeddings().weight.shape[0]),
            tied_embeddings=bool(aliases),
            embedding=_parameter_name(model, model.get_input_embeddings().weight),
            rotary=rotary,
            rotary_factors=factors,
            max_positions=positions,
            model_positions=model_positions,
            groups=groups,
            stop_tokens=stop_tokens,
            dequantized=loaded.dequantized,
            max_relative_error=float(f"{difference.error:.1e}"),
            versions=versions,
        )
        draft.finish(record, parents=parents)
    return artifact.load(folder, PortableGraph)


def _files(folder: Path | None) -> list[tuple[str, int, int]]:
    """Enough to see that a checkpoint is another one. Links to its files change the ctime, so that does not count."""
    found = sorted(folder.iterdir()) if folder else []
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found]


def _parameter_name(model: torch.nn.Module, parameter: torch.Tensor) -> str:
    return next(name for name, p in model.named_parameters() if p is parameter)


def find_stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """What ends an answer: by the generation config, else by the model's config; and by the tokenizer."""
    generation = model.generation_config.eos_token_id
    configured = model.config.get_text_config().eos_token_id if generation is None else generation
    listed: list[Any] = [*configured] if isinstance(configured, list | tuple) else [configured]
    found = {token for token in (*listed, tokenizer.eos_token_id) if token is not None}
    rows = int(model.get_output_embeddings().weight.shape[0])
    if not found:
        raise ExportError(
            "the model has no stop token: neither its generation config nor its tokenizer names an eos token",
            expected="a token that ends an answer",
            remedy="set eos_token_id in generation_config.json, or eos_token in tokenizer_config.json",
        )
    if wrong := [token for token in found if not isinstance(token, int) or not 0 <= token < rows]:
        raise ExportError(
            f"eos_token_id is {wrong[0]!r}",
            expected=f"token ids below {rows}, the rows of lm_head",
            remedy="correct eos_token_id in generation_config.json or config.json",
        )
    return tuple(sorted(found))
