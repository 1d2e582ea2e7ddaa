"""What an export takes of disk and memory, from the headers of the checkpoint's files alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pipeline.export import gguf
from pipeline.export.adapter import merged_elements
from pipeline.export.mapped import FLOATS
from tapeout.resources import Needs
from tapeout.segments import SEGMENT_BYTES
from tapeout.tensor_files import stored_tensors
from tapeout.tensor_writer import ELEMENT_BYTES

BASE_BYTES = 900 << 20  # torch, transformers, the traced graph, and random caches of the check
CODES = 8  # weights in a 32-bit word of codes, at most
WRITTEN = 4  # copies of a tensor while it is dequantized: codes, scales, zero points, and its float32 words


def needs(folder: Path, entry: str, adapter: Path | None = None) -> Needs:
    """Of an export. Float tensors stay in their files, which the graph shares, as it does those of dequantized ones.

    With an adapter every weight is written once more.
    """
    model = model_needs(folder, entry, adapter)
    if adapter is None:
        return model
    sizes = _sizes(folder, entry)
    return Needs(model.disk_bytes + sizes.stored_bytes + 4 * merged_elements(adapter), model.memory_bytes)


def model_needs(folder: Path, entry: str, adapter: Path | None = None) -> Needs:
    """To load a checkpoint's model and compare it with its graph.

    What is dequantized, or changed by an adapter, is written in float32 and mapped, a tensor at a time. The check
    against transformers holds one segment's weights in float32 on either side, or the largest tensor's.
    """
    sizes = _sizes(folder, entry)
    disk = sizes.stored_bytes if sizes.quantized else 0
    disk += 0 if adapter is None else 4 * merged_elements(adapter)
    largest = 4 * max(sizes.elements, default=0)
    working = 2 * max(largest, min(4 * sum(sizes.elements), SEGMENT_BYTES))
    written = WRITTEN * largest if disk else 0
    return Needs(disk_bytes=disk, memory_bytes=BASE_BYTES + max(working, written))


@dataclass(frozen=True)
class _Sizes:
    """``elements`` of each tensor; ``stored_bytes`` of all, quantized ones in float32."""

    elements: list[int]
    stored_bytes: int
    quantized: bool


def _sizes(folder: Path, entry: str) -> _Sizes:
    if entry.endswith(".gguf"):
        elements = [*gguf.read_header(folder / entry).elements]
        return _Sizes(elements, 4 * sum(elements), quantized=True)
    stored = [tensor for tensor in stored_tensors(folder).values() if tensor.dtype in ELEMENT_BYTES]
    elements = [math.prod(tensor.shape) * (CODES if tensor.dtype == "I32" else 1) for tensor in stored]
    quantized = any(tensor.dtype not in FLOATS for tensor in stored)
    sizes = [
        4 if quantized and tensor.dtype not in ("BF16", "F16") else ELEMENT_BYTES[tensor.dtype] for tensor in stored
    ]
    return _Sizes(elements, sum(n * size for n, size in zip(elements, sizes, strict=True)), quantized)
