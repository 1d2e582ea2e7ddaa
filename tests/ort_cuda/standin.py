"""Builds the stand-in for CUDA's libraries, and runs programs with the onnxruntime-gpu that it stands under."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

from engines.kernels.cpu.compiler import COMPILER, cache
from engines.targets.ort_cuda.hardware import PACKAGE, VERSION
from tapeout.cache import cache_folder

SOURCE = Path(__file__).parent / "standin.c"
FLAGS = ("-std=gnu11", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-target", "x86_64-linux-gnu.2.28")
RUNTIME = "libcudart.so.13"  # has all functions; the others only name it
OTHERS = ("libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10", "libcuda.so.1", "libcudnn.so.9", "libcufft.so.12")
ROOT = Path(__file__).parents[2]
WHEEL_VARIABLE = "TAPEOUT_ONNXRUNTIME_GPU"  # the folder of the unpacked package
SECONDS = 240


def unpacked_wheel() -> Path:
    """The folder with the package ``onnxruntime`` of onnxruntime-gpu. The test is skipped where there is none."""
    named = os.environ.get(WHEEL_VARIABLE)
    folder = Path(named) if named else cache_folder() / f"{PACKAGE}-{VERSION}"
    library = folder / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    if not library.is_file():
        pytest.skip(f"no {PACKAGE} {VERSION} in {folder}: `make fetch-onnxruntime-gpu` puts it there")
    return folder


def libraries() -> Path:
    """The folder with the stand-in under the names of CUDA's libraries, compiled once."""
    key = hashlib.sha256(repr((metadata.version(COMPILER), FLAGS, OTHERS)).encode() + SOURCE.read_bytes())
    folder = cache() / f"cuda-standin-{key.hexdigest()[:16]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as own:
            made = Path(own) / "made"
            made.mkdir()
            _compile(made / RUNTIME, [str(SOURCE)])
            (Path(own) / "empty.c").write_text("")
            for name in OTHERS:
                _compile(made / name, [str(Path(own) / "empty.c"), "-Wl,--no-as-needed", str(made / RUNTIME)])
            made.rename(folder)
    return folder


def _compile(path: Path, sources: list[str]) -> None:
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(cache() / "compiler")}
    command = [sys.executable, "-m", COMPILER, "cc", *FLAGS, f"-Wl,-soname,{path.name}", "-o", str(path), *sources]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert not done.returncode, done.stderr


def run_dry(program: str, *arguments: str) -> str:
    """What a module of tests prints that runs with the package over the stand-in."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(unpacked_wheel()), str(ROOT)]),
        "LD_LIBRARY_PATH": str(libraries()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", program, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=SECONDS, check=False
    )
    assert not done.returncode, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
