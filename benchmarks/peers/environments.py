"""Each peer's own virtual environment and converted model, kept between runs under ``~/.cache/tapeout/peers``."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.process import PeerProcess
from benchmarks.peers.systems import OURS, System
from tapeout.errors import TapeoutError

HERE = Path(__file__).parent
# The files name every package that is needed, so nothing else is resolved: optimum-intel asks for torchvision, which a
# text model never uses and whose usual build does not load beside a CPU build of torch.
PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--no-deps")
# llama.cpp is compiled for this very processor, as its own documentation advises; its image support is left out.
BUILD_OPTIONS = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF"}
BUILT_FROM_SOURCE = {"llama-cpp": ("--no-binary", "llama-cpp-python")}
LISTED = ("onnxruntime", "openvino", "optimum", "nncf", "llama", "vllm", "torch", "transformers")


class PeerError(TapeoutError):
    """A peer cannot be installed, converted or run."""


def peers_folder() -> Path:
    return Path(os.environ.get("TAPEOUT_PEERS") or Path.home() / ".cache/tapeout/peers")


def requirements(environment: str) -> Path:
    return HERE / f"requirements-{environment}.txt"


def python_of(environment: str) -> Path:
    """The interpreter a system runs with: this one for our own bundles, else the peer's."""
    return Path(sys.executable) if environment == OURS else peers_folder() / environment / "bin/python"


def install(environment: str, progress: Callable[[str], None]) -> None:
    """Install a peer's pinned requirements, once for each content of the file. :class:`PeerError` if pip fails.

    An environment whose stamp is absent is finished or repaired in place: pip skips what is already there.
    """
    pins = requirements(environment)
    folder = peers_folder() / environment
    stamp = folder / "installed.sha256"
    wanted = hashlib.sha256(pins.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    progress(f"installing {environment} into {folder}")
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin/python"), *PIP, *BUILT_FROM_SOURCE.get(environment, ()), "-r", str(pins)],
    ]
    log = peers_folder() / f"{environment}.install.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        for command in commands:
            code = subprocess.run(
                command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, **BUILD_OPTIONS}, check=False
            ).returncode
            if code:
                raise PeerError(
                    f"{' '.join(command[1:4])} for {environment} ended with {code}",
                    expected=f"the versions of {pins.name} to be installable",
                    remedy=f"read {log}",
                )
    stamp.write_text(wanted)


def versions(environment: str) -> dict[str, str]:
    """Versions of the libraries that decide the figures."""
    if environment == OURS:
        return {name: version(name) for name in ("tapeout", "onnxruntime")}
    pairs = (line.split("==") for line in requirements(environment).read_text().split() if "==" in line)
    return {name: number for name, number in pairs if name.lower().startswith(LISTED)}


def converted(
    system: System, checkpoint: Path, checkpoint_digest: str, source: Path, progress: Callable[[str], None]
) -> Path:
    """The peer's model folder, converted once for each checkpoint, set of pins and way of converting."""
    recipe = requirements(system.environment).read_text() + _conversion(system.adapter) + checkpoint_digest
    key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    folder = peers_folder() / "models" / f"{system.environment}-{system.variant}-{key}"
    if folder.is_dir():
        return folder
    progress(f"converting the model for {system.name}")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with PeerProcess(system.adapter, python_of(system.environment), log_of(system)) as process:
        process.ask(
            "prepare",
            checkpoint=str(checkpoint.resolve()),
            source=str(source.resolve()),
            folder=str(partial),
            variant=system.variant,
        )
    partial.rename(folder)
    return folder


def _conversion(adapter: str) -> str:
    """The part of an adapter that decides the converted files: its constants and ``prepare``, comments left out."""
    module = ast.parse((HERE / f"adapters/{adapter}.py").read_text())
    constants = [node for node in module.body if isinstance(node, ast.Assign)]
    methods = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "prepare"]
    return "".join(ast.dump(node) for node in (*constants, *methods))


def log_of(system: System) -> Path:
    """Where everything that a peer prints goes."""
    folder = peers_folder() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{''.join(c if c.isalnum() else '-' for c in system.name)}.log"
