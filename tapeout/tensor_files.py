"""The tensors that a checkpoint's safetensors files hold, from their headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tapeout.errors import ExportError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # types of weights that are not quantized


@dataclass(frozen=True)
class StoredTensor:
    """``dtype``: as safetensors names it, such as BF16."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> Any:
        """As a torch tensor."""
        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.name)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """By name. Refused: files that cannot be read, and shards that do not agree with their index."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    index = _index(folder)
    read = sorted(set(index.values())) if index else [SINGLE]
    if index and SINGLE in files and SINGLE not in read:
        raise ExportError(
            f"{folder} holds both {SINGLE} and the shards of {INDEX}",
            expected="the weights once",
            remedy="remove the one that is stale",
        )
    if absent := [name for name in read if name not in files]:
        raise ExportError(
            f"{folder} lacks {few(absent)}",
            expected=f"the {len(read)} files named in {INDEX}" if index else f"{SINGLE}, or shards with {INDEX}",
            remedy="complete the checkpoint; weights in other formats must be saved as safetensors first",
        )
    if unread := [name for name in files if name not in read]:
        raise ExportError(
            f"{folder} holds {few(unread)}, which {INDEX if index else SINGLE} does not cover",
            expected="no weights beside those of the model",
            remedy="remove the files, or complete the index; an adapter is named in model.adapter",
        )
    found: dict[str, StoredTensor] = {}
    for name in read:
        for tensor in read_header(folder / name):
            if tensor.name in found:
                raise ExportError(
                    f"{tensor.name} is stored twice: in {found[tensor.name].file.name} and in {name}",
                    expected="every tensor in one shard",
                    remedy="complete the checkpoint from its source",
                )
            found[tensor.name] = tensor
    for name, file in index.items():
        if name not in found or found[name].file.name != file:
            raise ExportError(
                f"{INDEX} says that {name} is in {file}, but "
                + (f"it is in {found[name].file.name}" if name in found else "no file holds it"),
                expected="an index of the shards beside it",
                remedy="complete the checkpoint from its source",
            )
    if index and (extra := sorted(found.keys() - index.keys())):
        raise ExportError(
            f"the shards hold {few(extra)}, which {INDEX} does not list",
            expected="an index of all tensors",
            remedy="complete the checkpoint from its source",
        )
    return found


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one file; :class:`ExportError` where it is empty, cut off or no safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no mapping
            return [StoredTensor(path, n, str(s.get_dtype()), tuple(s.get_shape())) for n, s in parts.items()]
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.is_file() else 0
        raise ExportError(
            f"{path.name} is not a complete safetensors file: {error} ({size} bytes)",
            expected="a file whose header and tensors are all there",
            remedy="fetch it again: it is empty, cut off or of another format",
        ) from error


def few(names: Iterable[str]) -> str:
    """The first names, and how many there are.

    >>> few(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


def _index(folder: Path) -> Mapping[str, str]:
    """File by tensor; empty where there is no index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        index = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{path} does not parse: {error!r}", remedy="complete the checkpoint") from error
    if not index or any(Path(file).name != file for file in index.values()):
        raise ExportError(
            f"{path} lists {'no tensor' if not index else 'files outside its folder'}",
            expected="the shards beside it",
            remedy="complete the checkpoint",
        )
    return index
