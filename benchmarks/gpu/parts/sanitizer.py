"""Tests of the kernels under compute-sanitizer: memory, races in shared memory, barriers, what nobody wrote."""

from __future__ import annotations

import shutil
import subprocess

from benchmarks.gpu.parts import kernels
from benchmarks.gpu.place import LeftOutError, Place, Record

TOOL = "compute-sanitizer"
FOUND = 9  # its exit code
UNSUPPORTED = "Device not supported"  # what it says where the machine lets no debugger reach the GPU
# The second runs all threads of a block against each other, and takes longest.
TOOLS = {
    "memcheck": "equals_its_reference and (linear or int8 or 128 or window or rows)",
    "racecheck": "(linear and order_of_threads) or (attention and order_of_threads and int8)",
    "synccheck": "norm_equals or (linear and order_of_threads) or (attention and order_of_threads)",
    "initcheck": "norm_equals or gate_equals",
}


def run(place: Place, record: Record) -> None:
    program = shutil.which(TOOL)
    if program is None:
        raise LeftOutError(f"{TOOL} is not installed")
    for tool, only in TOOLS.items():
        done = subprocess.run(
            [program, "--tool", tool, "--error-exitcode", str(FOUND), *kernels.command(only)],
            cwd=kernels.ROOT,
            env=kernels.environment(place),
            capture_output=True,
            text=True,
            check=False,
        )
        passed = kernels.count(done.stdout, "passed")
        print(done.stdout[-3000:], flush=True)
        if UNSUPPORTED in done.stdout + done.stderr:
            raise LeftOutError(f"{TOOL}: {UNSUPPORTED}")
        record(tool, holds=done.returncode == 0 and passed > 0, passed=passed, exit_code=done.returncode)
