"""How long `tapeout pull` takes, against curl with the same files from the same server to the same disk.

    MLFLOW_TRACKING_URI=http://127.0.0.1:5000 python -m benchmarks.pull models:/tapeout-default@champion

The two take turns, each into an empty folder. The time of a pull is that of its whole process: Python's start, the
registry's answers, hashes, and that all is on the disk. curl writes the files of the bundle over one connection, and
neither hashes nor syncs them. ``--python``: an environment with `tapeout[serve]`, as a machine that serves has it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from engines.bundle import EngineBundle
from pipeline.registry.access import ARTIFACTS, VersionReference, open_registry
from pipeline.registry.bundle_store import store_folder
from pipeline.registry.pull import pull
from pipeline.registry.tracking import tracking_uri
from tapeout.artifact import RECORD, load_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="models:/NAME@champion of a server that passes artifacts through")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--folder", type=Path, default=Path(), help="the disk that is written to")
    given = parser.parse_args()
    urls = bundle_urls(given.model)
    contenders: dict[str, Callable[[Path], list[str]]] = {
        "curl": lambda to: [
            "curl",
            "-sSf",
            "--create-dirs",
            *(w for n, u in urls.items() for w in ("-o", f"{to}/{n}", u)),
        ],
        "pull": lambda to: [given.python, "-m", "pipeline.cli", "pull", given.model, "--to", str(to)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(given.turns):
        for name, command in contenders.items():
            with tempfile.TemporaryDirectory(dir=given.folder) as to:
                os.sync()  # so that nobody waits for what another wrote
                started = time.perf_counter()
                subprocess.run(command(Path(to)), check=True, stdout=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - started)
    for name, times in seconds.items():
        print(f"{name}: median {statistics.median(times):.2f} s, least {min(times):.2f} s, most {max(times):.2f} s")
    ratios = sorted(one / other for one, other in zip(seconds["pull"], seconds["curl"], strict=True))
    print(f"pull / curl of a turn: median {statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}")


def bundle_urls(model: str) -> dict[str, str]:
    """Where the server has the record and each file of the bundle."""
    with open_registry() as registry:
        root = registry.version(VersionReference.parse(model)).bundle_root.removeprefix("mlflow-artifacts:").strip("/")
    found = load_record(pull(VersionReference.parse(model), store_folder()).folder, EngineBundle)
    return {name: f"{tracking_uri()}/{ARTIFACTS}/{quote(f'{root}/{name}')}" for name in (RECORD, *sorted(found.files))}


if __name__ == "__main__":
    main()
