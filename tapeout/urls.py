"""URLs in messages and records."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


def redact(url: str) -> str:
    """The URL without credentials, query and fragment, which may hold signatures: fit for messages and records.

    >>> redact("https://me:secret@host:8443/model.gguf?token=1")
    'https://host:8443/model.gguf'
    """
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
