"""The virtual environment and the converted model of each peer, kept between runs in ``~/.cache/tapeout/peers``."""

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
# The requirements files list every package that is needed, so pip resolves no dependencies. optimum-intel requires
# torchvision, which a text model never uses, and whose usual build does not load with a CPU build of torch.
PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--no-deps")
# llama.cpp is compiled for this processor, as its documentation recommends, and without image support.
BUILD_OPTIONS = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF"}
BUILT_FROM_SOURCE = {"llama-cpp": ("--no-binary", "llama-cpp-python")}
# Peers that the user builds; the variable names the folder of the build.
EXTERNAL = {"ik-llama": "TAPEOUT_IK_LLAMA"}
REPORTED = ("onnxruntime", "openvino", "optimum", "nncf", "llama", "vllm", "torch", "transformers")


class PeerError(TapeoutError):
    """A peer cannot be installed, converted or run."""


def peers_folder() -> Path:
    return Path(os.environ.get("TAPEOUT_PEERS") or Path.home() / ".cache/tapeout/peers")


def requirements(environment: str) -> Path:
    return HERE / f"requirements-{environment}.txt"


def python_of(environment: str) -> Path:
    """The interpreter of a system: the current one for our own bundles, the peer's own for a peer."""
    if environment == OURS or environment in EXTERNAL:
        return Path(sys.executable)
    return peers_folder() / environment / "bin/python"


def build_of(environment: str) -> Path:
    """The folder of a peer that the user builds. :class:`PeerError` if the variable names none."""
    variable = EXTERNAL[environment]
    folder = Path(os.environ.get(variable) or "/nonexistent")
    if not folder.is_dir():
        raise PeerError(
            f"skipped: ${variable} is {os.environ.get(variable) or 'not set'}",
            expected="the folder of a build",
            remedy="see docs/benchmarks/peers.md",
        )
    return folder.resolve()


def install(environment: str, progress: Callable[[str], None]) -> None:
    """Install a peer's pinned requirements, unless the same file was installed before. :class:`PeerError` if pip fails.

    An environment without a stamp is completed or repaired in place: pip skips packages that are already installed.
    """
    if environment in EXTERNAL:
        build_of(environment)
        return
    pins = requirements(environment)
    folder = peers_folder() / environment
    stamp = folder / "installed.sha256"
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
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
                    f"{' '.join(command[1:4])} for {environment} ended with exit code {code}",
                    expected=f"that pip can install the versions of {pins.name}",
                    remedy=f"read {log}",
                )
    stamp.write_text(digest)


def versions(environment: str) -> dict[str, str]:
    """Versions of the libraries that determine the figures."""
    if environment == OURS:
        return {name: version(name) for name in ("tapeout", "onnxruntime")}
    if environment in EXTERNAL:
        library = next(build_of(environment).rglob("libllama.so"), None)
        return {environment: hashlib.sha256(library.read_bytes()).hexdigest()[:12]} if library else {}
    pairs = (line.split("==") for line in requirements(environment).read_text().split() if "==" in line)
    return {name: number for name, number in pairs if name.lower().startswith(REPORTED)}


def converted(
    system: System, checkpoint: Path, checkpoint_digest: str, source: Path, progress: Callable[[str], None]
) -> Path:
    """The peer's model folder. It is converted again if the checkpoint, the requirements or the conversion changes."""
    inputs = (
        str(versions(system.environment))
        if system.environment in EXTERNAL
        else requirements(system.environment).read_text()
    )
    inputs += _conversion(system.adapter) + checkpoint_digest
    key = hashlib.sha256(inputs.encode()).hexdigest()[:12]
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
    """The code of an adapter that determines the converted files: its constants and ``prepare``, without comments."""
    module = ast.parse((HERE / f"adapters/{adapter}.py").read_text())
    constants = [node for node in module.body if isinstance(node, ast.Assign)]
    methods = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "prepare"]
    return "".join(ast.dump(node) for node in (*constants, *methods))


def log_of(system: System) -> Path:
    """The log file with all output of a peer."""
    folder = peers_folder() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{''.join(c if c.isalnum() else '-' for c in system.name)}.log"
