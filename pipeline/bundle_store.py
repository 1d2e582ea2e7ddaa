"""Registered bundles, kept by content: a build may overwrite ``artifacts/candidate``, never what a registry points to.

A bundle lies at ``$TAPEOUT_STORE/<digest>`` (default ``bundles/``), hard-linked where the file system allows, so that
keeping it costs no space while the artifact it came from exists.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from engines.bundle import EngineBundle
from pipeline import artifact
from pipeline.artifact import RECORD, Artifact


def keep(bundle: Artifact[EngineBundle]) -> Artifact[EngineBundle]:
    """The same bundle where it stays; nothing is written if it is there already."""
    store = Path(os.environ.get("TAPEOUT_STORE", "bundles"))
    folder = store / bundle.digest
    if not (folder / RECORD).is_file():
        partial = store / f".{bundle.digest}.{os.getpid()}"
        for name in (*bundle.files, RECORD):
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            source = (bundle.folder / name).resolve()
            try:
                os.link(source, target)
            except OSError:
                shutil.copyfile(source, target)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    return artifact.load(folder, EngineBundle)
