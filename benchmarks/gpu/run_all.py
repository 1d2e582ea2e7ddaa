"""Everything that a machine with a GPU is needed for, in one run of at most eight minutes: first results, then speed.

python -m benchmarks.gpu.run_all gpu-kernels --out gpu-results
python -m benchmarks.gpu.run_all gpu-kernels --out gpu-results --again steps
python -m benchmarks.gpu.run_all gpu-kernels --out /tmp/rehearsal --rehearsal

``gpu-kernels`` is made before, on any machine, by :mod:`benchmarks.gpu.prepare`. Needs this checkout, numpy, PyTorch.
Each part has a process and a limit of its own. What it finds is in OUT/PART.jsonl line by line, its output in
OUT/PART.log, and after each part all of it is in OUT/results.json and OUT/gpu.md. The same command again goes on with
the parts that were cut, broke, or had no time. ``--rehearsal`` runs the same at small sizes over the stand-in for a
driver, and counts for no goal.

Exit code 1: a check has not held. 2: a part broke. 3: a part was cut or had no time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

# Nothing but the standard library is imported before packages of the prepared folder can be found.
ROOT = Path(__file__).parents[2]
WHOLE_RUN_S = 480
LEAST_S = 5  # less is not worth starting a part
REHEARSAL_PATIENCE = 10  # times the limits: fibers on a busy machine


@dataclass(frozen=True)
class Part:
    """``timed``: it runs alone. The others run side by side."""

    name: str
    limit_s: int
    timed: bool = True


# What is wanted most comes first: a machine may be had for less time than all of it takes.
PARTS = (
    Part("kernels", 60, timed=False),
    Part("engine", 60, timed=False),
    Part("sanitizer", 60, timed=False),
    Part("ort_cuda", 60, timed=False),
    Part("machine", 25),
    Part("steps", 120),
    Part("linears", 75),
    Part("attention", 45),
    Part("profile", 60),
)
DONE, WRONG, LEFT_OUT, BROKEN, CUT, NO_TIME = "done", "wrong", "left out", "broken", "cut at its limit", "no time left"
SETTLED = (DONE, WRONG, LEFT_OUT)  # these are not run again unless they are asked for


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", type=Path, help="the folder that benchmarks.gpu.prepare made")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--again", nargs="+", default=[], choices=[part.name for part in PARTS], metavar="PART")
    parser.add_argument("--seconds", type=float, default=WHOLE_RUN_S, help="for the whole run")
    parser.add_argument("--rehearsal", action="store_true", help="without a GPU")
    return parser.parse_args(words)


def run_part(part: Part, limit_s: float, kernels: Path, out: Path, level: str) -> dict[str, Any]:
    """Its status, seconds and lines."""
    lines = out / f"{part.name}.jsonl"
    lines.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.part", part.name, str(kernels), str(out), level]
    begun = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
                process.wait()
    found = read_lines(lines)
    wrong = any(line.get("holds") is False for line in found)
    status = {0: DONE, 3: LEFT_OUT, None: CUT}.get(code, BROKEN)
    return {"status": WRONG if wrong else status, "seconds": round(time.monotonic() - begun, 1), "found": found}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines: a part that was stopped may have left half of one."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def page(results: dict[str, Any]) -> str:
    from benchmarks.gpu import goals

    parts = results["parts"]
    found = {name: part["found"] for name, part in parts.items()}
    head = f"# {results['place']['gpu']}, {results['place']['level']}"
    rows = []
    for part in PARTS:
        known = parts.get(part.name, {"status": goals.NOT_RUN, "seconds": "", "found": []})
        lines: list[dict[str, Any]] = known["found"]
        checks = [line for line in lines if "holds" in line]
        reason = next((line["reason"] for line in lines if "reason" in line), "")
        held = f"{sum(line['holds'] for line in checks)} of {len(checks)}" if checks else ""
        status = f"{known['status']}: {reason}" if reason else known["status"]
        rows.append(f"| {part.name} | {status} | {known['seconds']} | {held} |")
    wrong = [f"- {name}: {line}" for name, lines in found.items() for line in lines if line.get("holds") is False]
    rehearsal = results["place"]["rehearsal"]
    note = ["A rehearsal over the stand-in for a driver: times mean nothing.", ""] if rehearsal else []
    heading = ("| part | status | seconds | checks that held |", "|---|---|--:|--:|")
    failed = ["Checks that have not held:", "", *wrong, ""] if wrong else []
    return "\n".join([head, "", *note, *heading, *rows, "", *failed, goals.table({} if rehearsal else found), ""])


def exit_code(results: dict[str, Any]) -> int:
    found = {part.name: results["parts"].get(part.name, {"status": NO_TIME})["status"] for part in PARTS}
    for status, code in ((WRONG, 1), (BROKEN, 2), (CUT, 3), (NO_TIME, 3)):
        if status in found.values():
            return code
    return 0


def is_settled(results: dict[str, Any], part: Part) -> bool:
    return results["parts"].get(part.name, {"status": NO_TIME})["status"] in SETTLED


def together(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Neighbours that are not timed, as one group; others alone."""
    for timed, group in groupby(parts, key=lambda part: part.timed):
        members = list(group)
        yield from ([part] for part in members) if timed else (members,)


def digest_of(folder: Path) -> str:
    """Of kernels: results of others are not mixed with these."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("cuda-*")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def run(options: argparse.Namespace) -> int:
    from benchmarks.gpu.place import place_here
    from engines.kernels.cuda.device import find_gpu
    from tapeout.errors import ArtifactError

    begun = time.monotonic()
    kernels, out = options.kernels.resolve(), options.out.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        place = place_here(kernels, Path(scratch), rehearsal=options.rehearsal)
    gpu = find_gpu()
    here = {"gpu": gpu if isinstance(gpu, str) else gpu.name, "level": place.level, "rehearsal": options.rehearsal,
            "kernels": digest_of(kernels)}  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    written = out / "results.json"
    results: dict[str, Any] = json.loads(written.read_text()) if written.is_file() else {"place": here, "parts": {}}
    if results["place"] != here:
        raise ArtifactError(
            f"{out} has results of {results['place']}",
            expected=f"those of {here}",
            remedy="give another --out",
        )
    patience = REHEARSAL_PATIENCE if options.rehearsal else 1
    whole = options.seconds * patience

    def keep(part: Part, found: dict[str, Any]) -> None:
        results["parts"][part.name] = found
        print(f"{part.name}: {found['status']}", flush=True)
        write(written, json.dumps(results, indent=1) + "\n")
        write(out / "gpu.md", page(results))

    wanted = [part for part in PARTS if part.name in options.again or not is_settled(results, part)]
    for group in together(wanted):
        left = whole - (time.monotonic() - begun)
        if left < LEAST_S:
            for part in group:
                keep(part, results["parts"].get(part.name) or {"status": NO_TIME, "seconds": 0, "found": []})
            continue
        with ThreadPoolExecutor(len(group)) as pool:
            running = dict[Future[dict[str, Any]], Part]()
            for part in group:
                limit = min(part.limit_s * patience, left)
                print(f"{part.name}: at most {limit:.0f} s", flush=True)
                running[pool.submit(run_part, part, limit, kernels, out, place.level)] = part
            for done in as_completed(running):
                keep(running[done], done.result())
    print(page(results))
    return exit_code(results)


def main() -> int:
    options = arguments()
    site = str((options.kernels / "site").resolve())
    sys.path[:0] = [str(ROOT), site]
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), site, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    from tapeout.errors import TapeoutError

    try:
        return run(options)
    except TapeoutError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
