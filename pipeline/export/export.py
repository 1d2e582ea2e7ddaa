"""Export: a checkpoint to a PortableGraph, whose parameters are stored in the safetensors file beside it.

The traced graph (:mod:`pipeline.export.trace`) holds no weights of its own, and is kept only if it computes
what transformers computes (:mod:`pipeline.export.check`).
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from tqdm import tqdm

from pipeline.export.adapter import merge_adapter
from pipeline.export.check import largest_difference
from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.needs import needs
from pipeline.export.rotary import fix_rotary
from pipeline.export.tokenizer import save_tokenizer
from pipeline.export.trace import KVShape, longest, trace
from tapeout import artifact
from tapeout.artifact import Parents
from tapeout.errors import ExportError
from tapeout.file_hashes import sha256_file
from tapeout.graph_analysis import find_groups, find_rotary, is_attention, size
from tapeout.portable_graph import PortableGraph
from tapeout.portable_model import STORED, save_graph
from tapeout.resources import Needs, require
from tapeout.tensor_files import INDEX, stored_tensors
from tapeout.tensor_writer import ONE_FILE, ShardWriter
from tapeout.work_folder import source_hash, work_folder

MODEL_FILE = "model.onnx"
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")


def bind_weights(model: ir.Model, folder: Path, aliases: Mapping[str, str]) -> None:
    """Point every parameter at its bytes in the safetensors files of ``folder``, as ONNX external data.

    ``aliases`` maps a tied parameter to the name its bytes are stored under.
    """
    placed: dict[str, ir.ExternalTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(header_bytes))
        for name, entry in header.items():
            if entry.get("dtype") in STORED:
                begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
                kind, shape = STORED[entry["dtype"]], ir.Shape(entry["shape"])
                placed[name] = ir.ExternalTensor(
                    path.name, begin, end - begin, kind, shape=shape, name=name, base_dir=folder
                )
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if value.const_value is not None:
            continue  # a buffer that is not in the checkpoint, such as rotary frequencies: kept inline
        stored = aliases.get(name, name)
        if stored != name:
            del graph.initializers[name]
            known = graph.initializers.get(stored)
            if known is not None:
                ir.convenience.replace_all_uses_with(value, known)
                continue
            value.name = stored
            graph.initializers[stored] = value
        if stored not in placed:
            raise ExportError(f"parameter {name} is not in {folder}", expected="every parameter in the checkpoint")
        value.const_value = placed[stored]


def save_model(model: Any, aliases: Collection[str], checkpoint: Path, folder: Path) -> None:
    """Write configuration and weights as transformers does, the weights in the type they are held in.

    Names are the module's own, which the graph carries, not those of the family's first release. ``aliases``: names of
    parameters that are stored under another one. Where the files of ``checkpoint`` hold just these tensors under these
    names, they are linked; :class:`ResourceError` where there is no room for a copy.
    """
    model.config.dtype = str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tensors = {name: t.detach().contiguous() for name, t in sorted(model.state_dict().items()) if name not in aliases}
    if _are_stored(tensors, checkpoint) and _link(checkpoint, folder):
        return
    size = sum(tensor.nbytes for tensor in tensors.values())
    require("the weights of the graph", Needs(disk_bytes=size, memory_bytes=0), folder)
    writer = ShardWriter(folder, shard_bytes=ONE_FILE)
    for name in tqdm(tensors, desc="weights", disable=None):
        if tensors[name].dtype == torch.bfloat16:
            writer.add(name, tensors[name].view(torch.uint16).numpy(), "BF16")
        else:
            writer.add(name, tensors[name].numpy())
    writer.finish()


def _are_stored(tensors: Mapping[str, torch.Tensor], checkpoint: Path) -> bool:
    """Whether the checkpoint's files hold these tensors and no others."""
    stored = stored_tensors(checkpoint) if any(checkpoint.glob("*.safetensors")) else {}
    return stored.keys() == tensors.keys() and all(
        held.dtype == tensors[name].dtype and torch.equal(held, tensors[name])
        for name, held in ((name, tensor.read()) for name, tensor in stored.items())
    )


def _link(checkpoint: Path, folder: Path) -> bool:
    """The same weights files in ``folder``, without a copy; False where the file system cannot.

    A file that is changed in place changes in both artifacts, and both are refused from then on by their hashes.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    try:
        for path in files:
            (folder / path.name).hardlink_to(path.resolve())
    except OSError:  # another file system, or one without links
        for path in files:
            (folder / path.name).unlink(missing_ok=True)
        return False
    if (checkpoint / INDEX).is_file():
        shutil.copyfile(checkpoint / INDEX, folder / INDEX)
    return True


def tied_parameters(model: torch.nn.Module) -> dict[str, str]:
    """Parameters that share storage with an earlier one: ``{later name: first name}``."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(parameter.data_ptr(), name)
        if known != name:
            aliases[name] = known
    return aliases


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
    require("export", needs(checkpoint, entry, adapter), folder.parent, progress)
    progress("loading the checkpoint")
    loaded = load_checkpoint(checkpoint, entry)
    model = loaded.model
    if adapter is not None:
        progress("merging the adapter")
        merge_adapter(model, adapter)
    positions = min(max_positions, longest(model))
    factors = fix_rotary(model, positions)
    versions = {name: version(name) for name in LIBRARIES}
    with artifact.create(folder, PortableGraph) as draft:
        progress("comparing the tokenizer with transformers'")
        tokenizer = save_tokenizer(checkpoint, entry, draft.folder, int(model.get_input_embeddings().weight.shape[0]))
        stop_tokens = find_stop_tokens(model, tokenizer)
        graph_model = trace(model, progress)
        progress("writing the weights")
        aliases = tied_parameters(model)
        save_model(model, aliases, checkpoint, draft.folder)
        bind_weights(graph_model, draft.folder, aliases)
        for node in graph_model.graph:
            node.metadata_props.clear()  # the exporter's stack traces, with paths of this machine
        groups, rotary, shapes = find_groups(graph_model, aliases), find_rotary(graph_model), _cache_shapes(graph_model)
        save_graph(graph_model, draft.folder / MODEL_FILE)
        progress("comparing with transformers")
        key = {
            "graph": sha256_file(draft.folder / MODEL_FILE),
            "weights": _files(checkpoint),
            "adapter": _files(adapter),
        }
        key |= {"positions": positions, "seed": seed, "versions": versions, "code": source_hash(Path(__file__).parent)}
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
            layers=len(shapes),
            hidden_size=config.hidden_size,
            heads=shapes[0].query_heads,
            kv_heads=shapes[0].kv_heads,
            head_size=shapes[0].head_size,
            vocab_size=int(model.get_output_embeddings().weight.shape[0]),
            tied_embeddings=bool(aliases),
            embedding=_parameter_name(model, model.get_input_embeddings().weight),
            rotary=rotary,
            rotary_factors=factors,
            max_positions=positions,
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


def _cache_shapes(model: ir.Model) -> list[KVShape]:
    attention = [node.inputs for node in model.graph if is_attention(node)]
    return [KVShape(size(inputs[0], 1), size(inputs[4], 1), size(inputs[4], 3)) for inputs in attention]
