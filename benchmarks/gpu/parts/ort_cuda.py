"""The target ``ort-cuda``, where onnxruntime-gpu is installed: its engines against those of the CPU."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.gpu.parts.kernels import ROOT, count
from benchmarks.gpu.place import LeftOutError, Place, Record
from engines.targets.ort_cuda import hardware

TESTS = "tests/gpu/test_ort_cuda_on_gpu.py"


def run(place: Place, record: Record) -> None:
    found, *_ = hardware.refusal()
    if found:
        raise LeftOutError(found)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-3000:], done.stderr[-1000:], flush=True)
    passed = count(done.stdout, "passed")
    record("engines of ort-cuda", holds=done.returncode == 0 and passed > 0, passed=passed)
