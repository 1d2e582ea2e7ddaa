"""What many tests read and none changes: made once per machine, by whichever worker needs it first."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def kept(name: str, key: str, make: Callable[[Path], object]) -> Path:
    """The folder that ``make`` wrote; do not write to it. ``key``: all that shapes its content."""
    home = Path(tempfile.gettempdir()) / f"tapeout-tests-{os.getuid()}"
    home.mkdir(exist_ok=True)
    folder = home / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(folder)
    return folder
