"""The artifact store: a folder of files and one ``record.json``, written last.

A stage writes its files into a hidden sibling folder; only when its record is complete does that folder take
the artifact's place. So an artifact is whole or absent, and an interrupted stage leaves nothing that loads.

    with create(Path("artifacts/graph"), PortableGraph) as draft:
        (draft.folder / "model.onnx").write_bytes(...)
        draft.finish(PortableGraph(layers=30, ...), parents={"source": source})

    graph = load(Path("artifacts/graph"), PortableGraph)      # checks the record and every file's content
    graph.record.layers, graph.folder / "model.onnx", graph.digest

A file's content is hashed once per file identity (tapeout/file_hashes.py), so opening an artifact again is quick.

The digest is the sha256 of the canonical record, which holds the sha256 of every file and, by name, the type and the
digest of every parent, and no clock time: the same inputs give the same digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tapeout.durable import recover, replace_folder
from tapeout.errors import ArtifactError
from tapeout.file_hashes import Read, remembered_sha256, sha256_file

RECORD = "record.json"
SHOWN_BYTES = 1 << 30  # from here on, hashing shows its progress
KEYS = frozenset({"artifact_type", "schema_version", "record", "files", "parents", "digest"})


ParentTypes = Mapping[str, tuple[str, ...]]  # by the parent's name: what it may be


class Frozen(BaseModel):
    """Base of every typed value that is written to disk: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Record(Frozen):
    """Base of the records that stages read and write.

    Subclasses set ``artifact_type`` and ``remedy`` and add typed fields.

    ``parent_types``: what an artifact of this type can be made from.
    """

    artifact_type: ClassVar[str]
    remedy: ClassVar[str] = "run `dvc repro`"
    schema_version: ClassVar[int] = 2
    parent_types: ClassVar[ParentTypes] = {}


R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class FileEntry:
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class ArtifactRef:
    """An artifact by type and digest, wherever it lies."""

    artifact_type: str
    digest: str


@dataclass(frozen=True)
class Artifact(Generic[R]):
    """A loaded artifact: its folder, its record, and its parents."""

    folder: Path
    record: R
    files: Mapping[str, FileEntry]
    parents: Mapping[str, ArtifactRef]  # by name
    digest: str

    @property
    def ref(self) -> ArtifactRef:
        return ArtifactRef(self.record.artifact_type, self.digest)

    def verify(self) -> None:
        """Hash every file again, whatever is remembered; :class:`ArtifactError` names the first that changed."""
        verify_files(self.folder, self.files, remedy=self.record.remedy)


Parents = Mapping[str, Artifact[Any] | ArtifactRef]  # by name


def canonical_json(value: Any) -> bytes:
    """The one byte string a value hashes as: sorted keys, no spaces, no NaN.

    >>> canonical_json({"b": 1, "a": [1.5]})
    b'{"a":[1.5],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass
class Draft(Generic[R]):
    """An artifact that is being written. Call :meth:`finish` once, as the last step."""

    folder: Path
    record_type: type[R]
    payload: dict[str, Any] | None = field(default=None, init=False)

    def finish(self, record: R, *, parents: Parents) -> None:
        """Complete the record. :class:`ArtifactError` for a parent that does not fit ``parent_types`` of its type."""
        refs = {name: parent.ref if isinstance(parent, Artifact) else parent for name, parent in parents.items()}
        _check_parents(self.record_type, refs, str(self.folder))
        names = sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())
        sizes = {name: (self.folder / name).stat().st_size for name in names}
        with _hashing(self.record_type.artifact_type, sum(sizes.values())) as read:
            files = {
                name: {"sha256": sha256_file(self.folder / name, read), "size_bytes": size}
                for name, size in sizes.items()
            }
        body = {
            "artifact_type": self.record_type.artifact_type,
            "schema_version": self.record_type.schema_version,
            "record": record.model_dump(mode="json"),
            "files": files,
            "parents": {name: asdict(refs[name]) for name in sorted(refs)},
        }
        self.payload = {"digest": _digest(body), **body}


@contextmanager
def create(folder: Path, record_type: type[R]) -> Generator[Draft[R]]:
    """Write an artifact as a whole. An error or interrupt leaves the folder as it was."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        recover(folder)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        draft = Draft(partial, record_type)
        yield draft
        if draft.payload is None:
            raise ArtifactError(
                f"{record_type.artifact_type} was not finished", expected="Draft.finish as the last step"
            )
        record = partial / RECORD
        with record.open("w") as stream:
            json.dump(draft.payload, stream, indent=1, allow_nan=False)
            stream.write("\n")
        replace_folder(partial, folder)
    except OSError as error:
        raise ArtifactError(
            f"cannot write {record_type.artifact_type} to {folder}: {error.strerror or error}",
            remedy="free disk space or fix the permissions, then run the stage again",
        ) from error
    finally:
        if partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def load(folder: Path, record_type: type[R]) -> Artifact[R]:
    """Open a finished artifact, whole and unchanged: every file it lists and no other, with the content it had."""
    found = load_record(folder, record_type)
    _require_listed_files(folder, found.files, record_type.remedy)
    verify_files(folder, found.files, remedy=record_type.remedy, hashed=remembered_sha256)
    return found


def load_record(folder: Path, record_type: type[R]) -> Artifact[R]:
    """The record alone, intact and of this type; its files need not be there."""
    body = read_payload(folder)
    if body["artifact_type"] != record_type.artifact_type:
        raise ArtifactError(
            f"{folder} holds a {body['artifact_type']}",
            expected=f"a {record_type.artifact_type}",
            remedy=record_type.remedy,
        )
    if (written := body["schema_version"]) != record_type.schema_version:
        newer = isinstance(written, int) and written > record_type.schema_version
        age = "a newer" if newer else "an older"
        raise ArtifactError(
            f"{folder} was written as {record_type.artifact_type} schema {written}, by {age} version of Tapeout",
            expected=f"schema {record_type.schema_version}, which this version writes",
            remedy="update Tapeout: `pip install --upgrade tapeout`" if newer else record_type.remedy,
        )
    header = _header(folder, body, record_type.remedy)
    try:
        record = record_type.model_validate_json(json.dumps(body["record"]))
    except ValidationError as error:
        raise ArtifactError(
            f"{folder / RECORD} is not a {record_type.artifact_type} of this version: {error.error_count()} fields "
            f"differ, first {'.'.join(map(str, error.errors()[0]['loc']))}",
            remedy=record_type.remedy,
        ) from error
    _check_parents(record_type, header.parents, str(folder / RECORD))
    return Artifact(folder, record, header.files, header.parents, header.digest)


def _check_parents(record_type: type[Record], parents: Mapping[str, ArtifactRef], where: str) -> None:
    for name, parent in parents.items():
        artifact_types = record_type.parent_types.get(name, ())
        if parent.artifact_type not in artifact_types:
            raise ArtifactError(
                f"{where} names a {parent.artifact_type} as {name} of a {record_type.artifact_type}",
                expected=f"a {' or '.join(artifact_types)}"
                if artifact_types
                else f"a parent named {', '.join(record_type.parent_types) or 'none'}",
                remedy=record_type.remedy,
            )


@dataclass(frozen=True)
class Header:
    """What every record says, whatever its type."""

    artifact_type: str
    digest: str
    record: Mapping[str, Any]  # the fields of its type
    files: Mapping[str, FileEntry]
    parents: Mapping[str, ArtifactRef]  # by name

    @property
    def ref(self) -> ArtifactRef:
        return ArtifactRef(self.artifact_type, self.digest)


def load_header(folder: Path, *, remedy: str = "run `dvc repro`") -> Header:
    """Type, digest, files and parents of any artifact, its record checked, without knowing its type."""
    return _header(folder, read_payload(folder), remedy)


def verify(folder: Path, *, remedy: str = "run `dvc repro`") -> Header:
    """Check any finished artifact without knowing its type: its record, its list of files, and every file's content.

    Every file is hashed again, whatever is remembered.
    """
    header = load_header(folder, remedy=remedy)
    _require_listed_files(folder, header.files, remedy)
    verify_files(folder, header.files, remedy=remedy)
    return header


def _header(folder: Path, payload: Mapping[str, Any], remedy: str) -> Header:
    body = dict(payload)
    digest = body.pop("digest")
    if digest != _digest(body):
        raise ArtifactError(f"{folder / RECORD} was edited: its digest does not match", remedy=remedy)
    try:
        files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
        parents = {name: ArtifactRef(**parent) for name, parent in body["parents"].items()}
    except (AttributeError, TypeError) as error:
        raise ArtifactError(
            f"{folder / RECORD} does not list files and parents: {error}", expected="a record", remedy=remedy
        ) from error
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or name in ("", ".", RECORD):
            raise ArtifactError(
                f"{folder / RECORD} lists {name!r}", expected="files inside the artifact's folder", remedy=remedy
            )
    return Header(body["artifact_type"], digest, body["record"], files, parents)


def _require_listed_files(folder: Path, files: Mapping[str, FileEntry], remedy: str) -> None:
    """Every file that the record lists lies there with its size, and nothing else does."""
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry.size_bytes:
            size = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            raise ArtifactError(f"{path} is {size}", expected=f"{entry.size_bytes} bytes as recorded", remedy=remedy)
    for root, folders, names in os.walk(folder):
        links = [name for name in folders if Path(root, name).is_symlink()]
        for path in (Path(root, name) for name in (*links, *names)):
            if (name := path.relative_to(folder).as_posix()) not in (*files, RECORD):
                raise ArtifactError(
                    f"{path} is not listed in {RECORD}",
                    expected=f"only the {len(files)} files of the artifact: {', '.join(sorted(files)[:5])} …",
                    remedy=f"remove {name}, or {remedy}",
                )


def verify_files(
    folder: Path,
    files: Mapping[str, FileEntry],
    *,
    remedy: str = "run `dvc repro`",
    hashed: Callable[[Path, Read], str] = sha256_file,
) -> None:
    """Hash every file; :class:`ArtifactError` names the first that changed since it was written."""
    with _hashing(folder.name, sum(entry.size_bytes for entry in files.values())) as read:
        for name, entry in files.items():
            try:
                actual = hashed(folder / name, read)
            except OSError as error:
                raise ArtifactError(f"{folder / name} cannot be read: {error.strerror}", remedy=remedy) from error
            if actual != entry.sha256:
                raise ArtifactError(
                    f"{folder / name} has sha256 {actual[:12]}…",
                    expected=f"{entry.sha256[:12]}… as recorded when it was written",
                    remedy=remedy,
                )


@contextmanager
def _hashing(what: str, size: int) -> Generator[Read]:
    """Progress through so many bytes, where they take longer than a moment."""
    if size < SHOWN_BYTES:
        yield lambda _: None
        return
    from tapeout.progress import ProgressBar

    with ProgressBar(title=f"hashing {what}", unit="B", total=size) as bar:
        yield bar.update


def read_payload(folder: Path) -> dict[str, Any]:
    """The raw content of ``record.json``: for tools that show any artifact without knowing its type."""
    path, remedy = folder / RECORD, "run `dvc repro`"
    recover(folder)
    if not folder.is_dir():
        raise ArtifactError(
            f"{folder} is a file" if folder.exists() else f"there is no folder {folder}",
            expected="the folder of an artifact, such as artifacts/candidate",
            remedy="check the path, or run `dvc repro`; a stage that was interrupted leaves no artifact",
        )
    if not path.is_file():
        raise ArtifactError(
            f"no {RECORD} in {folder}",
            expected="a finished artifact",
            remedy="check the path, or run `dvc repro`; a stage that was interrupted leaves no artifact",
        )
    try:
        body: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read: {error.strerror or error}", remedy="fix its permissions, or run the stage again"
        ) from error
    except ValueError as error:  # not JSON, or not even text
        raise ArtifactError(f"{path} is not JSON: {error}", expected="a finished artifact", remedy=remedy) from error
    missing = KEYS - body.keys() if isinstance(body, dict) else KEYS
    if missing:
        raise ArtifactError(
            f"{path} lacks {', '.join(sorted(missing))}", expected="a record as this version writes it", remedy=remedy
        )
    return body


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body)).hexdigest()
