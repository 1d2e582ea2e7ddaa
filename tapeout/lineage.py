"""What any artifact is, what it was made from and with which versions, read from the records alone.

It knows no type: a record is shown as its fields, so a new kind of artifact needs no change here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeout.artifact import RECORD, canonical_json, read_payload
from tapeout.errors import ArtifactError
from tapeout.file_hashes import sha256_file


@dataclass(frozen=True)
class Parent:
    """One ancestor. ``folder`` is None if no artifact beside this one has that digest."""

    name: str
    artifact_type: str
    digest: str
    folder: Path | None
    parents: tuple[Parent, ...]


@dataclass(frozen=True)
class Explanation:
    """``record``: the fields of its type. ``files``: name to size in bytes.

    ``problems``: files that are missing or changed since the record was written, and a record that was edited.
    """

    folder: Path
    artifact_type: str
    digest: str
    record: Mapping[str, Any]
    files: Mapping[str, int]
    parents: tuple[Parent, ...]
    problems: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())


def explain(path: Path) -> Explanation:
    """Read the artifact at ``path`` (its folder or its ``record.json``) and hash its files.

    :class:`ArtifactError` if no artifact is there; it names the artifacts below ``path``, if any are.
    """
    folder = path.parent if path.name == RECORD else path
    if not (folder / RECORD).is_file():
        raise _no_artifact(folder)
    body = read_payload(folder)
    return Explanation(
        folder=folder,
        artifact_type=body["artifact_type"],
        digest=body["digest"],
        record=body["record"],
        files={name: entry["size_bytes"] for name, entry in body["files"].items()},
        parents=_ancestors(body["parents"], siblings(folder)),
        problems=tuple(_problems(folder, body)),
    )


def siblings(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Digest -> folder and record of every artifact that lies beside ``folder``."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for record in sorted(folder.absolute().parent.glob(f"*/{RECORD}")):
        body = read_payload(record.parent)
        found[body["digest"]] = (folder.parent / record.parent.name, body)
    return found


def _ancestors(parents: Mapping[str, Any], known: Mapping[str, tuple[Path, dict[str, Any]]]) -> tuple[Parent, ...]:
    chain: list[Parent] = []
    for name, parent in parents.items():
        folder, body = known.get(parent["digest"], (None, {"parents": {}}))
        chain.append(Parent(name, **parent, folder=folder, parents=_ancestors(body["parents"], known)))
    return tuple(chain)


def _problems(folder: Path, body: Mapping[str, Any]) -> list[str]:
    unsigned = {key: value for key, value in body.items() if key != "digest"}
    problems: list[str] = []
    if hashlib.sha256(canonical_json(unsigned)).hexdigest() != body["digest"]:
        problems.append(f"{RECORD} was edited: its digest does not match its content")
    for name, entry in body["files"].items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif sha256_file(path) != entry["sha256"]:
            problems.append(f"{name} changed since it was recorded")
    return problems


def fields(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """A record for display: single values by dotted name, and lists and mappings of values as tables.

    >>> fields({"layers": 2, "versions": {"onnx": "1"}, "checks": [{"n": 3}]})
    ({'layers': 2}, {'versions': [{'name': 'onnx', 'value': '1'}], 'checks': [{'n': 3}]})
    """
    single: dict[str, Any] = {}
    tables: dict[str, list[dict[str, Any]]] = {}

    def describe(name: str, value: Any) -> None:
        if isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
            for key, item in value.items():
                describe(f"{name}.{key}", item)
        elif isinstance(value, dict):
            tables[name] = [{"name": key, "value": item} for key, item in value.items()]
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            tables[name] = value
        else:
            single[name] = value

    for name, value in record.items():
        describe(name, value)
    return single, tables


def _no_artifact(folder: Path) -> ArtifactError:
    if not folder.is_dir():
        return ArtifactError(
            f"{folder} is a file" if folder.exists() else f"there is no folder {folder}",
            expected="an artifact's folder, such as artifacts/candidate",
            remedy="check the path; `make repro` builds what is missing",
        )
    below = sorted(record.parent.name for record in folder.glob(f"*/{RECORD}"))
    if below:
        return ArtifactError(f"{folder} is not an artifact", expected=f"one of those in it: {', '.join(below)}")
    return ArtifactError(
        f"no {RECORD} in {folder}",
        expected="an artifact's folder, such as artifacts/candidate",
        remedy="`make repro` builds them; a stage that was interrupted leaves no artifact",
    )
