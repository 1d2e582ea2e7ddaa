"""Reads artifacts that are logged in a version's run, and the evidence that `tapeout verify` attached to it."""

from __future__ import annotations

import logging
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from engines.bundle import EngineBundle
from evals.level import LevelVerdict
from evals.verdict import Verdict
from pipeline.registry.access import Registry, Version, changed
from pipeline.registry.levels import covered, evidence_folder, level_tag, logged_evidence, logged_signature, runnable
from pipeline.registry.versions import VERDICT, tag_of
from tapeout.artifact import RECORD, Artifact, Record, load, load_record
from tapeout.durable import replace_folder
from tapeout.errors import RegistryError, TapeoutError
from tapeout.fingerprint import judged_level
from tapeout.signing import signature_path, write_signature

R = TypeVar("R", bound=Record)
log = logging.getLogger("tapeout.server")


def fetch_artifact(registry: Registry, version: Version, path: str, artifact_type: type[R], place: Path) -> Artifact[R]:
    """An artifact that is logged under ``path``, whole, in the new folder ``place``."""
    place.mkdir(parents=True)
    try:
        registry.fetch(version.run_root, f"{path}/{RECORD}", place / RECORD)
        for name in load_record(place, artifact_type).files:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            registry.fetch(version.run_root, f"{path}/{name}", place / name)
        return load(place, artifact_type)
    except RegistryError:
        raise
    except TapeoutError as error:
        raise changed(version, f"its {artifact_type.artifact_type} is not intact: {error.found}") from error


def fetch_verdict(registry: Registry, version: Version, scratch: Path) -> Artifact[Verdict]:
    """The verdict of a version's run, whole, and the one that its tags name."""
    found = fetch_artifact(registry, version, VERDICT, Verdict, scratch / "whole verdict")
    for tag, value in (("verdict", found.digest), ("candidate", found.record.candidate)):
        if tag_of(version.tags, tag, version.number) != value:
            raise changed(version, f"its tag tapeout.{tag} names another one than its run has")
    return found


def fetch_levels(
    registry: Registry, version: Version, bundle: Artifact[EngineBundle], public_key: Path | None
) -> tuple[str, ...]:
    """Bring what is attached for levels of this machine, as the version's tags name it; the levels with evidence.

    Evidence that cannot be fetched whole does not stop a pull: its level has none.
    """
    with tempfile.TemporaryDirectory(dir=bundle.folder.parent) as scratch:
        verdict = fetch_verdict(registry, version, Path(scratch))
        judged = judged_level(bundle.record.target, verdict.record.executed_on)
        for level in runnable(bundle):
            digest = version.tags.get(level_tag(level))
            if level == judged or digest is None:
                continue
            try:
                _fetch_level(registry, version, evidence_folder(bundle.folder, level), digest, Path(scratch))
                if public_key is not None:
                    _fetch_signature(registry, version, evidence_folder(bundle.folder, level), digest, Path(scratch))
            except TapeoutError as error:
                log.warning("the evidence of %s does not count: %s", level, error)
        return covered(bundle, verdict, public_key)


def _fetch_level(registry: Registry, version: Version, folder: Path, digest: str, scratch: Path) -> None:
    with suppress(TapeoutError):
        if folder.is_dir() and load(folder, LevelVerdict).digest == digest:
            return
    found = fetch_artifact(registry, version, logged_evidence(digest), LevelVerdict, scratch / digest)
    if found.digest != digest:
        raise changed(version, f"the evidence of {folder.name} is not the one that its tag names")
    folder.parent.mkdir(exist_ok=True)
    replace_folder(found.folder, folder)


def _fetch_signature(registry: Registry, version: Version, folder: Path, digest: str, scratch: Path) -> None:
    """Also where the evidence was here before: it may have been signed since."""
    arrived = scratch / f"{digest}.signature"
    registry.fetch(version.run_root, f"{logged_signature(digest)}/{signature_path(folder).name}", arrived)
    write_signature(signature_path(folder), arrived.read_text())
