"""Weights in safetensors files: written, shared with a checkpoint, and bound to the parameters of a portable graph."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from tapeout.coded_parameters import BLOCKS, FORMAT, SCALES, StoredCodes, coded_names, with_codes
from tapeout.errors import ExportError, ResourceError
from tapeout.mapped_weights import CodedParameter
from tapeout.portable_model import STORED, CodedTensor
from tapeout.progress import ProgressBar
from tapeout.resources import Needs, require
from tapeout.tensor_files import INDEX, StoredTensor, stored_tensors
from tapeout.tensor_writer import ShardWriter

PLACED = {**STORED, "U8": ir.DataType.UINT8}  # bytes are those of codes
SHARD_BYTES = 2 << 30  # a file is mapped as a whole, and Linux maps none that is larger than its memory


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
            if entry.get("dtype") in PLACED:
                begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
                kind, shape = PLACED[entry["dtype"]], ir.Shape(entry["shape"])
                placed[name] = ir.ExternalTensor(
                    path.name, begin, end - begin, kind, shape=shape, name=name, base_dir=folder
                )
    codes = {name: "U8" for name, tensor in placed.items() if tensor.dtype == ir.DataType.UINT8}
    for name in coded_names(codes):
        blocks, scales = (placed.pop(f"{name}{part}") for part in (BLOCKS, SCALES))
        placed[name] = CodedTensor(name, blocks, scales)
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
    if any(isinstance(parameter, CodedParameter) for parameter in model.parameters()):
        model.config.quantization_config = {"quant_method": FORMAT}  # so that transformers reads the folder, too
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tensors = {n: t for n, t in sorted(model.state_dict(keep_vars=True).items()) if n not in aliases}
    if _are_stored(tensors, checkpoint) and _link(checkpoint, folder):
        return
    reads: dict[str, Callable[[], torch.Tensor]] = {}
    size = 0
    for name, tensor in tensors.items():
        if isinstance(tensor, CodedParameter):
            reads |= {f"{name}{end}": p.read for end, p in zip((BLOCKS, SCALES), tensor.stored.parts, strict=True)}
            size += sum(math.prod(part.shape) for part in tensor.stored.parts)
        else:
            reads[name] = tensor.detach().contiguous
            size += tensor.nbytes
    require("the weights of the graph", Needs(disk_bytes=size, memory_bytes=0), folder)
    write_weights(folder, reads)


def write_weights(folder: Path, weights: Mapping[str, Callable[[], torch.Tensor]]) -> None:
    """Write safetensors files, each tensor in its own type. One is read at a time."""
    try:
        writer = ShardWriter(folder, shard_bytes=SHARD_BYTES)
        for name, read in ProgressBar(weights.items(), title="weights", unit="tensor"):
            _add(writer, name, read().contiguous())
        writer.finish()
    except OSError as error:
        raise ResourceError(
            f"weights cannot be written to {folder}: {error}",
            expected="room for the weights, in float32 where they were quantized",
            remedy="free disk space, or fix the folder's permissions",
        ) from error


def _add(writer: ShardWriter, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bfloat16:
        writer.add(name, tensor.view(torch.uint16).numpy(), "BF16")
    else:
        writer.add(name, tensor.numpy())


def _are_stored(tensors: Mapping[str, torch.Tensor], checkpoint: Path) -> bool:
    """Whether the checkpoint's files hold these tensors and no others."""
    stored = with_codes(stored_tensors(checkpoint)) if any(checkpoint.glob("*.safetensors")) else {}
    return stored.keys() == tensors.keys() and all(_is_stored(held, tensors[name]) for name, held in stored.items())


def _is_stored(stored: StoredTensor | StoredCodes, tensor: torch.Tensor) -> bool:
    if isinstance(tensor, CodedParameter):
        return stored == tensor.stored
    held = stored.read()
    return held.dtype == tensor.dtype and torch.equal(held, tensor)


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
    """Names of a parameter that has an earlier one: ``{later name: first name}``."""
    first: dict[torch.nn.Parameter, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(parameter, name)
        if known != name:
            aliases[name] = known
    return aliases
