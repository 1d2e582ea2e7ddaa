"""``tapeout verify``: the short evidence of a bundle at a level of native kernels that was not judged."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engines.bundle import EngineBundle
from engines.load import at_level
from evals.kinds.parity import ParityReport
from evals.level import LevelVerdict
from evals.level_check import check_level
from evals.statement import level_statement
from evals.verdict import Verdict
from pipeline.registry.access import VersionReference, open_registry
from pipeline.registry.bundle_store import store_folder
from pipeline.registry.levels import attach, evidence_folder
from pipeline.registry.logged import fetch_artifact, fetch_verdict
from pipeline.registry.pull import Requirements, pull
from pipeline.registry.versions import EVIDENCE
from pipeline.stages.answering import served_core
from runtime.engine.draw_check import draw_counts
from runtime.wire.limits import Limits
from tapeout.artifact import Artifact, load, load_record
from tapeout.cores import physical_cores
from tapeout.errors import BuildError
from tapeout.signing import require_signed_pass, sign, signature_path, write_signature


def run(
    source: str, level: str, threads: int, key: Path | None, public_key: Path | None = None
) -> Artifact[LevelVerdict]:
    """Take the evidence, keep it beside the bundle, and attach it to the version if ``source`` names one.

    ``level``: by default the best of this machine. ``key``: to sign the evidence with.
    """
    if not source.startswith("models:"):
        folder = Path(source)
        bundle = load_record(folder, EngineBundle)  # before what lies beside it, which nobody has named
        if public_key is not None:
            require_signed_pass(bundle, public_key)
        verdict = load(folder.resolve().parent / "verdict", Verdict)
        return _take(folder, verdict, load(folder.resolve().parent / "parity", ParityReport), level, threads, key)
    pulled = pull(VersionReference.parse(source), store_folder(), Requirements(public_key=public_key))
    with open_registry() as registry, tempfile.TemporaryDirectory() as scratch:
        version = registry.version(VersionReference(pulled.name, number=pulled.version))
        verdict = fetch_verdict(registry, version, Path(scratch))
        parity = fetch_artifact(registry, version, f"{EVIDENCE}/parity", ParityReport, Path(scratch) / "parity")
        found = _take(pulled.folder, verdict, parity, level, threads, key)
    attach(found, version)
    return found


def _take(
    folder: Path,
    verdict: Artifact[Verdict],
    parity: Artifact[ParityReport],
    level: str,
    threads: int,
    key: Path | None,
) -> Artifact[LevelVerdict]:
    bundle = load(folder, EngineBundle)
    level = at_level(bundle, level).record.hardware[0].level
    if not level:
        raise BuildError(
            f"{folder} has no levels of native kernels",
            expected="a bundle with native kernels",
            remedy="its verdict covers all of it: `tapeout gate`",
        )
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = check_level(
        bundle,
        verdict,
        parity,
        level,
        evidence_folder(folder, level),
        draw_counts,
        partial(served_core, bundle=at_level(bundle, level), limits=Limits(), threads=threads or physical_cores()),
        lambda tokens: tokenizer.decode(list(tokens)),
        threads=threads,
    )
    if key is not None:
        write_signature(signature_path(found.folder), sign(level_statement(found, bundle), key))
    else:  # one of former evidence
        signature_path(found.folder).unlink(missing_ok=True)
    return found
