"""A secret beside a log: without it, nobody can guess the ids that the log holds as hashes."""

from __future__ import annotations

import secrets
from pathlib import Path

SALT = "salt"


def kept_salt(folder: Path) -> bytes:
    """The folder's own; it is made once, and never written into the log."""
    path = folder / SALT
    if not path.exists():
        unfinished = path.with_name(f".{SALT}.{secrets.token_hex(4)}")
        unfinished.touch(0o600)
        unfinished.write_bytes(secrets.token_bytes(32))
        unfinished.rename(path)
    return path.read_bytes()
