"""Measure time and peak memory of pipeline stages on a checkpoint of any size.

python -m benchmarks.shapes llama-3.2-1b scratch/llama-1b
python -m benchmarks.scale scratch/llama-1b scratch/run --stages fetch export calibrate plan quantize build-candidate

Each stage runs as `tapeout stage NAME` in a process of its own, in the work folder, with the recipe of --recipe and the
checkpoint as its source. Reported for each: seconds, processor seconds, the largest anonymous memory (what the stage
allocates) and the largest resident memory (with mapped files, which the system takes back when it must), both over the
process and its children, read every 20 ms; and the bytes of its artifact. Results are added to results.jsonl in the
work folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tapeout.coded_parameters import with_codes
from tapeout.tensor_files import stored_tensors

# This checkout's, whatever is installed.
TAPEOUT = (sys.executable, "-c", "import sys; from pipeline.cli.main import main; sys.exit(main(sys.argv[1:]))")
INTERVAL_S = 0.02
FOLDERS = {
    "fetch": "source",
    "export": "graph",
    "calibrate": "calibration",
    "quantize": "quantized",
    "evaluate": "evaluation",
    "source": "source-model",
}
STAGES = (
    *("fetch", "export", "calibrate", "sensitivity", "plan", "quantize", "build-candidate", "build-baseline"),
    *("parity", "incumbent", "evaluate", "shadow", "serving", "source", "benchmark"),
)


@dataclass(frozen=True)
class Measured:
    """``load``: average number of busy processes of the machine in the last minute of the stage, its own included."""

    stage: str
    parameters: int
    exit_code: int
    seconds: float
    processor_seconds: float
    peak_anonymous_bytes: int
    peak_resident_bytes: int
    artifact_bytes: int
    load: float


@dataclass(frozen=True)
class Run:
    """What a command took."""

    exit_code: int
    seconds: float
    processor_seconds: float
    anonymous_bytes: int
    resident_bytes: int


def measure(command: Sequence[str], folder: Path) -> Run:
    """Run a command in ``folder``."""
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    begun, busy = time.monotonic(), _processor_seconds()
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        anonymous = resident = 0
        while process.poll() is None:
            now = _memory(process.pid)
            anonymous, resident = max(anonymous, now[0]), max(resident, now[1])
            time.sleep(INTERVAL_S)
    seconds, busy = time.monotonic() - begun, _processor_seconds() - busy
    return Run(process.returncode, seconds, busy, anonymous, resident)


def _processor_seconds() -> float:
    """Of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


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


def count_parameters(checkpoint: Path) -> int:
    """Weights of the checkpoint, from the headers of its files; codes count as what they stand for."""
    if not any(checkpoint.glob("*.safetensors")):
        return 0  # a GGUF file
    return sum(math.prod(tensor.shape) for tensor in with_codes(stored_tensors(checkpoint)).values())


def write_recipe(path: Path, recipe: Path, checkpoint: Path, settings: Sequence[str]) -> None:
    """The recipe with another source and with ``settings`` of the form ``section.key=value`` (YAML)."""
    content: dict[str, Any] = yaml.safe_load(recipe.read_text())
    content["model"] = {"source": f"file:{checkpoint.resolve()}"}
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
    parameters = count_parameters(given.checkpoint)
    write_recipe(given.work / "params.yaml", given.recipe, given.checkpoint, given.set)
    for stage in given.stages:
        command = [*TAPEOUT, "stage", stage]
        run = measure(command, given.work)
        artifact = given.work / "artifacts" / FOLDERS.get(stage, stage.removeprefix("build-"))
        files = [path for path in artifact.rglob("*") if path.is_file()] if run.exit_code == 0 else []
        found = Measured(
            stage,
            parameters,
            run.exit_code,
            round(run.seconds, 1),
            round(run.processor_seconds, 1),
            run.anonymous_bytes,
            run.resident_bytes,
            sum(path.stat().st_size for path in files),
            round(os.getloadavg()[0], 1),
        )
        with (given.work / "results.jsonl").open("a") as stream:
            stream.write(json.dumps(asdict(found)) + "\n")
        print(json.dumps(asdict(found)), flush=True)
        if run.exit_code:
            raise SystemExit(run.exit_code)


if __name__ == "__main__":
    main()
