"""The sha256 of a file, computed once per file identity and remembered in the user's cache folder.

The identity is device, inode, size, mtime and ctime. Whoever changes a file can restore its mtime, but not its ctime:
the kernel sets that on every write, rename and chmod. A file that changed within the last tenth of a second is not
remembered, because a second change could still fall into the same tick of the kernel's clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapeout.cache import cache_folder

Identity = tuple[int, int, int, int, int]
Read = Callable[[int], object]
_SETTLED_NS = 100_000_000  # longer than a tick of any kernel
_PART_BYTES = 1 << 20
_SMALL_BYTES = 1 << 20  # up to here, a file is hashed faster than it is remembered


def sha256_file(path: Path, read: Read = lambda _: None) -> str:
    """Read and hash the file, and remember the result. ``read`` hears how many more bytes that were."""
    digest, part = hashlib.sha256(), memoryview(bytearray(_PART_BYTES))
    with path.open("rb", buffering=0) as stream:
        before = _identity(os.fstat(stream.fileno()))
        settled = time.time_ns() - max(before[3:]) > _SETTLED_NS
        while count := stream.readinto(part):
            digest.update(part[:count])
            read(count)
        unchanged = before == _identity(os.fstat(stream.fileno()))
    found = digest.hexdigest()
    if settled and unchanged and before[2] > _SMALL_BYTES:
        _remember(path, before, found)
    return found


def remembered_sha256(path: Path, read: Read = lambda _: None) -> str:
    """The same, read from the cache folder if this very file was hashed before and has not changed since."""
    try:
        entry: Any = json.loads(_entry(path).read_bytes())
        if tuple(entry["identity"]) == identity(path) and len(entry["sha256"]) == 64:
            read(entry["identity"][2])
            return entry["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not remembered, or not readable: hash it
    return sha256_file(path, read)


def identity(path: Path) -> Identity:
    return _identity(path.stat())


def _identity(stat: os.stat_result) -> Identity:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _entry(path: Path) -> Path:
    """One entry per path, so that the folder does not grow with every build."""
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()
    return cache_folder() / "hashes" / f"{name}.json"


def _remember(path: Path, found: Identity, sha256: str) -> None:
    """Without a folder to write to, files are hashed each time: slower, and as safe."""
    entry = _entry(path)
    partial = entry.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_text(json.dumps({"identity": found, "sha256": sha256}))
        partial.replace(entry)
