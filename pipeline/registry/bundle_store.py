"""Registered bundles, kept by content: a build may overwrite ``artifacts/candidate``, never what a registry points to.

A bundle lies at ``$TAPEOUT_STORE/<digest>`` (default ``bundles/``), hard-linked where the file system allows, so that
keeping it costs no space while the artifact it came from exists. It is copied to a hidden sibling folder, which is
renamed once every file has been hashed: the kept bundle is the judged bundle, and an interrupted copy never counts.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from engines.bundle import EngineBundle
from tapeout import artifact
from tapeout.artifact import RECORD, Artifact
from tapeout.errors import ArtifactError


def keep(bundle: Artifact[EngineBundle]) -> Artifact[EngineBundle]:
    """The same bundle in the store; nothing is written if it is already there, and whole.

    :class:`ArtifactError` when a file of the bundle has changed since it was written, or the place cannot be written.
    """
    store = Path(os.environ.get("TAPEOUT_STORE", "bundles"))
    folder = store / bundle.digest
    if not _is_whole(folder, bundle.digest):
        partial = store / f".{bundle.digest}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            for name in (*bundle.files, RECORD):
                _link_or_copy((bundle.folder / name).resolve(), partial / name)
            artifact.load(partial, EngineBundle).verify()
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        except OSError as error:
            raise ArtifactError(
                f"cannot keep {bundle.folder} in {folder}: {error.strerror or error}",
                expected="a place that registered bundles stay in",
                remedy="free disk space, fix the permissions, or set TAPEOUT_STORE; then run `dvc repro register`",
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return artifact.load(folder, EngineBundle)


def _is_whole(folder: Path, digest: str) -> bool:
    """Whether the store holds this bundle with every file at its size; ``promote`` hashes them again."""
    try:
        return artifact.load(folder, EngineBundle).digest == digest
    except ArtifactError:
        return False


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
