"""Builds the kernels for GPUs as a library of fibers, without optimizations: plainly, or with sanitizers."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from engines.kernels.cuda import compiler
from tests.kept import kept
from tests.sanitizers.build import MEMORY, run

# Kernels are large: optimizing their checks takes minutes, and so does checking each call of a small function anew.
FLAGS = (*compiler.HOST_FLAGS, "-gline-tables-only", "-O0", "-Dalways_inline=unused", "-fPIC")
PLAIN = ("-fno-sanitize=undefined",)


def library(source: Path, path: Path, *, sanitized: bool) -> Path:
    """Written to ``path``."""
    objects = [str(_object(file, sanitized)) for file in compiler.host_sources(source)]
    linked = (MEMORY.linked,) if sanitized else ()
    run(["gcc", "-shared", *objects, *linked, "-lm", *compiler.LINKED, "-o", str(path)])
    return path


def runtimes() -> str:
    """Libraries that a process must have loaded before it loads a sanitized one."""
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return ":".join(found)


def _object(file: Path, sanitized: bool) -> Path:
    """Kept, so that each content is compiled once per machine."""
    flags = (*FLAGS, *(MEMORY.compiled if sanitized else PLAIN), *compiler.host_target_flags())
    read = [file, *sorted([*file.parent.glob("*.*h"), *file.parent.glob("*.hpp")])]

    def write(folder: Path) -> None:
        folder.mkdir()
        command = [sys.executable, "-m", compiler.compiler.COMPILER, "cc", *flags]
        run([*command, "-c", str(file), "-o", str(folder / "object.o")])

    key = (metadata.version(compiler.compiler.COMPILER), flags, [path.read_text() for path in read])
    return kept(f"cuda-{file.stem}", repr(key), write) / "object.o"
