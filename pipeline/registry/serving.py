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
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.registry.tracking import public_uri, sqlite_path, tracking_uri
from pipeline.registry.versions import CHALLENGER, CHAMPION
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
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, name, alias),
        stdout=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), ANSWER_SECONDS)
        answer: Any = json.loads(output.splitlines()[-1])
    except (TimeoutError, ValueError, IndexError) as error:
        raise RegistryError(f"looking up {name} failed", remedy="see the messages above, or retry") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if "found" in answer:
        raise RegistryError(answer["found"], expected=answer["expected"], remedy=answer["remedy"])
    return Champion(answer["version"], answer["digest"], Path(answer["folder"]))


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
    try:
        found = {CHAMPION: champion, CHALLENGER: challenger}[alias](name)
        if found is None:
            raise RegistryError(
                f"{name} has no {alias} at {public_uri(tracking_uri())}",
                expected="a version that was promoted" if alias == CHAMPION else "a version that was registered",
                remedy="run `tapeout promote`, or name a bundle: `tapeout serve artifacts/candidate`"
                if alias == CHAMPION
                else "run `dvc repro register`, or name a bundle",
            )
        said = {"version": found.version, "digest": found.digest, "folder": str(found.location)}
    except TapeoutError as error:
        said = {"found": error.found, "expected": error.expected, "remedy": error.remedy}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
