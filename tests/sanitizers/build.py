"""Builds the native kernels and a small C host with sanitizers.

The compiler is the product's own, since the kernels use its vector builtins. It instruments code, and gcc links its own
runtimes; both follow one interface.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engines.kernels.cpu import Level, compiler, declarations
from tests.kept import kept

HERE = Path(__file__).parent
HOST = (HERE / "runtime.c", HERE / "fuzz.c")
FLAGS = ("-std=c11", "-g", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Sanitizer:
    compiled: tuple[str, ...]
    kernels: tuple[str, ...]  # for the kernels alone
    linked: str


MEMORY = Sanitizer(
    (
        *("-fsanitize=undefined", "-fno-sanitize-recover=all"),
        "-fno-sanitize=function",  # newer than gcc's runtime
        *("-Xclang", "-fsanitize=address"),
    ),
    ("-include", str(HERE / "checked_intrinsics.h")),
    "-fsanitize=address,undefined",
)
# Linked with objects of MEMORY.
ADDRESSES = Sanitizer(("-fno-sanitize=undefined", "-Xclang", "-fsanitize=address"), MEMORY.kernels, MEMORY.linked)
RACES = Sanitizer(("-fno-sanitize=undefined", "-Xclang", "-fsanitize=thread"), (), "-fsanitize=thread")


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


def compile_object(source: Path, level: Level, sanitizer: Sanitizer, *more: str) -> Path:
    """Kept, so that each content is compiled once per machine."""
    flags = (*FLAGS, *sanitizer.compiled, *compiler.target_flags(level), *more)
    read = [source, *sorted(source.parent.glob("*.h")), *sorted(compiler.SOURCE.glob("*.h")), *sorted(HERE.glob("*.h"))]

    def write(folder: Path) -> None:
        folder.mkdir()
        command = [sys.executable, "-m", compiler.COMPILER, "cc", *flags]
        run([*command, "-c", str(source), "-o", str(folder / "object.o")])

    # Not by where the checkout lies, so that all checkouts of a machine share them.
    named = [flag.replace(f"{HERE}/", "").replace(str(compiler.SOURCE), "") for flag in flags]
    key = (metadata.version(compiler.COMPILER), named, [path.read_text() for path in read])
    return kept(f"object-{source.stem}", repr(key), write) / "object.o"


def compile_kernels(
    source: Path, level: Level, only: frozenset[str] | None = None, sanitizer: Sanitizer = MEMORY
) -> dict[str, Path]:
    """Objects of the kernels by the names of their files; ``only`` some of them."""
    # -O0: what is optimized away is not checked, and the unrolled loops compile 20 times as fast
    flags = ("-O0", *sanitizer.kernels)
    objects = {
        path.name: compile_object(path, level, sanitizer, *flags)
        for path in sorted(source.glob("*.c"))
        if only is None or path.name in only
    }
    with TemporaryDirectory() as folder:
        declared = Path(folder) / declarations.FILE
        declared.write_text(declarations.text())
        included = f"-I{compiler.SOURCE}"  # only the objects of changed files are made anew
        return objects | {declared.name: compile_object(declared, level, sanitizer, *flags, included)}


def compile_host(level: Level, sanitizer: Sanitizer = MEMORY) -> dict[str, Path]:
    flags = ("-O1", f"-I{compiler.SOURCE}")
    return {path.name: compile_object(path, level, sanitizer, *flags) for path in HOST}


def link(objects: dict[str, Path], program: Path, sanitizer: Sanitizer = MEMORY) -> Path:
    flags = (sanitizer.linked, "-Wl,--wrap=aligned_alloc", "-lm", "-lpthread")
    run(["gcc", *map(str, objects.values()), *flags, "-o", str(program)])
    return program


def run(command: list[str]) -> None:
    cache = {"ZIG_GLOBAL_CACHE_DIR": str(compiler.cache() / "compiler")}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | cache)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-3000:]}"
