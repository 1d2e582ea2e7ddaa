"""The one way to open a bundle: evaluation, shadow replay and serving all come through here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol, cast

from engines.bundle import EngineBundle
from engines.protocol import Engine
from tapeout import artifact, fingerprint
from tapeout.artifact import Artifact
from tapeout.errors import BuildError
from tapeout.fingerprint import Fingerprint


class Target(Protocol):
    """What a folder under ``engines/targets`` offers (see docs/targets.md, also for the parts that are optional)."""

    LIBRARIES: tuple[str, ...]
    PASSES: tuple[Any, ...]

    def open_engine(self, bundle: Artifact[EngineBundle], *, threads: int, slots: int | None) -> Engine: ...


def target_module(name: str) -> Target:
    """The target's package, imported only when it is asked for."""
    try:
        return cast(Target, importlib.import_module(f"engines.targets.{name.replace('-', '_')}"))
    except ModuleNotFoundError as error:
        raise BuildError(f"no target {name!r}", expected=f"one of {', '.join(known_targets())}") from error


def known_targets() -> tuple[str, ...]:
    """The folders beside this file's ``targets/__init__.py``, by the names users give them."""
    folders = (Path(__file__).parent / "targets").iterdir()
    return tuple(sorted(p.name.replace("_", "-") for p in folders if (p / "__init__.py").exists()))


def fingerprint_here(target: Target) -> Fingerprint:
    """This machine's, by the libraries and features that select the target's kernels."""
    return fingerprint.current(target.LIBRARIES, getattr(target, "features", fingerprint.cpu_features))


def load(folder: Path, *, threads: int = 0, slots: int | None = None) -> Engine:
    """Open a bundle for running. Refused on hardware or libraries other than those it was built and judged on.

    ``threads``: 0 means every physical core. ``slots``: sequences held at once; default as built.
    """
    bundle = artifact.load(folder, EngineBundle)
    target = target_module(bundle.record.target)
    fingerprint.require_match(bundle.record.fingerprint, fingerprint_here(target), str(folder))
    return target.open_engine(bundle, threads=threads, slots=slots)
