"""Write a safetensors file tensor by tensor: memory holds one buffer, not the model.

The safetensors package writes a file only from all of its tensors at once. The format is small: a length (8 bytes,
little endian), a JSON header with type, shape and offsets of each tensor, then the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors). Order and padding are those of the safetensors package, so both writers give
the same bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Bytes of an element, by the format's name of a type; types in the order in which the safetensors package stores them.
ELEMENT_BYTES = {
    "U64": 8, "I64": 8, "F64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """Type, as safetensors names it (``BF16``), and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """
        >>> TensorSpec("BF16", (3, 4)).nbytes
        24
        """
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def write_tensors(
    path: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Iterable[bytes | memoryview]]
) -> None:
    """Write the tensors of ``specs``. ``read`` gives the bytes of a tensor in pieces, when its turn has come.

    :class:`ValueError` where a tensor has more or fewer bytes than its spec says.
    """
    kinds = list(ELEMENT_BYTES)
    order = sorted(specs, key=lambda name: (kinds.index(specs[name].dtype), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + specs[name].nbytes
        header[name] = {"dtype": specs[name].dtype, "shape": list(specs[name].shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in order:
            written = sum(stream.write(piece) for piece in read(name))
            if written != specs[name].nbytes:
                raise ValueError(f"{name} has {written} bytes, and {specs[name].nbytes} by its type and shape")
