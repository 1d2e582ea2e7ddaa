"""Compiles ``source/*.c`` to a library, with a compiler that is installed as a wheel.

The compiler is pinned and its options name the processor, so the same sources give the same bytes on any machine, also
for another processor than that of the machine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from engines.kernels.cpu import Level, declarations
from tapeout.cache import cache_folder
from tapeout.errors import BuildError

SOURCE = Path(__file__).parent / "source"
COMPILER = "ziglang"
# Without the runtime of the compiler, which nothing calls and which would first be compiled for each level, for 5 to 17
# seconds. What neither the C library nor a source has is an error.
LINKED = ("-rtlib=none", "-Wl,-z,defs")
FLAGS = (
    *("-std=c11", "-O3", "-Wall", "-Wextra", "-Werror"),
    *("-shared", "-fPIC", "-fvisibility=hidden", "-s"),
    *LINKED,
)


def library(level: Level, source: Path | None = None) -> Path:
    """The library, compiled once for these sources, this level and this compiler. :class:`BuildError` without one.

    Several threads may ask at once: ``source`` (default: :data:`SOURCE`) is what is compiled and what names the result.
    """
    source = source or SOURCE
    if importlib.util.find_spec(COMPILER) is None:
        raise BuildError(
            f"no compiler: the package {COMPILER} is not installed",
            expected="the pinned compiler that native kernels are built with",
            remedy='pip install ".[pipeline]"',
        )
    flags = (*FLAGS, *target_flags(level))
    path = cache() / _key(source, flags) / f"{level.name}.so"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            _compile(source, path, flags)
    except OSError as error:
        raise BuildError(
            f"kernels cannot be compiled into {path.parent}: {error}",
            expected="a folder to write to",
            remedy="fix its permissions, or set TAPEOUT_CACHE to another folder",
        ) from error
    return path


def target_flags(level: Level) -> tuple[str, ...]:
    """Of every system with glibc 2.28 on processors of this level."""
    return ("-target", f"{level.machine}-linux-gnu.2.28", *level.flags)


def cache() -> Path:
    return cache_folder() / "kernels"


def _key(source: Path, flags: tuple[str, ...]) -> str:
    content = hashlib.sha256(repr((metadata.version(COMPILER), flags, declarations.text())).encode())
    for path in sorted(source.iterdir()):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def _compile(source: Path, path: Path, flags: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as own:  # other processes may compile the same
        partial = Path(own) / path.name
        declared = Path(own) / declarations.FILE
        declared.write_text(declarations.text())
        sources = [str(declared), f"-I{source}", *sorted(file.name for file in source.glob("*.c"))]
        done = subprocess.run(
            [sys.executable, "-m", COMPILER, "cc", *flags, "-o", str(partial), *sources],
            cwd=source,
            capture_output=True,
            text=True,
            env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(cache() / "compiler")},
        )
        if done.returncode:
            raise BuildError(
                f"the kernels in {source} do not compile: {done.stderr.strip()[-2000:]}",
                expected="a library",
                remedy=f"reinstall {COMPILER} in the version that pyproject.toml names",
            )
        partial.replace(path)
