"""Registered bundles, kept by content: a build may overwrite ``artifacts/candidate``, never what a registry points to.

A bundle lies at ``$TAPEOUT_STORE/<digest>`` (default ``bundles/``) as a read-only copy of its own, so what happens
to the artifact does not reach it. Bundles that were pulled lie there, too (pipeline/registry/pull.py). Where the file
system can share blocks between files, the copy costs no space until one of them is written. It is made in a hidden
sibling folder, which takes its place once every file has been hashed and is on the disk: the kept bundle is the judged
bundle, and an interrupted copy never counts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from engines.bundle import EngineBundle
from tapeout import artifact
from tapeout.artifact import RECORD, Artifact
from tapeout.durable import replace_folder
from tapeout.errors import ArtifactError

_FICLONE = 0x40049409  # linux/fs.h: share the blocks of another file


def store_folder() -> Path:
    return Path(os.environ.get("TAPEOUT_STORE") or "bundles")


def keep(bundle: Artifact[EngineBundle]) -> Artifact[EngineBundle]:
    """The same bundle in the store; nothing is written if it is already there, and whole.

    :class:`ArtifactError` when a file of the bundle has changed since it was written, or the place cannot be written.
    """
    store = store_folder()
    folder = store / bundle.digest
    if not is_whole(folder, bundle.digest):
        partial = store / f".{bundle.digest}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            for name in (*bundle.files, RECORD):
                _copy(bundle.folder / name, partial / name)
            artifact.load(partial, EngineBundle).verify()
            replace_folder(partial, folder)
        except OSError as error:
            raise ArtifactError(
                f"cannot keep {bundle.folder} in {folder}: {error.strerror or error}",
                expected="a place that registered bundles stay in",
                remedy="free disk space, fix the permissions, or set TAPEOUT_STORE; then run `dvc repro register`",
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return artifact.load(folder, EngineBundle)


def is_whole(folder: Path, digest: str) -> bool:
    """Whether the store holds this bundle unchanged, in files that no other path leads to."""
    try:
        found = artifact.load(folder, EngineBundle)
    except ArtifactError:
        return False
    paths = [folder / name for name in (*found.files, RECORD)]
    own = all(not path.is_symlink() and path.stat().st_nlink == 1 for path in paths)
    return own and found.digest == digest


def _copy(source: Path, target: Path) -> None:
    """Share the blocks of ``source`` where the file system can, else copy them; then nobody may write to it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("wb") as write:
        try:
            fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
        except OSError:  # another file system, or one that cannot share
            shutil.copyfileobj(read, write, 1 << 20)
    target.chmod(0o444)
