"""At which levels of native kernels a bundle may be served: those that evidence covers (evals/level.py).

The verdict covers the level that its reports were taken at, `tapeout verify` any other. Its evidence lies beside the
bundle, in ``BUNDLE.levels/LEVEL``, and in the registry in the run of the version, whose tag names its digest. With a
public key it must be signed, as the verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines.bundle import EngineBundle
from engines.load import at_level, find_target
from evals.check import Outcome
from evals.level import LevelVerdict, load_level
from evals.statement import level_statement
from evals.verdict import Verdict
from pipeline.registry.tracking import connect
from pipeline.registry.versions import LEVEL_TAG, get_version
from tapeout.artifact import Artifact
from tapeout.errors import FingerprintError, SignatureError, TapeoutError
from tapeout.fingerprint import judged_level
from tapeout.signing import Statement, signature_path, verify_signature

if TYPE_CHECKING:
    from pipeline.registry.access import Version

FOLDER = "levels"  # of a run
log = logging.getLogger("tapeout.server")


def evidence_folder(bundle: Path, level: str) -> Path:
    bundle = bundle.resolve()
    return bundle.with_name(f"{bundle.name}.{FOLDER}") / level


def level_tag(level: str) -> str:
    return f"{LEVEL_TAG}{level}"


def runnable(bundle: Artifact[EngineBundle]) -> list[str]:
    """The bundle's levels that this machine has, the best first. Emulated ones only where there are no others."""
    hardware = bundle.record.hardware
    own = [one for one in hardware if not one.emulated] or hardware
    return [one.level for one in own if one.level and _runs(bundle, one.level)]


def covered(
    bundle: Artifact[EngineBundle], verdict: Artifact[Verdict], public_key: Path | None = None
) -> tuple[str, ...]:
    """The bundle's levels with evidence of a PASS. Evidence that is damaged, unsigned or of something else is none."""
    judged = judged_level(bundle.record.target, verdict.record.executed_on)
    levels = [one.level for one in bundle.record.hardware]
    return tuple(level for level in levels if level == judged or _verified(bundle, verdict, level, public_key))


def level_to_serve(bundle: Artifact[EngineBundle], levels: Sequence[str], source: str) -> str:
    """The best level that this machine has and evidence covers; empty for a bundle without levels.

    ``source``: what the user named. :class:`FingerprintError` where there is none.
    """
    if not any(one.level for one in bundle.record.hardware):
        return ""
    here = require_hardware(bundle, source)
    chosen = next((level for level in here if level in levels), None)
    if chosen is None:
        raise FingerprintError(
            f"{source} has no evidence for {', '.join(here)}, which this machine has",
            expected=f"one of the levels with evidence: {', '.join(levels) or 'none'}",
            remedy=f"`tapeout verify {source}` takes it in minutes, or accept the risk with --unsafe",
        )
    if chosen != here[0]:
        log.warning("%s is served at %s: `tapeout verify` has not covered %s", source, chosen, here[0])
    return chosen


def require_hardware(bundle: Artifact[EngineBundle], source: str) -> list[str]:
    """See :func:`runnable`. :class:`FingerprintError` where there is no level, and a bundle that has levels."""
    here = runnable(bundle)
    if not here and any(one.level for one in bundle.record.hardware):
        at_level(bundle)  # says why
        levels = [one.level for one in bundle.record.hardware if not one.emulated]
        lacking = find_target(bundle.record.target).lacking(bundle.record.hardware)
        raise FingerprintError(
            f"{source} has kernels for {', '.join(levels)}, none of which this machine has"
            + (f" ({lacking.found})" if lacking else ""),
            expected="hardware of one of these levels: an emulation is for tests",
            remedy=f"{lacking.remedy if lacking else 'serve it on such a machine'}; or build it for ort-cpu",
        )
    return here


def attach(found: Artifact[LevelVerdict], version: Version) -> None:
    """Log the evidence, and its signature if there is one, in the version's run; then name its digest in a tag."""
    level = found.record.executed_on.level
    with connect(write=True) as client:
        run_id = get_version(client, version.name, version.number).run_id or ""
        client.log_artifacts(run_id, str(found.folder), logged_evidence(found.digest))
        if (signature := signature_path(found.folder)).is_file():
            client.log_artifact(run_id, str(signature), logged_signature(found.digest))
        client.set_model_version_tag(version.name, str(version.number), level_tag(level), found.digest)


def logged_evidence(digest: str) -> str:
    """The folder of a run that has this evidence. Newer evidence does not replace it."""
    return f"{FOLDER}/{digest}"


def logged_signature(digest: str) -> str:
    """The folder of a run that has the signature of this evidence."""
    return f"{FOLDER}/{digest}.signature"


def _runs(bundle: Artifact[EngineBundle], level: str) -> bool:
    try:
        at_level(bundle, level)
    except FingerprintError:
        return False
    return True


def _verified(bundle: Artifact[EngineBundle], verdict: Artifact[Verdict], level: str, public_key: Path | None) -> bool:
    folder = evidence_folder(bundle.folder, level)
    if not folder.is_dir():
        return False
    try:
        found = load_level(folder, level, bundle, verdict)
        if public_key is not None:
            _require_signed(found, bundle, public_key)
    except TapeoutError as error:
        log.warning("evidence that does not count: %s", error)
        return False
    return found.record.outcome is Outcome.PASS


def _require_signed(found: Artifact[LevelVerdict], bundle: Artifact[EngineBundle], public_key: Path) -> None:
    path = signature_path(found.folder)
    if verify_signature(path, public_key, Statement) != level_statement(found, bundle):
        raise SignatureError(
            f"{path} is about other evidence than {found.digest[:12]}",
            expected=f"a signature of the evidence in {found.folder}",
            remedy="run `tapeout verify --key` again",
        )
