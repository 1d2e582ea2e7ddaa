"""Reads artifacts that are logged in a version's run, and the evidence that `tapeout verify` attached to it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TypeVar

from engines.bundle import EngineBundle
from evals.level import LevelVerdict
from evals.verdict import Verdict
from pipeline.registry.access import Registry, Version, changed
from pipeline.registry.levels import FOLDER, covered, evidence_folder, level_tag, runnable
from pipeline.registry.versions import VERDICT, tag_of
from tapeout.artifact import RECORD, Artifact, Record, load, load_record
from tapeout.durable import replace_folder
from tapeout.errors import RegistryError, TapeoutError
from tapeout.signing import signature_path, write_signature

R = TypeVar("R", bound=Record)


def fetch_artifact(registry: Registry, version: Version, path: str, noun: type[R], place: Path) -> Artifact[R]:
    """An artifact that is logged under ``path``, whole, in the new folder ``place``."""
    place.mkdir(parents=True)
    try:
        registry.fetch(version.run_root, f"{path}/{RECORD}", place / RECORD)
        for name in load_record(place, noun).files:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            registry.fetch(version.run_root, f"{path}/{name}", place / name)
        return load(place, noun)
    except RegistryError:
        raise
    except TapeoutError as error:
        raise changed(version, f"its {noun.noun} is not intact: {error.found}") from error


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
    """Bring what is attached for levels of this machine, as the version's tags name it; the levels with evidence."""
    with tempfile.TemporaryDirectory(dir=bundle.folder.parent) as scratch:
        for level in runnable(bundle):
            digest, folder = version.tags.get(level_tag(level)), evidence_folder(bundle.folder, level)
            if digest is None or (folder.is_dir() and load_record(folder, LevelVerdict).digest == digest):
                continue
            place, signature = Path(scratch) / level, Path(scratch) / signature_path(folder).name
            found = fetch_artifact(registry, version, f"{FOLDER}/{level}", LevelVerdict, place)
            if found.digest != digest:
                raise changed(version, f"the evidence of {level} is not the one that its tag names")
            if public_key is not None:
                registry.fetch(version.run_root, f"{FOLDER}/{signature.name}", signature)
            folder.parent.mkdir(exist_ok=True)
            replace_folder(place, folder)
            if public_key is not None:
                write_signature(signature_path(folder), signature.read_text())
        return covered(bundle, fetch_verdict(registry, version, Path(scratch)), public_key)
