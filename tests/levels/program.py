"""The small C host of tests/sanitizers with the library of any level, and how to run it: here, or under qemu-user."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import pytest

from engines.kernels.cpu import Level, compiler
from tests.sanitizers import build

# Processors of qemu with what a level needs; -cpu max has all that qemu knows.
PROCESSORS = {"aarch64-i8mm": "max", "aarch64-dotprod": "neoverse-n1", "x86-64-avx2": "max"}
WIDE = ("x86-64-amx", "x86-64-avx512vnni")  # their attention over codes rounds queries and weights to 16 bits
# Debian's packages with the C library of a machine, for others.
LIBRARIES = {"aarch64": "libc6-arm64-cross", "x86_64": "libc6-amd64-cross"}


def linked(level: Level, folder: Path, kernels: Path | None = None) -> Path:
    """The host, linked to the library that bundles get, or to another."""
    program = folder / f"{level.name}.program"
    host = [str(path) for path in build.compile_host(level, build.NONE).values()]
    target = ("-target", f"{level.machine}-linux-gnu.2.28", "-fno-sanitize=undefined", *compiler.LINKED)
    build.run(
        [*build.CC, *target, *host, str(kernels or compiler.library(level)), "-lm", "-lpthread", "-o", str(program)]
    )
    return program


def emulator(level: Level, processor: str) -> list[str]:
    """Runs a program of this level's machine on a processor of qemu. Without it a test skips, or fails in CI."""
    name, root = f"qemu-{level.machine}", Path(f"/usr/{level.machine}-linux-gnu")
    if level.machine == platform.machine():
        root = Path("/")
    if shutil.which(name) and root.is_dir():
        return [name, "-cpu", processor, "-L", str(root)]
    reason = f"no {name} or no {root} (apt-get install qemu-user {LIBRARIES[level.machine]})"
    if os.environ.get("CI") == "true":
        pytest.fail(f"continuous integration must run the kernels of {level.machine}: {reason}")
    pytest.skip(reason)


def runner(level: Level) -> list[str]:
    """Where this processor has the level, nothing."""
    if not level.refusal():
        return []
    if level.name not in PROCESSORS:
        pytest.skip(f"{level.refusal()}, and qemu has no processor for it")
    return emulator(level, PROCESSORS[level.name])
