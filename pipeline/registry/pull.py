"""Brings the bundle of a registered version to this machine, and believes nothing that it can check.

The alias is resolved once; from then on the version, its run and the bundle's digest are fixed, whatever the registry
says meanwhile. The verdict must be a PASS about that digest, and signed where a public key is given. The record comes
first, and every file that it lists is hashed when it has arrived. The bundle takes its place in the store (see
pipeline/registry/bundle_store.py) when it is whole. A pull that was interrupted continues at the byte where it stopped.
"""

from __future__ import annotations

import errno
import fcntl
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from engines.bundle import EngineBundle
from evals.check import Outcome
from evals.level import LevelVerdict
from evals.verdict import Verdict
from pipeline.registry.access import Reference, Registry, Version, open_registry
from pipeline.registry.bundle_store import is_whole
from pipeline.registry.judged import EVIDENCE, MODEL_SIGNATURE, SIGNATURE, VERDICT, require_signature
from pipeline.registry.levels import FOLDER as LEVELS
from pipeline.registry.levels import covered, evidence_folder, level_tag, runnable
from pipeline.registry.versions import tag_of
from tapeout.artifact import RECORD, Artifact, Record, load, load_record
from tapeout.durable import replace_folder
from tapeout.errors import RegistryError, SignatureError, TapeoutError
from tapeout.file_hashes import sha256_file
from tapeout.signing import (
    PUBLIC_KEY,
    ModelStatement,
    model_signature_path,
    model_statement,
    signature_path,
    verify_signature,
    write_signature,
)

R = TypeVar("R", bound=Record)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Pulled(NamedTuple):
    """``folder``: of the bundle, in the store. ``fetched_bytes``: 0 if it was there already.

    ``levels``: of native kernels that evidence covers.
    """

    name: str
    version: int
    digest: str
    outcome: str
    signed: bool
    folder: Path
    fetched_bytes: int
    levels: tuple[str, ...]


def pull(reference: Reference, store: Path, *, public_key: Path | None = None, unsafe: bool = False) -> Pulled:
    """The bundle of a version, whole and checked, in ``store``.

    :class:`RegistryError` for a version without a PASS (unless ``unsafe``), and for files that are not those that were
    registered; :class:`SignatureError` unless verdict and files are signed, if a ``public_key`` is given.
    """
    with open_registry() as registry, tempfile.TemporaryDirectory() as scratch:
        version = registry.version(reference)
        verdict = fetch_verdict(registry, version, Path(scratch))
        digest = verdict.record.candidate
        if verdict.record.outcome is not Outcome.PASS and not unsafe:
            raise RegistryError(
                f"{reference} was judged {verdict.record.outcome.value}",
                expected="a version with a PASS",
                remedy="promote another version, or accept the risk with --unsafe",
            )
        folder = store / digest
        with _incoming(store, digest) as incoming:
            fetched = 0
            whole = is_whole(folder, digest)
            bundle = load_record(folder, EngineBundle) if whole else _record(registry, version, incoming, digest)
            signatures = _signed(registry, version, verdict, bundle, public_key) if public_key else ()
            if not whole:
                fetched = _files(registry, version, bundle)
                replace_folder(incoming, folder)
            places = (signature_path(folder), model_signature_path(folder)) if signatures else ()
            for path, text in zip(places, signatures, strict=True):
                write_signature(path, text)
            kept = load_record(folder, EngineBundle)
            _level_evidence(registry, version, kept, signed=public_key is not None)
            levels = covered(kept, verdict, public_key)
    outcome = verdict.record.outcome.value
    return Pulled(version.name, version.number, digest, outcome, bool(signatures), folder, fetched, levels)


def require_key(public_key: Path | None) -> Path:
    if public_key is None:
        raise SignatureError(
            "a signature is required, but no public key is given",
            expected="the key of whoever judges",
            remedy=f"name it with --public-key or {PUBLIC_KEY}",
        )
    return public_key


def fetch_logged(registry: Registry, version: Version, path: str, noun: type[R], place: Path) -> Artifact[R]:
    """An artifact that is logged in a version's run under ``path``, whole, in the new folder ``place``."""
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
        raise _changed(version, f"its {noun.noun} is not intact: {error.found}") from error


def fetch_verdict(registry: Registry, version: Version, scratch: Path) -> Artifact[Verdict]:
    """The verdict of a version's run, whole, and the one that its tags name."""
    found = fetch_logged(registry, version, VERDICT, Verdict, scratch / VERDICT)
    for tag, value in (("verdict", found.digest), ("candidate", found.record.candidate)):
        if tag_of(version.tags, tag, version.number) != value:
            raise _changed(version, f"its tag tapeout.{tag} names another one than its run has")
    return found


def _level_evidence(registry: Registry, version: Version, bundle: Artifact[EngineBundle], *, signed: bool) -> None:
    """Bring what `tapeout verify` attached for levels of this machine, as the version's tags name it."""
    for level in runnable(bundle):
        digest, folder = version.tags.get(level_tag(level)), evidence_folder(bundle.folder, level)
        if digest is None or (folder.is_dir() and load_record(folder, LevelVerdict).digest == digest):
            continue
        with tempfile.TemporaryDirectory(dir=bundle.folder.parent) as scratch:
            place = Path(scratch) / level
            found = fetch_logged(registry, version, f"{LEVELS}/{level}", LevelVerdict, place)
            if found.digest != digest:
                raise _changed(version, f"the evidence of {level} is not the one that its tag names")
            if signed:
                name = signature_path(folder).name
                registry.fetch(version.run_root, f"{LEVELS}/{name}", Path(scratch) / name)
            folder.parent.mkdir(exist_ok=True)
            replace_folder(place, folder)
            if signed:
                write_signature(signature_path(folder), (Path(scratch) / signature_path(folder).name).read_text())


def _record(registry: Registry, version: Version, incoming: Path, digest: str) -> Artifact[EngineBundle]:
    """The record of the bundle that the verdict judged: it says what else to fetch, and what that must hash to."""
    (incoming / RECORD).unlink(missing_ok=True)
    registry.fetch(version.bundle_root, RECORD, incoming / RECORD)
    try:
        found = load_record(incoming, EngineBundle)
    except TapeoutError as error:
        shutil.rmtree(incoming)
        raise _changed(version, error.found) from error
    if found.digest != digest:
        shutil.rmtree(incoming)
        raise _changed(version, f"its bundle is {found.digest[:12]}, and {digest[:12]} was judged")
    return found


def _files(registry: Registry, version: Version, bundle: Artifact[EngineBundle]) -> int:
    """Every file of the record, hashed when it has arrived; how many bytes were fetched."""
    missing = {
        name: entry
        for name, entry in sorted(bundle.files.items())
        if not (path := bundle.folder / name).is_file() or sha256_file(path) != entry.sha256
    }
    needed, free = sum(entry.size_bytes for entry in missing.values()), shutil.disk_usage(bundle.folder).free
    needed -= sum(path.stat().st_size for path in bundle.folder.rglob("*.part"))
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are missing, {free / 1e6:.0f} MB are free")
    for name, entry in missing.items():
        path = bundle.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        registry.fetch(version.bundle_root, name, path)
        if (found := sha256_file(path)) != entry.sha256:
            path.unlink()
            raise _changed(version, f"{name} has sha256 {found[:12]}, and {entry.sha256[:12]} was judged")
        path.chmod(0o444)
    return needed


def _signed(
    registry: Registry, version: Version, verdict: Artifact[Verdict], bundle: Artifact[EngineBundle], key: Path
) -> tuple[str, ...]:
    """The signatures of verdict and files, if both are by ``key`` and about what is here."""
    with tempfile.TemporaryDirectory() as scratch:
        judged, files = Path(scratch) / SIGNATURE, Path(scratch) / MODEL_SIGNATURE
        for path in (judged, files):
            try:
                registry.fetch(version.run_root, f"{EVIDENCE}/{path.name}", path)
            except RegistryError as error:
                raise SignatureError(
                    f"version {version.number} of {version.name} is not signed: {error.found}",
                    expected="a signature, because a public key is given",
                    remedy="register it with the private key: `tapeout register --key tapeout.key`",
                ) from error
        require_signature(judged, key, version.name, verdict.record, verdict.digest, bundle.folder)
        if verify_signature(files, key, ModelStatement) != model_statement(bundle):
            raise SignatureError(
                f"the signature of the files is about another bundle than {bundle.digest[:12]}",
                expected="the files that were signed",
                remedy="register the bundle again, with the private key",
            )
        return judged.read_text(), files.read_text()


@contextmanager
def _incoming(store: Path, digest: str) -> Generator[Path]:
    """Where a bundle arrives: one pull of it at a time, which continues the one before.

    What the disk refuses becomes a clear error.
    """
    incoming = store / f".{digest}.incoming"
    try:
        store.mkdir(parents=True, exist_ok=True)
        with (store / f".{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            incoming.mkdir(exist_ok=True)
            yield incoming
            shutil.rmtree(incoming, ignore_errors=True)
    except OSError as error:
        full = error.errno in _FULL
        raise RegistryError(
            f"cannot keep the bundle in {store}: {error.strerror or error}",
            expected="room for the bundle" if full else "a folder that can be written",
            remedy=f"{'free disk space' if full else 'fix its permissions'}, or name another folder with --to or "
            "TAPEOUT_STORE; then run this again: what has arrived is kept",
        ) from error


def _changed(version: Version, found: str) -> RegistryError:
    return RegistryError(
        f"version {version.number} of {version.name} was changed since it was registered: {found}",
        expected="what was judged and registered",
        remedy="register it again (`tapeout register` repairs its files), or promote another version; find out who can "
        "write to the registry's store",
    )
