"""Finds targets by name, and opens bundles: evaluation, shadow replay and serving all open them here."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines import targets
from engines.bundle import EngineBundle
from engines.kernels.operators import EXPERTS
from engines.protocol import Engine
from engines.target import GraphTarget, HardwareTarget, Probe, Target
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import ArtifactError, BuildError, FingerprintError, RequestError
from tapeout.file_hashes import Identity, identity
from tapeout.fingerprint import Fingerprint, require_match
from tapeout.resources import available_memory
from tapeout.signing import require_signed_pass

# Of the available memory. Beside weights an engine needs the state of sequences and a workspace, and others need some.
WEIGHTS_SHARE = 0.9


def known_targets() -> tuple[str, ...]:
    """The modules of ``engines/targets``, by the names users give them."""
    return tuple(sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(targets.__path__)))


def find_target(name: str) -> Target[Any]:
    """The target of this name, or at a level of it: ``ort-cpu:x86-64-avx2``. Its module is imported only now."""
    name, _, level = name.partition(":")
    if name not in known_targets():
        raise BuildError(f"no target {name!r}", expected=f"one of {', '.join(known_targets())}")
    target: Target[Any] = importlib.import_module(f"engines.targets.{name.replace('-', '_')}").TARGET
    return target.at(level) if level else target


def graph_target(name: str) -> GraphTarget:
    """:class:`BuildError` for a target that compiles for named hardware: a recipe names none."""
    target = find_target(name)
    if not isinstance(target, GraphTarget):
        raise BuildError(
            f"{name} compiles for named hardware, and a recipe names none",
            expected=f"a target whose lowered graph is what runs: {', '.join(_of_kind(GraphTarget))}",
            remedy=f"`tapeout build --target {name}:…` compiles for it (docs/targets.md)",
        )
    return target


def hardware_target(name: str) -> HardwareTarget:
    """:class:`BuildError` for a target that has no compiler."""
    target = find_target(name)
    if not isinstance(target, HardwareTarget):
        raise BuildError(
            f"{name} has no compile step",
            expected=f"a target that compiles for named hardware: {', '.join(_of_kind(HardwareTarget))}",
            remedy="`dvc repro build-candidate` builds it; --explain shows how it is lowered, and a level such as "
            "ort-cpu:x86-64-avx2 builds the candidate for that level",
        )
    return target


def _of_kind(kind: type[Target[Any]]) -> list[str]:
    return [name for name in known_targets() if isinstance(find_target(name), kind)]


def load(
    folder: Path,
    *,
    threads: int = 0,
    slots: int | None = None,
    snapshots: int | None = None,
    level: str = "",
    public_key: Path | None = None,
    map_experts: bool | None = None,
) -> Engine:
    """Open a bundle for running. Refused if a file changed, and on hardware or libraries that it was not built for.

    ``threads``: 0 means every physical core, or one where that is as fast. ``slots``: sequences held at once; default
    as built. ``snapshots``: of recurrent state that are kept for prefixes; default one for each of these sequences.
    ``level``: see :func:`at_level`. ``public_key``: the bundle must have a signed PASS verdict beside it.
    ``map_experts``: see :func:`experts_mapped`.
    """
    before = _identities(artifact.load_record(folder, EngineBundle))  # then verified, then opened
    bundle = artifact.load(folder, EngineBundle)
    if public_key is not None:
        require_signed_pass(bundle, public_key)
    if snapshots is not None and not bundle.record.io.slot_bytes:
        raise RequestError(
            f"{snapshots} snapshots, and {folder} has no recurrent state",
            expected="a model with convolutions or recurrences",
            remedy="leave --snapshots out: keys and values are shared as they are",
        )
    engine = find_target(bundle.record.target).open(
        at_level(bundle, level),
        threads=threads,
        slots=slots,
        snapshots=snapshots,
        map_experts=experts_mapped(bundle, map_experts),
    )
    if changed := sorted(name for name, found in _identities(bundle).items() if found != before.get(name)):
        engine.close()
        raise ArtifactError(
            f"{', '.join(changed)} in {folder} changed while the engine was opened",
            expected="a bundle that nothing writes to",
            remedy="find what writes there, then open it again",
        )
    return engine


def experts_mapped(bundle: Artifact[EngineBundle], asked: bool | None = None) -> bool:
    """Whether an engine leaves the weights of experts in their file, to be read again where memory has no room for all.

    All other weights are copied to memory: every token reads them. ``asked``: None is where all weights do not fit the
    available memory. :class:`RequestError` where it is asked for and there is nothing to leave, or no such target.
    """
    record = bundle.record
    able = not EXPERTS.isdisjoint(record.operator_counts) and find_target(record.target).capabilities.maps_experts
    if asked and not able:
        raise RequestError(
            f"{bundle.folder} has no experts that {record.target} can leave in their file",
            expected="a mixture of experts that was built for ort-cpu",
            remedy="leave --map-experts out: all weights are in memory",
        )
    if asked is None:
        return able and record.weight_bytes > WEIGHTS_SHARE * available_memory()
    return asked


def _identities(bundle: Artifact[EngineBundle]) -> dict[str, Identity | None]:
    paths = {name: bundle.folder / name for name in bundle.files}
    return {name: identity(path) if path.is_file() else None for name, path in paths.items()}


def at_level(bundle: Artifact[EngineBundle], level: str = "") -> Artifact[EngineBundle]:
    """The bundle as it runs here: its record names one ``hardware``, of ``level`` or of the best that is here.

    :class:`FingerprintError` on hardware or libraries other than those the bundle was built for.
    """
    target = find_target(bundle.record.target)
    target.require_machine()
    here = target.fingerprint().model_copy(update={"level": level})
    try:
        chosen = require_match(bundle.record.hardware, here, str(bundle.folder))
    except FingerprintError as error:
        known = level in ("", *(one.level for one in bundle.record.hardware))
        if not known or (lacking := target.lacking(bundle.record.hardware)) is None:
            raise
        raise FingerprintError(
            f"{error.found} ({lacking.found})", expected=lacking.expected, remedy=lacking.remedy
        ) from error
    return replace(bundle, record=bundle.record.model_copy(update={"hardware": (chosen,)}))


def runs_here(bundle: Artifact[EngineBundle], level: str = "") -> Fingerprint:
    """This machine as it runs the bundle: what evidence names as the place where it was taken."""
    chosen = at_level(bundle, level).record.hardware[0]
    here = find_target(bundle.record.target).fingerprint()
    return here.model_copy(update={"level": chosen.level, "emulated": chosen.emulated})


def not_executable(bundle: Artifact[EngineBundle]) -> str:
    """Why this machine cannot execute a bundle that is built on any machine, as a clause; empty where it can.

    Emulation executes nothing, unless the bundle has no other level. :class:`FingerprintError` for a bundle of a target
    that builds for the machine it is built on.
    """
    try:
        here = at_level(bundle).record.hardware[0]
    except FingerprintError as error:
        if not find_target(bundle.record.target).capabilities.ahead_of_time:
            raise
        return "; ".join(
            (error.found, f"expected: {error.expected}", *([f"to do: {error.remedy}"] if error.remedy else []))
        )
    levels = [one.level for one in bundle.record.hardware if not one.emulated]
    return f"this machine has no {' or '.join(levels)}" if here.emulated and levels else ""


def open_probe(bundle: Artifact[EngineBundle], scratch: Path, *, threads: int = 0) -> Probe:
    """The output of every linear, for comparing a bundle with a reference layer by layer.

    ``scratch``: a folder on the disk that holds them while they are compared, in files without names.
    """
    return find_target(bundle.record.target).probe(at_level(bundle), scratch, threads=threads)
