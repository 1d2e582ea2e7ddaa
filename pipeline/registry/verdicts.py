"""Verdicts of registered versions, judged again from their logged evidence. `python -m` prints one as a document."""

from __future__ import annotations

import sys
from typing import Any

from evals.ci.document import document
from pipeline.registry.judged import JudgedVersion, examine
from pipeline.registry.serving import answered
from pipeline.registry.tracking import connect, public_uri, sqlite_path, tracking_uri
from pipeline.registry.versions import CHAMPION, UnknownVersionError, aliases


def registered_verdict(name: str, version: str) -> JudgedVersion:
    """``version``: its number, or an alias such as ``challenger``.

    :class:`UnknownVersionError` if there is none, :class:`RegistryError` if its evidence cannot be relied on.
    """
    database = sqlite_path(tracking_uri())
    if database is not None and not database.exists():  # connecting would create it
        raise UnknownVersionError(
            f"no registry at {public_uri(tracking_uri())}", expected="a model that was registered"
        )
    with connect(write=False) as client:
        known = aliases(client, name)
        if not version.isdecimal() and version not in known:
            raise UnknownVersionError(
                f"{name} has no version {version}", expected=f"a number or one of {', '.join(known) or 'no aliases'}"
            )
        return examine(client, name, int(version) if version.isdecimal() else known[version])


def champion_verdict(name: str) -> JudgedVersion | None:
    """None where nothing was ever promoted under this name."""
    try:
        return registered_verdict(name, CHAMPION)
    except UnknownVersionError:
        return None


def main() -> None:
    name, version = sys.argv[1:]

    def look_up() -> dict[str, Any]:
        found = registered_verdict(name, version)
        return document(name, found.number, found.verdict, found.digest)

    answered(look_up)


if __name__ == "__main__":
    main()
