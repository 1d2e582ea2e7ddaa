"""Which engine of the registry is to be served, looked up without burdening the server.

MLflow takes a second of processor time and hundreds of megabytes to import, so the registry is asked by a process of
its own, and only when something may have changed there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.registry.tracking import public_uri, sqlite_path, tracking_uri
from pipeline.registry.versions import CHALLENGER, CHAMPION, UnknownVersionError
from tapeout.errors import RegistryError, TapeoutError

ANSWER_SECONDS = 120


class Champion(NamedTuple):
    version: int
    digest: str
    folder: Path


async def find_champion(name: str, alias: str = CHAMPION) -> Champion:
    """The champion, judged again from its logged evidence. :class:`RegistryError` if there is none to rely on.

    ``alias``: the challenger is looked up in the same way.
    """
    answer = await ask(__name__, name, alias)
    return Champion(answer["version"], answer["digest"], Path(answer["folder"]))


async def ask(module: str, *words: str) -> Any:
    """What ``python -m module words`` prints as JSON; the error that it prints is raised as :class:`RegistryError`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *words),
        stdout=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), ANSWER_SECONDS)
        answer: Any = json.loads(output.splitlines()[-1])
    except (TimeoutError, ValueError, IndexError) as error:
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
    try:
        said = look_up()
    except TapeoutError as error:
        said = {"found": error.found, "expected": error.expected, "remedy": error.remedy}
        said["unknown"] = isinstance(error, UnknownVersionError)
    print(json.dumps(said), flush=True)


def state(name: str) -> Any:
    """A cheap value that changes whenever the champion does; None where only a full look can tell.

    :class:`RegistryError` if no server answers.
    """
    uri = tracking_uri()
    if (database := sqlite_path(uri)) is not None:
        files = [database, database.with_name(f"{database.name}-wal")]
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in files]
    if not uri.startswith(("http://", "https://")):
        return None
    query = urllib.parse.urlencode({"name": name, "alias": CHAMPION})
    try:
        with urllib.request.urlopen(
            f"{uri.rstrip('/')}/api/2.0/mlflow/registered-models/alias?{query}", timeout=10
        ) as answer:
            return json.loads(answer.read())["model_version"]["version"]
    except (urllib.error.HTTPError, ValueError, KeyError):
        return None
    except OSError as error:
        raise RegistryError(
            f"no MLflow server answers at {public_uri(uri)}: {error}", expected="a server that can be reached"
        ) from error


def main() -> None:
    from pipeline.registry.register import challenger, champion

    name, alias = sys.argv[1:]

    def look_up() -> dict[str, Any]:
        found = {CHAMPION: champion, CHALLENGER: challenger}[alias](name)
        if found is None:
            raise RegistryError(
                f"{name} has no {alias} at {public_uri(tracking_uri())}",
                expected="a version that was promoted" if alias == CHAMPION else "a version that was registered",
                remedy="run `tapeout promote`, or name a bundle: `tapeout serve artifacts/candidate`"
                if alias == CHAMPION
                else "run `dvc repro register`, or name a bundle",
            )
        return {"version": found.version, "digest": found.digest, "folder": str(found.location)}

    answered(look_up)


if __name__ == "__main__":
    main()
