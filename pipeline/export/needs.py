"""What an export takes of disk and memory, from the headers of the checkpoint's files alone."""

from __future__ import annotations

import math
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


def needs(folder: Path, entry: str, adapter: Path | None = None) -> Needs:
    """Float tensors stay in their files, which the graph shares; others are dequantized into memory, in float32.

    So are all that an adapter changes; then every weight is written.

    The check against transformers holds one segment's weights in float32 on either side, or the largest tensor's.
    """
    if entry.endswith(".gguf"):
        sizes = gguf.read_header(folder / entry).elements
        disk = held = 4 * sum(sizes)
    else:
        stored = [tensor for tensor in stored_tensors(folder).values() if tensor.dtype in ELEMENT_BYTES]
        codes = [tensor for tensor in stored if tensor.dtype not in FLOATS]
        sizes = [math.prod(tensor.shape) * (CODES if tensor.dtype == "I32" else 1) for tensor in stored]
        held = 4 * sum(sizes) if codes else 0
        disk = held
        if adapter is not None and not held:
            disk = sum(math.prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype] for tensor in stored)
    if adapter is not None:
        merged = 4 * merged_elements(adapter)
        disk, held = disk + merged, held + (0 if held else merged)
    largest = 4 * max(sizes, default=0)
    working = max(largest, min(4 * sum(sizes), SEGMENT_BYTES))
    return Needs(disk_bytes=disk, memory_bytes=BASE_BYTES + held + 2 * working)
