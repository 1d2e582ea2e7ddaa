"""The download cache: one folder per source, complete once it has ``entry.json``, and hashed at every use.

$TAPEOUT_CACHE or ~/.cache/tapeout
  <source>-<16 hex>/
    entry.json            source, file name, sha256: written last
    model.gguf            the file
    model.gguf.part       a transfer that was interrupted and can be continued
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from tapeout.artifact import sha256_file
from tapeout.cache import cache_folder
from tapeout.errors import SourceError

ENTRY = "entry.json"


def entry_folder(key: str) -> Path:
    """The folder of a source: a readable name, different for every key.

    >>> entry_folder("pypi://my-model==1.0").name
    'pypi-my-model-1.0-92e2e530c37a3807'
    """
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", key.partition("?")[0].rpartition("@")[2] or key).strip("-.")[-60:]
    return cache_folder() / f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def cached(key: str, sha256: str | None, fetch: Callable[[Path], Path]) -> tuple[Path, str]:
    """The file of a source and its sha256, from the cache or, the first time, from ``fetch(entry folder)``.

    A file that does not match its pin, or the hash it had when it was fetched, leaves the cache with a
    :class:`SourceError`, so that the next run starts from nothing. Runs at the same time wait for each other.
    """
    from filelock import FileLock

    folder = entry_folder(key)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        entry = _read_entry(folder)
        if entry is None:
            path = fetch(folder)
            digest = fetched = sha256_file(path)
        else:
            path, fetched = entry
            digest = sha256_file(path)
        if digest != (sha256 or fetched):
            path.unlink()
            (folder / ENTRY).unlink(missing_ok=True)
            raise SourceError(
                f"{path.name} has sha256 {digest}",
                expected=f"{sha256}, its pin" if sha256 else f"{fetched}, as when it was fetched",
                remedy="if this is the file you mean, put its hash in the recipe; else run again to fetch it again "
                "(it was removed from the cache), and if it differs again, do not trust this source",
            )
        if entry is None:
            draft = folder / f"{ENTRY}.part"
            draft.write_text(json.dumps({"file": path.name, "sha256": digest}) + "\n")
            draft.rename(folder / ENTRY)
    return path, digest


def _read_entry(folder: Path) -> tuple[Path, str] | None:
    """File and hash of a complete entry; None when there is none yet, or its file is gone."""
    try:
        entry = json.loads((folder / ENTRY).read_text())
    except FileNotFoundError:
        return None
    path = folder / entry["file"]
    return (path, entry["sha256"]) if path.is_file() else None
