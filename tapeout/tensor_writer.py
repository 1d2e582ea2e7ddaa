"""Safetensors files of any size, written one tensor at a time: the safetensors package needs all of them at once.

The header of a safetensors file comes before the data and may end in spaces. So a fixed room is kept for it, tensors
are appended as they come, and the header is written last. Readers map a file into memory and need every tensor at a
multiple of its element size: tensors whose size is no multiple of 8 bytes (short vectors) wait until the shard's end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tapeout.tensor_files import INDEX, SINGLE

HEADER_BYTES = 1 << 18  # with the 8 bytes of its length; about 1,500 tensors
ENTRY_BYTES = 120  # most of an entry of the header, without the tensor's name
ALIGNMENT = 8
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
# Bytes of an element, by the format's name of a type.
ELEMENT_BYTES = {
    "U64": 8, "I64": 8, "F64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Arrays of numpy, in a file with the permissions of any other: safetensors' own lets only the owner read it."""
    # safetensors writes the memory of an array as it lies there, whatever its strides.
    arrays = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode
    save_file(arrays, path, metadata=dict(metadata) if metadata else None)
    path.chmod(mode)


class ShardWriter:
    """Writes tensors in shards of at most ``shard_bytes`` (but at least one tensor), and their index.

    What fits one shard becomes a plain ``model.safetensors``, as every reader expects.
    """

    def __init__(self, folder: Path, *, shard_bytes: int = 2 << 30) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.total_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self._file: IO[bytes] | None = None
        self._start_shard()

    def add(self, name: str, array: NDArray[Any], dtype: str | None = None) -> None:
        """``dtype``: as safetensors names it, where numpy has no such type: BF16 for ``uint16`` words."""
        entry = len(name) + ENTRY_BYTES
        if self._entries and (
            self._bytes + array.nbytes > self.shard_bytes or self._entry_bytes + entry > HEADER_BYTES
        ):
            self._finish_shard()
            self._start_shard()
        self._entries[name] = {"dtype": dtype or DTYPES[array.dtype.name], "shape": list(array.shape)}
        self._entry_bytes += entry
        self._bytes += array.nbytes
        self.total_bytes += array.nbytes
        if array.nbytes % ALIGNMENT:
            self._waiting[name] = array
        else:
            self._append(name, array)

    def add_shard(self, path: Path, names: list[str]) -> None:
        """A whole file becomes a shard, by a hard link; ``names`` of its tensors."""
        shard = self._next_path()
        shard.hardlink_to(path)
        self._shards.append((shard, names))
        with shard.open("rb") as stream:
            self.total_bytes += shard.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")

    def finish(self) -> None:
        self._finish_shard()
        if len(self._shards) == 1:
            self._shards[0][0].rename(self.folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            path.rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        body = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(body, indent=1) + "\n")

    def _start_shard(self) -> None:
        self._path = self._next_path()
        self._entries: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, NDArray[Any]] = {}
        self._entry_bytes = ENTRY_BYTES  # the metadata
        self._bytes = self._offset = 0

    def _next_path(self) -> Path:
        return self.folder / f"shard-{len(self._shards)}.safetensors"

    def _append(self, name: str, array: NDArray[Any]) -> None:
        if self._file is None:
            self._file = self._path.open("wb")
            self._file.seek(HEADER_BYTES)
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._entries[name]["data_offsets"] = [self._offset, self._offset + array.nbytes]
        self._offset += array.nbytes

    def _finish_shard(self) -> None:
        for name, array in sorted(self._waiting.items(), key=lambda item: (-item[1].itemsize, item[0])):
            self._append(name, array)
        if self._file is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":")).encode()
        self._file.seek(0)
        self._file.write((HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(HEADER_BYTES - 8))
        self._file.close()
        self._shards.append((self._path, list(self._entries)))
        self._file = None
