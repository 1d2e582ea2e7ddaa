"""Builds the native kernels and a small C host with sanitizers.

The compiler is the product's own, since the kernels use its vector builtins. It instruments code, and gcc links its own
runtimes; both follow one interface.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engines.kernels.cpu import LEVELS, Level, compiler, declarations
from tests.kept import kept

HERE = Path(__file__).parent
HOST = (HERE / "runtime.c", HERE / "fuzz.c", HERE / "level.c")
CC = (sys.executable, "-m", compiler.COMPILER, "cc")
FLAGS = ("-std=c11", "-gline-tables-only", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Sanitizer:
    compiled: tuple[str, ...]
    included: Path  # before the kernels
    linked: str


MEMORY = Sanitizer(
    (
        *("-fsanitize=undefined", "-fno-sanitize-recover=all"),
        "-fno-sanitize=function",  # newer than gcc's runtime
        *("-Xclang", "-fsanitize=address"),
    ),
    HERE / "checked_intrinsics.h",
    "-fsanitize=address,undefined",
)
# Linked with objects of MEMORY.
ADDRESSES = Sanitizer(("-fno-sanitize=undefined", "-Xclang", "-fsanitize=address"), MEMORY.included, MEMORY.linked)
RACES = Sanitizer(
    ("-fno-sanitize=undefined", "-Xclang", "-fsanitize=thread"), HERE / "intrinsics.h", "-fsanitize=thread"
)
# For a library, or for a program whose allocations do not fail.
NONE = Sanitizer(
    ("-fno-sanitize=undefined", "-fPIC", "-fvisibility=hidden", "-D__real_aligned_alloc=aligned_alloc"),
    RACES.included,
    "",
)


def missing() -> str:
    """Why sanitizers cannot be linked here; empty where they can."""
    if shutil.which("gcc") is None:
        return "gcc is not installed; it links the sanitizers' runtimes (apt-get install gcc)"
    for name in ("libasan.so", "libubsan.so", "libtsan.so"):
        found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        if not Path(found.strip()).is_absolute():
            return f"gcc has no {name} (apt-get install libgcc-dev of gcc's version)"
    return ""


def require_sanitizers() -> None:
    """A missing tool fails in CI and skips elsewhere."""
    reason = missing()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"continuous integration must run the sanitizers: {reason}")
    if reason:
        pytest.skip(reason)


def compile_object(source: Path, level: Level, sanitizer: Sanitizer, *more: str, included: Path | None = None) -> Path:
    """Kept, so that each content is compiled once per machine."""
    flags = (*FLAGS, *sanitizer.compiled, *compiler.target_flags(level), *more)
    read = [source, *sorted(source.parent.glob("*.h")), *sorted(compiler.SOURCE.glob("*.h")), *sorted(HERE.glob("*.h"))]

    def write(folder: Path) -> None:
        folder.mkdir()
        header = ("-Xclang", "-include-pch", "-Xclang", str(_precompiled(included, flags))) if included else ()
        run([*CC, *flags, *header, "-c", str(source), "-o", str(folder / "object.o")])

    # Not by where the checkout lies, so that all checkouts of a machine share them.
    named = [flag.replace(str(compiler.SOURCE), "") for flag in flags]
    key = (metadata.version(compiler.COMPILER), named, included and included.name, [path.read_text() for path in read])
    return kept(f"object-{source.stem}", repr(key), write) / "object.o"


@functools.cache
def _precompiled(header: Path, flags: tuple[str, ...]) -> Path:
    """Compiled once per process: intrinsics are most of what the compiler reads for a kernel."""
    file = _folder() / f"{len(list(_folder().iterdir()))}.pch"
    run([*CC, *flags, "-x", "c-header", str(header), "-o", str(file)])
    return file


@functools.cache
def _folder() -> Path:
    folder = TemporaryDirectory(prefix="tapeout-precompiled-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def compile_kernels(
    source: Path, level: Level, only: frozenset[str] | None = None, sanitizer: Sanitizer = MEMORY
) -> dict[str, Path]:
    """Objects of the kernels by the names of their files; ``only`` some of them."""
    # What is optimized away is not checked, and unrolled loops take 20 times as long to compile. So do the functions of
    # vectors where each call of one is checked anew.
    flags = ("-O0", "-Dalways_inline=unused")
    objects = {
        path.name: compile_object(path, level, sanitizer, *flags, included=sanitizer.included)
        for path in sorted(source.glob("*.c"))
        if only is None or path.name in only
    }
    if only is not None:
        return objects
    with TemporaryDirectory() as folder:
        declared = Path(folder) / declarations.FILE
        declared.write_text(declarations.text())
        return objects | {declared.name: compile_object(declared, level, sanitizer, *flags, f"-I{compiler.SOURCE}")}


def compile_host(level: Level, sanitizer: Sanitizer = MEMORY) -> dict[str, Path]:
    """All levels of a machine share most of it."""
    least = [one for one in LEVELS if one.machine == level.machine][-1]
    flags = ("-O1", f"-I{compiler.SOURCE}")
    return {
        path.name: compile_object(path, level if path.name == "level.c" else least, sanitizer, *flags) for path in HOST
    }


def link(objects: dict[str, Path], program: Path, sanitizer: Sanitizer = MEMORY) -> Path:
    flags = (sanitizer.linked, "-Wl,--wrap=aligned_alloc", "-lm", "-lpthread")
    run(["gcc", *map(str, objects.values()), *flags, "-o", str(program)])
    return program


def library(level: Level, source: Path, changed: str, path: Path) -> Path:
    """Written to ``path``: the kernels with one file of ``source``, without sanitizers and optimizations."""
    objects = compile_kernels(compiler.SOURCE, level, sanitizer=NONE)
    objects |= compile_kernels(source, level, frozenset({changed}), NONE)
    flags = (*compiler.target_flags(level), "-fno-sanitize=undefined", "-shared", *compiler.LINKED)
    run([*CC, *flags, *map(str, objects.values()), "-o", str(path)])
    return path


def plant(folder: Path, file: str, *changes: tuple[str, str]) -> Path:
    """A copy of the sources in ``folder`` in which texts of one file, each found once, are others."""
    source = folder / "source"
    shutil.copytree(compiler.SOURCE, source)
    text = (source / file).read_text()
    for before, after in changes:
        assert text.count(before) == 1, f"{file} has {text.count(before)} times: {before}"
        text = text.replace(before, after)
    (source / file).write_text(text)
    return source


def run(command: list[str]) -> None:
    cache = {"ZIG_GLOBAL_CACHE_DIR": str(compiler.cache() / "compiler")}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | cache)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-3000:]}"
