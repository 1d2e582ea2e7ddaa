"""A copy of the checkout that a drill changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Checkout:
    """``edited``: old files that were changed, below the root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.edited: set[str] = set()
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():  # a deleted file is listed, too
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)

    def add(self, name: str, text: str) -> None:
        path = self.folder / name
        assert not path.exists(), f"{name} is an old file"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}"
        (self.folder / name).write_text(text.replace(old, new))
        self.edited.add(name)

    def python(self, *words: str) -> str:
        """The output of a Python process of the copy; an assertion where it fails."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def stages(self, project: Path, parameters: dict[str, Any], only: Sequence[str] = ()) -> dict[str, Any]:
        """Run every stage on the tiny llama in a new project, or ``only`` some in one that is there.

        The plan of the bundle, the outcome of the verdict and of each check, and the items of each task.
        """
        output = self.python("-m", "tests.drills.stages", str(project), json.dumps(parameters), *only)
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        return found
