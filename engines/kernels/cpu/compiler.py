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
from collections.abc import Callable, Sequence
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
    flags = (*FLAGS, *target_flags(level))
    key = key_of(sorted(source.iterdir()), (compiler_version(), flags, declarations.text()))
    return write_once(cache() / key / f"{level.name}.so", lambda path: _compile(source, path, flags))


def compiler_version() -> str:
    """Of the pinned wheel. :class:`BuildError` without it."""
    if importlib.util.find_spec(COMPILER) is None:
        raise BuildError(
            f"no compiler: the package {COMPILER} is not installed",
            expected="the pinned compiler that native kernels are built with",
            remedy='pip install ".[pipeline]"',
        )
    return metadata.version(COMPILER)


def target_flags(level: Level) -> tuple[str, ...]:
    """Of every system with glibc 2.28 on processors of this level."""
    return ("-target", f"{level.machine}-linux-gnu.2.28", *level.flags)


def cache() -> Path:
    return cache_folder() / "kernels"


def key_of(sources: Sequence[Path], compiled_by: tuple[object, ...]) -> str:
    """Names what is compiled of these files by this compiler, with its options."""
    content = hashlib.sha256(repr(compiled_by).encode())
    for path in sources:
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def write_once(path: Path, write: Callable[[Path], object]) -> Path:
    """``path``, written whole or not at all, in a folder of its own first: other processes may write the same."""
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as own:
                partial = Path(own) / path.name
                write(partial)
                partial.replace(path)
    except OSError as error:
        raise BuildError(
            f"kernels cannot be compiled into {path.parent}: {error}",
            expected="a folder to write to",
            remedy="fix its permissions, or set TAPEOUT_CACHE to another folder",
        ) from error
    return path


def run_compiler(source: Path, arguments: Sequence[str], expected: str) -> None:
    """In the folder ``source``. :class:`BuildError` with the compiler's last words where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", COMPILER, "cc", *arguments],
        cwd=source,
        capture_output=True,
        text=True,
        env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(cache() / "compiler")},
    )
    if done.returncode:
        raise not_compiled(source, done.stderr, COMPILER, expected)


def not_compiled(source: Path, why: str, package: str, expected: str) -> BuildError:
    return BuildError(
        f"the kernels in {source} do not compile: {why.strip()[-2000:]}",
        expected=expected,
        remedy=f"reinstall {package} in the version that pyproject.toml names",
    )


def _compile(source: Path, path: Path, flags: Sequence[str]) -> None:
    declared = path.with_name(declarations.FILE)
    declared.write_text(declarations.text())
    sources = [str(declared), f"-I{source}", *sorted(file.name for file in source.glob("*.c"))]
    run_compiler(source, [*flags, "-o", str(path), *sources], "a library")
