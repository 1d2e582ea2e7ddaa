"""Every kernel against numpy in float64, and that tokens share nothing: the tests of the fibers, on the GPU.

Tensors are pinned memory of the host, which kernels reach at its own address; outputs start as NaNs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.place import Place, Record

ROOT = Path(__file__).parents[3]
TESTS = tuple(f"tests/unit/test_cuda_{name}.py" for name in ("rows", "linear", "attention", "choose"))
REHEARSED = "norm_equals or (linear and order_of_threads)"


def environment(place: Place) -> dict[str, str]:
    """Tests of the kernels launch through the driver."""
    code = {} if place.machine_code is None else {"TAPEOUT_TEST_CUDA_CUBIN": str(place.machine_code)}
    library = {"TAPEOUT_TEST_CUDA_LIBRARY": str(place.library), "TAPEOUT_TEST_CUDA_DRIVER": place.driver_library}
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whatever else is installed there
    return {**os.environ, **plugins, **library, **code}


def command(only: str = "") -> list[str]:
    options = ("-q", "-s", "--noconftest", "-p", "no:cacheprovider", "-o", "addopts=", *(("-k", only) if only else ()))
    return [sys.executable, "-m", "pytest", *options, *TESTS]


def run(place: Place, record: Record) -> None:
    done = subprocess.run(
        command(REHEARSED if place.rehearsal else ""),
        cwd=ROOT,
        env=environment(place),
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-4000:], done.stderr[-2000:], flush=True)
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    record("kernels against float64", holds=done.returncode == 0, passed=count(done.stdout, "passed"), failed=failed)


def count(output: str, what: str) -> int:
    found = re.search(rf"(\d+) {what}", output)
    return int(found[1]) if found else 0
