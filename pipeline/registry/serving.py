"""Which engine of the registry is to be served, looked up without burdening the server.

A pull hashes hundreds of megabytes, and a registry in a database takes MLflow. So both run in a process of their own,
and only when something may have changed in the registry.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.registry.access import RestRegistry, VersionReference, http_session
from pipeline.registry.bundle_store import store_folder
from pipeline.registry.pull import Pulled, Requirements, pull
from pipeline.registry.tracking import sqlite_path, tracking_uri
from pipeline.registry.versions import UnknownVersionError
from tapeout.errors import RegistryError, TapeoutError


async def pulled(reference: VersionReference, required: Requirements) -> Pulled:
    """Pull in a process of its own; :class:`RegistryError` if the version cannot be relied on."""
    answer = await ask(__name__, str(reference), json.dumps(asdict(required), default=str))
    return Pulled(**answer | {"folder": Path(answer["folder"]), "levels": tuple(answer["levels"])})


async def ask(module: str, *words: str) -> Any:
    """What ``python -m module words`` prints as JSON; the error that it prints is raised as :class:`RegistryError`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *words),
        stdout=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        output, _ = await process.communicate()
        answer: Any = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise RegistryError(f"looking up {words[0]} failed", remedy="see the messages above, or retry") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if "found" in answer:
        kind = UnknownVersionError if answer.get("unknown") else RegistryError
        raise kind(answer["found"], expected=answer["expected"], remedy=answer["remedy"])
    return answer


def answered(look_up: Callable[[], dict[str, Any]]) -> None:
    """Print for :func:`ask` what ``look_up`` gives, or its error."""
    gc.disable()  # the process ends with its answer; collecting while MLflow is imported takes a tenth of its time
    try:
        answer = look_up()
    except TapeoutError as error:
        unknown = isinstance(error, UnknownVersionError)
        answer = {"found": error.found, "expected": error.expected, "remedy": error.remedy, "unknown": unknown}
    print(json.dumps(answer), flush=True)


def state(reference: VersionReference) -> Any:
    """A cheap value that changes whenever the alias does; None where only a full look can tell.

    :class:`RegistryError` if no server answers, or if it has no such alias.
    """
    uri = tracking_uri()
    if (database := sqlite_path(uri)) is not None:
        files = [database, database.with_name(f"{database.name}-wal")]
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in files]
    if not uri.startswith(("http://", "https://")) or reference.alias is None:
        return None
    with http_session() as session:
        return RestRegistry(uri, session).alias(reference.name, reference.alias)["version"]


def main() -> None:
    reference, required = sys.argv[1], json.loads(sys.argv[2])
    paths = {name: required[name] and Path(required[name]) for name in ("public_key", "judge_by")}

    def look_up() -> dict[str, Any]:
        found = pull(VersionReference.parse(reference), store_folder(), Requirements(**required | paths))
        return found._asdict() | {"folder": str(found.folder)}

    answered(look_up)


if __name__ == "__main__":
    main()
