"""A machine that only serves: processes that can import what ``tapeout[serve,signing]`` installs, no more."""

from __future__ import annotations

import os
import subprocess
import tomllib
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.command import COMMAND, ROOT

EXTRAS = ("serve", "signing")
HOOK = """
import sys

FORBIDDEN = {forbidden!r}


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}: this machine only serves", name=name)


sys.meta_path.insert(0, NotInstalled())
"""


def environment(folder: Path, *, extras: tuple[str, ...] = EXTRAS, **variables: str) -> dict[str, str]:
    """Variables for such a process. Whatever imports another distribution, in any of its processes, fails."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(HOOK.format(forbidden=forbidden_modules(extras)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "TAPEOUT"))}
    paths = os.pathsep.join((str(folder), str(ROOT)))
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TAPEOUT_CACHE": str(folder / "cache")}
    return kept | own | variables


def run(folder: Path, environment: dict[str, str], *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, **options
    )


@cache
def forbidden_modules(extras: tuple[str, ...]) -> frozenset[str]:
    """Top-level modules of all distributions that serving does not install."""
    serving, found = _installed(extras), set[str]()
    for module, distributions in metadata.packages_distributions().items():
        if not serving & {canonicalize_name(name) for name in distributions}:
            found.add(module)
    return frozenset(found)


def _installed(extras: tuple[str, ...]) -> set[str]:
    """What ``pip install 'tapeout[extras]'`` installs, as ``pyproject.toml`` and the distributions say."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [line for extra in extras for line in project["optional-dependencies"][extra]]
    found = {"tapeout"}
    open_ends = [Requirement(line) for line in (*project["dependencies"], *wanted)]
    while open_ends:
        requirement = open_ends.pop()
        name = canonicalize_name(requirement.name)
        asked = [{"extra": extra} for extra in ("", *requirement.extras)]
        if name in found or not any(requirement.marker is None or requirement.marker.evaluate(one) for one in asked):
            continue
        found.add(name)
        with suppress(metadata.PackageNotFoundError):
            lines = [Requirement(line) for line in metadata.requires(name) or ()]
            open_ends += [one for one in lines if one.marker is None or any(map(one.marker.evaluate, asked))]
    return found
