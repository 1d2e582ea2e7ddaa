"""Brings the bundle of a registered version to this machine, and believes nothing that it can check.

The alias is resolved once; from then on the version, its run and the bundle's digest are fixed, whatever the registry
says meanwhile. The verdict must be a PASS about that digest, signed or judged again where that is required. The record
comes first, and every file that it lists is hashed while it arrives. The bundle takes its place in the store (see
pipeline/registry/bundle_store.py) when it is whole. A pull that was interrupted continues at the byte where it stopped.
"""

from __future__ import annotations

import errno
import fcntl
import re
import shutil
import tempfile
import threading
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from engines.bundle import EngineBundle
from pipeline.registry.access import Registry, Version, VersionReference, changed, open_registry
from pipeline.registry.bundle_store import is_whole
from pipeline.registry.versions import EVIDENCE, LEVEL_TAG, MODEL_SIGNATURE, SIGNATURE, VERDICT, tag_of
from tapeout.artifact import RECORD, Artifact, Header, load_header, load_record
from tapeout.durable import replace_folder
from tapeout.errors import ArtifactError, RegistryError, SignatureError, TapeoutError
from tapeout.file_hashes import sha256_file
from tapeout.fingerprint import judged_level

SMALL_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Requirements:
    """What a version must have beside whole files.

    ``public_key``: verdict and files must be signed with its private key. ``judge_by``: a recipe, by which its logged
    evidence is judged again, as a promotion does. ``unsafe``: a version without a PASS will do.
    """

    public_key: Path | None = None
    judge_by: Path | None = None
    unsafe: bool = False


class Pulled(NamedTuple):
    """``folder``: of the bundle, in the store. ``fetched_bytes``: 0 if it was there already.

    ``levels``: of native kernels that evidence covers. ``facts``: of the verdict, by name.
    """

    name: str
    version: int
    digest: str
    outcome: str
    signed: bool
    folder: Path
    fetched_bytes: int
    levels: tuple[str, ...]
    facts: dict[str, float]


def pull(reference: VersionReference, store: Path, required: Requirements = Requirements()) -> Pulled:
    """The bundle of a version, whole and checked, in ``store``.

    :class:`RegistryError` for a version that is not as ``required``, and for files that are not those that were
    registered; :class:`SignatureError` unless verdict and files are signed, if a key is required.
    """
    with open_registry() as registry, tempfile.TemporaryDirectory() as scratch:
        version = registry.version(reference)
        verdict = _verdict(registry, version, Path(scratch))
        digest, outcome = str(verdict.record["candidate"]), str(verdict.record.get("outcome"))
        if outcome != "PASS" and not required.unsafe:
            raise RegistryError(
                f"{reference} was judged {outcome}",
                expected="a version with a PASS",
                remedy="promote another version, or accept the risk with --unsafe",
            )
        if required.judge_by:
            _judge_again(registry, version, required.judge_by, Path(scratch))
        folder = store / digest
        with _incoming(store, digest) as incoming:
            fetched = 0
            whole = is_whole(folder, digest)
            bundle = load_record(folder, EngineBundle) if whole else _record(registry, version, incoming, digest)
            key = required.public_key
            signatures = _signatures(registry, version, verdict, bundle, key) if key else {}
            if not whole:
                fetched = _files(registry, version, bundle)
                replace_folder(incoming, folder)
            _keep(signatures, folder)
            levels = _levels(registry, version, verdict, load_record(folder, EngineBundle), key)
    facts = {str(fact["name"]): float(fact["value"]) for fact in verdict.record["facts"]}
    return Pulled(version.name, version.number, digest, outcome, bool(signatures), folder, fetched, levels, facts)


def _verdict(registry: Registry, version: Version, scratch: Path) -> Header:
    """The verdict of a version's run, and the one that its tags name. Its type is not needed: that takes statistics."""
    place = scratch / VERDICT
    place.mkdir()
    registry.fetch(version.run_root, f"{VERDICT}/{RECORD}", place / RECORD)
    try:
        found = load_header(place)
    except TapeoutError as error:
        raise changed(version, f"its verdict is not intact: {error.found}") from error
    if found.artifact_type != "Verdict" or not re.fullmatch("[0-9a-f]{64}", str(found.record.get("candidate"))):
        raise changed(version, f"its verdict is a {found.artifact_type} about no bundle")
    for tag, value in (("verdict", found.digest), ("candidate", found.record["candidate"])):
        if tag_of(version.tags, tag, version.number) != value:
            raise changed(version, f"its tag tapeout.{tag} names another one than its run has")
    return found


def _judge_again(registry: Registry, version: Version, params: Path, scratch: Path) -> None:
    """:class:`RegistryError` unless the logged evidence gives the logged verdict, a PASS by the recipe ``params``."""
    try:
        import_module("scipy")
    except ImportError as error:
        raise RegistryError(
            "the package scipy is not installed",
            expected="it beside tapeout, to judge evidence",
            remedy="pip install 'tapeout[judging]', or leave out --judge-by",
        ) from error
    from pipeline.recipe import load_recipe
    from pipeline.registry.judged import fetch_logged, judge_again, require_pass, require_policy

    recipe = load_recipe(params)
    try:
        fetch_logged(partial(registry.fetch, version.run_root), scratch)
    except ArtifactError as error:
        raise changed(version, f"its logged evidence is not intact: {error.found}") from error
    judged = judge_again(scratch, version.name, version.number, version.tags)
    require_pass(judged)
    require_policy(judged, recipe)


def _record(registry: Registry, version: Version, incoming: Path, digest: str) -> Artifact[EngineBundle]:
    """The record of the bundle that the verdict judged: it says what else to fetch, and what that must hash to."""
    (incoming / RECORD).unlink(missing_ok=True)
    registry.fetch(version.bundle_root, RECORD, incoming / RECORD)
    try:
        found = load_record(incoming, EngineBundle)
    except TapeoutError as error:
        shutil.rmtree(incoming)
        raise changed(version, error.found) from error
    if found.digest != digest:
        shutil.rmtree(incoming)
        raise changed(version, f"its bundle is {found.digest[:12]}, and {digest[:12]} was judged")
    return found


def _files(registry: Registry, version: Version, bundle: Artifact[EngineBundle]) -> int:
    """Every file of the record, hashed while it arrives; how many bytes were fetched."""
    missing = {
        name: entry
        for name, entry in sorted(bundle.files.items())
        if not (path := bundle.folder / name).is_file() or sha256_file(path) != entry.sha256
    }
    needed, free = sum(entry.size_bytes for entry in missing.values()), shutil.disk_usage(bundle.folder).free
    needed -= sum(path.stat().st_size for path in bundle.folder.rglob("*.part"))
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are missing, {free / 1e6:.0f} MB are free")

    failed = threading.Event()  # so that no thread begins another file

    def fetch(registry: Registry, names: Iterable[str]) -> None:
        try:
            for name in names:
                if failed.is_set():
                    return
                _file(registry, version, name, bundle.folder / name, missing[name].sha256)
        except BaseException:
            failed.set()
            raise

    # A small file takes a server as long to find as to send, so they arrive beside the large ones.
    small = [name for name, entry in missing.items() if entry.size_bytes < SMALL_BYTES]
    with open_registry() as another, ThreadPoolExecutor(1) as beside:
        arriving = beside.submit(fetch, another, small)
        fetch(registry, [name for name in missing if name not in small])
        arriving.result()
    return needed


def _file(registry: Registry, version: Version, name: str, path: Path, sha256: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if (found := registry.fetch(version.bundle_root, name, path)) != sha256:
        path.unlink()
        raise changed(version, f"{name} has sha256 {found[:12]}, and {sha256[:12]} was judged")
    path.chmod(0o444)


def _signatures(
    registry: Registry, version: Version, verdict: Header, bundle: Artifact[EngineBundle], key: Path
) -> dict[str, str]:
    """The signatures of verdict and files by file name, if both are by ``key`` and about what is here."""
    from pipeline.registry.signatures import require_model_signature, require_verdict_signature

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
        require_verdict_signature(judged, key, version.name, verdict.record, verdict.digest, bundle.folder)
        require_model_signature(files, key, bundle)
        return {path.name: path.read_text() for path in (judged, files)}


def _keep(signatures: Mapping[str, str], folder: Path) -> None:
    """Write them beside the bundle."""
    if signatures:
        from tapeout.signing import model_signature_path, signature_path, write_signature

        write_signature(signature_path(folder), signatures[SIGNATURE])
        write_signature(model_signature_path(folder), signatures[MODEL_SIGNATURE])


def _levels(
    registry: Registry, version: Version, verdict: Header, bundle: Artifact[EngineBundle], key: Path | None
) -> tuple[str, ...]:
    """The bundle's levels of native kernels with evidence: the verdict's, and those with evidence of their own."""
    if any(tag.startswith(LEVEL_TAG) for tag in version.tags):
        from pipeline.registry.logged import fetch_levels

        return fetch_levels(registry, version, bundle, key)
    judged = judged_level(bundle.record.target, str(verdict.record.get("executed_on") or ""))
    return tuple(one.level for one in bundle.record.hardware if one.level == judged)


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
