"""Logs of lines that one process appends to: a whole line is written, or none."""

from __future__ import annotations

import os
from contextlib import suppress


def append_line(file: int, line: bytes) -> None:
    """Append ``line`` and a line break to an open file. OSError if it cannot be written whole; none of it stays then.

    A full disk takes a part of a line without an error. A crash can leave one, too: the next line begins after it.
    """
    size = os.fstat(file).st_size
    rest = line + b"\n"
    if size and os.pread(file, 1, size - 1) != b"\n":
        rest = b"\n" + rest
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, size)
        raise
