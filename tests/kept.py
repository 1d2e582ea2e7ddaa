"""What many tests read and none changes: made once per machine, by whichever worker needs it first."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

UNUSED_DAYS = 3  # after which what other code made is removed


def kept(name: str, key: str, make: Callable[[Path], object]) -> Path:
    """The folder that ``make`` wrote; do not write to it. ``key``: all that shapes its content."""
    home = Path(tempfile.gettempdir()) / f"tapeout-tests-{os.getuid()}"
    home.mkdir(exist_ok=True)
    folder = home / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                make(partial)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            partial.rename(folder)
        os.utime(folder)
    _remove_unused(home, name)
    return folder


def _remove_unused(home: Path, name: str) -> None:
    """Locks stay: who deletes one that others wait for lets two of them in."""
    before = time.time() - UNUSED_DAYS * 24 * 3600
    for folder in home.glob(f"{name}-????????????????"):
        with suppress(Timeout, FileNotFoundError), FileLock(f"{folder}.lock", timeout=0):
            if folder.stat().st_mtime < before:
                shutil.rmtree(folder)
