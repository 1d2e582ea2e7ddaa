"""Folders that survive a kill: a folder takes the place of another in one step, or is put back at the next start."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def replace_folder(new: Path, place: Path) -> None:
    """``new`` becomes ``place``; what was there before is removed. Both lie in the same folder.

    All of ``new`` is on the disk before. Killed at any point, ``place`` holds the old folder or the new one: the two
    are exchanged in one system call (Linux ``renameat2``). Where the file system cannot, the old folder is renamed
    aside first, and :func:`recover` puts it back if nothing took its place.
    """
    sync_tree(new)
    aside = _aside(place)
    if not place.exists():
        new.rename(place)
    elif _exchange(new, place):
        _remove(new)
    else:
        place.rename(aside)
        try:
            new.rename(place)
        except OSError:
            aside.rename(place)
            raise
    sync_folder(place.parent)
    if aside.exists():
        _remove(aside)


def recover(place: Path) -> None:
    """Put back what an interrupted :func:`replace_folder` renamed aside, if nothing took its place."""
    if not place.exists() and _aside(place).is_dir():
        _aside(place).rename(place)


def sync_tree(folder: Path) -> None:
    """Write every file and folder in it to the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root, name), os.O_RDONLY)
        sync_folder(Path(root))


def sync_folder(folder: Path) -> None:
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """False where the system or the file system cannot exchange two folders."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes  # late: most processes never need it

    call = getattr(ctypes.CDLL(None), "renameat2", None)  # absent before glibc 2.28
    paths = os.fsencode(one), os.fsencode(other)
    return call is not None and call(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0


def _remove(folder: Path) -> None:
    """Its record first, so that no half-removed folder loads."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
        return
    for path in folder.glob("record.json"):
        path.unlink()
    shutil.rmtree(folder)


def _aside(place: Path) -> Path:
    return place.with_name(f".{place.name}.replaced")
