"""What an export takes of disk and memory, from the headers of the checkpoint's files alone."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.export import gguf
from pipeline.export.gguf_experts import parameter_sizes
from pipeline.export.gguf_mixtures import is_mixture
from tapeout.adapters import read_adapter
from tapeout.coded_parameters import StoredCodes, with_codes
from tapeout.resources import Needs
from tapeout.segments import SEGMENT_BYTES
from tapeout.tensor_files import FLOATS, StoredTensor, stored_tensors
from tapeout.tensor_writer import ELEMENT_BYTES

BASE_BYTES = 900 << 20  # torch, transformers, the traced graph, and random caches of the check
CODES = 8  # weights in a 32-bit word of codes, where the configuration does not say
STACKED = re.compile(r"\.experts\.\d+\.")  # in names of weights that transformers stacks
STACKED_COPIES = 2  # of a layer's experts: gates and ups are stacked, and then joined
WRITTEN = 4  # copies of a tensor while it is dequantized: codes, scales, zero points, and its float32 words


def needs(folder: Path, entry: str, adapter: Path | None = None) -> Needs:
    """Of an export. Float tensors stay in their files, which the graph shares, as it does those that are written.

    With an adapter every weight is written once more.
    """
    model = model_needs(folder, entry, adapter)
    sizes = _sizes(folder, entry)
    if adapter is None:
        return model
    graph = sizes.stored_bytes + (4 - sizes.least_bytes) * sum(read_adapter(adapter).elements())
    return Needs(model.disk_bytes + graph, model.memory_bytes)


def model_needs(folder: Path, entry: str, adapter: Path | None = None) -> Needs:
    """To load a checkpoint's model and compare it with its graph.

    What is dequantized, or changed by an adapter, is written in float32 and mapped, a tensor at a time. Where experts
    are stored one by one, all weights are written, those of a layer's experts stacked. The check against transformers
    holds one segment's weights in float32 on either side, or the largest tensor's.
    """
    sizes = _sizes(folder, entry)
    merged = [] if adapter is None else read_adapter(adapter).elements()
    disk = (sizes.stored_bytes if sizes.written or sizes.stacked_bytes else 0) + 4 * sum(merged)
    working = 2 * max(4 * max(sizes.elements, default=0), min(4 * sum(sizes.elements), SEGMENT_BYTES))
    written = WRITTEN * 4 * max([*sizes.written, *merged], default=0)
    stacked = STACKED_COPIES * sizes.stacked_bytes
    return Needs(disk_bytes=disk, memory_bytes=BASE_BYTES + max(working, written, stacked))


@dataclass(frozen=True)
class _Sizes:
    """``elements`` of each tensor, and of each that is ``written`` in float32. ``stored_bytes``: of all of them, then.

    ``least_bytes``: of an element of a weight. Experts of a layer that are stored one by one count as one tensor, of
    ``stacked_bytes`` in the largest layer.
    """

    elements: list[int]
    written: list[int]
    stored_bytes: int
    least_bytes: int
    stacked_bytes: int = 0


def _sizes(folder: Path, entry: str) -> _Sizes:
    if entry.endswith(".gguf"):
        header = gguf.read_header(folder / entry)
        if is_mixture(header.metadata):
            return _mixture_sizes(header)
        elements = [*header.elements]
        return _Sizes(elements, elements, 4 * sum(elements), 4)
    named = with_codes(stored_tensors(folder))
    stored = [tensor for tensor in named.values() if tensor.dtype in ELEMENT_BYTES]
    codes = _weights_of_a_word(folder)
    packed = [codes if tensor.dtype == "I32" else 1 for tensor in stored]
    elements = [math.prod(tensor.shape) * each for tensor, each in zip(stored, packed, strict=True)]
    written = [n for n, tensor in zip(elements, stored, strict=True) if tensor.dtype not in FLOATS]
    kept = {tensor.dtype for tensor in stored if tensor.dtype in FLOATS}
    size = sum(round(n * _written_bits(tensor) / 8) for n, tensor in zip(elements, stored, strict=True))
    least = 4 if written else min((ELEMENT_BYTES[kind] for kind in kept), default=4)
    layers: dict[str, int] = {}
    alone: list[int] = []
    for n, tensor in zip(elements, stored, strict=True):
        if found := STACKED.search(tensor.name):
            layer = tensor.name[: found.start()]
            layers[layer] = layers.get(layer, 0) + n
        else:
            alone.append(n)
    stacked = max(layers.values(), default=0) * min(least, 4)
    return _Sizes([*alone, *layers.values()], written, size, min(least, 4), stacked)


def _mixture_sizes(header: gguf.GgufHeader) -> _Sizes:
    """A parameter of experts is put together in memory, of experts that are dequantized one at a time."""
    sizes = parameter_sizes(header)
    least = min(size.stored_bytes // size.elements for size in sizes)
    return _Sizes(
        [size.elements for size in sizes],
        [size.piece for size in sizes],
        sum(size.stored_bytes for size in sizes),
        least,
        max(size.stored_bytes for size in sizes),
    )


def _written_bits(tensor: StoredTensor | StoredCodes) -> float:
    """Of a weight in the graph's files. Codes in bytes stay, where these are copied."""
    if isinstance(tensor, StoredCodes):
        return 8 * sum(math.prod(part.shape) for part in tensor.parts) / math.prod(tensor.shape)
    return 8 * ELEMENT_BYTES[tensor.dtype] if tensor.dtype in FLOATS else 32


def _weights_of_a_word(folder: Path) -> int:
    """In 32 bits, by the configuration; what is wrong with that is said when it is loaded."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        groups = (config.get("quantization_config") or {}).get("config_groups") or {}
        bits = [group["weights"]["num_bits"] for group in groups.values() if group.get("weights")]
        return -(-32 // min(bits)) if bits else CODES
    except (OSError, ValueError, AttributeError, KeyError, TypeError, ZeroDivisionError):
        return CODES
