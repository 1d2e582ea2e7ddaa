"""Folders beside an artifact for what is not in it.

Finished parts are kept when a stage is interrupted and used by the next run of the same work. Scratch files are not.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tapeout.artifact import canonical_json
from tapeout.errors import ArtifactError, TapeoutError
from tapeout.file_hashes import sha256_file

_KEY = "key"


@contextmanager
def work_folder(folder: Path, key: Mapping[str, Any]) -> Generator[Path]:
    """A hidden folder beside ``folder``, where the artifact will be; ``key``: everything that its content depends on.

    It is empty unless a run with the same key was interrupted, or could not write its artifact. It is removed when the
    work is done, and after any other error of ours, which the next run would only meet again.
    """
    work = folder.with_name(f".{folder.name}.work")
    digest = hashlib.sha256(canonical_json(dict(key))).hexdigest()
    if not (work / _KEY).is_file() or (work / _KEY).read_text() != digest:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        (work / _KEY).write_text(digest)
    try:
        yield work
    except TapeoutError as error:
        if not isinstance(error, ArtifactError):
            shutil.rmtree(work)
        raise
    shutil.rmtree(work)


@contextmanager
def scratch_folder(folder: Path) -> Generator[Path]:
    """A hidden empty folder beside ``folder``, removed at the end. What a killed run left there is removed before."""
    scratch = folder.with_name(f".{folder.name}.scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # network file systems keep files that are still mapped


def keep(written: Path, part: Path) -> None:
    """``written`` becomes a finished part, with its hash beside it: see :func:`is_kept`."""
    _hash_file(part).write_text(sha256_file(written))
    written.rename(part)


def is_kept(part: Path) -> bool:
    """Whether the part is finished and unchanged. After a crash a file may be there and lack its content."""
    recorded = _hash_file(part)
    return part.is_file() and recorded.is_file() and recorded.read_text() == sha256_file(part)


def discard(part: Path) -> None:
    for path in (part, _hash_file(part)):
        path.unlink(missing_ok=True)


def _hash_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.sha256")


def source_hash(package: Path) -> str:
    """One hash for the Python files of a folder: what a changed program wrote is not continued."""
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
