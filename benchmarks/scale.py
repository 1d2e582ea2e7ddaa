"""Measure time and peak memory of pipeline stages on a checkpoint of any size.

python -m benchmarks.shapes llama-3.2-1b scratch/llama-1b
python -m benchmarks.scale scratch/llama-1b scratch/run --stages fetch export calibrate plan quantize build-candidate

Each stage runs as `tapeout stage NAME` in a process of its own, in the work folder, with the recipe of --recipe and the
checkpoint as its source. Reported for each: seconds, the largest anonymous memory (what the stage allocates) and the
largest resident memory (with mapped files, which the system takes back when it must), both over the process
and its children, read every 20 ms; and the bytes of its artifact. Results are added to results.jsonl in the work
folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

INTERVAL_S = 0.02
FOLDERS = {"fetch": "source", "export": "graph", "calibrate": "calibration", "quantize": "quantized"}
STAGES = ("fetch", "export", "calibrate", "sensitivity", "plan", "quantize", "build-candidate", "build-baseline")


@dataclass(frozen=True)
class Measured:
    """``load``: average number of busy processes of the machine in the last minute of the stage, its own included."""

    stage: str
    exit_code: int
    seconds: float
    peak_anonymous_bytes: int
    peak_resident_bytes: int
    artifact_bytes: int
    load: float


def measure(command: Sequence[str], folder: Path) -> tuple[int, float, int, int]:
    """Run a command in ``folder``: exit code, seconds, largest anonymous and largest resident memory in bytes."""
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    begun = time.monotonic()
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        anonymous = resident = 0
        while process.poll() is None:
            now = _memory(process.pid)
            anonymous, resident = max(anonymous, now[0]), max(resident, now[1])
            time.sleep(INTERVAL_S)
        return process.returncode, time.monotonic() - begun, anonymous, resident


def _memory(pid: int) -> tuple[int, int]:
    """Anonymous and resident bytes of a process and its children; those that have ended count nothing."""
    anonymous = resident = 0
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            continue
        sizes = {name: int(value.split()[0]) << 10 for name, _, value in (line.partition(":") for line in lines)
                 if name in ("RssAnon", "VmRSS")}  # fmt: skip
        anonymous += sizes.get("RssAnon", 0)
        resident += sizes.get("VmRSS", 0)
    return anonymous, resident


def write_recipe(path: Path, recipe: Path, checkpoint: Path, settings: Sequence[str]) -> None:
    """The recipe with another source and with ``settings`` of the form ``section.key=value`` (YAML)."""
    content: dict[str, Any] = yaml.safe_load(recipe.read_text())
    content["model"] = {"source": str(checkpoint.resolve())}
    for setting in settings:
        name, _, value = setting.partition("=")
        section, _, key = name.rpartition(".")
        (content[section] if section else content)[key] = yaml.safe_load(value)
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--recipe", type=Path, default=Path("params.yaml"))
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="change the recipe")
    given = parser.parse_args(words)
    given.work.mkdir(parents=True, exist_ok=True)
    write_recipe(given.work / "params.yaml", given.recipe, given.checkpoint, given.set)
    for stage in given.stages:
        command = [sys.executable, "-m", "pipeline.cli.main", "stage", stage]
        code, seconds, anonymous, resident = measure(command, given.work)
        artifact = given.work / "artifacts" / FOLDERS.get(stage, stage.removeprefix("build-"))
        size = sum(path.stat().st_size for path in artifact.rglob("*") if path.is_file()) if code == 0 else 0
        found = Measured(stage, code, round(seconds, 1), anonymous, resident, size, round(os.getloadavg()[0], 1))
        with (given.work / "results.jsonl").open("a") as stream:
            stream.write(json.dumps(asdict(found)) + "\n")
        memory = f"{anonymous / 1e9:.2f} GB anonymous, {resident / 1e9:.2f} GB resident"
        print(f"{stage}: {seconds:.1f} s, {memory}, artifact {size / 1e9:.2f} GB, load {found.load}", flush=True)
        if code:
            raise SystemExit(code)


if __name__ == "__main__":
    main()
