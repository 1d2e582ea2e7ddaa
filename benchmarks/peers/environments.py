"""The virtual environment and the converted model of each peer, kept between runs in ``~/.cache/tapeout/peers``."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.process import PeerProcess
from benchmarks.peers.systems import OURS, System
from tapeout.errors import TapeoutError

HERE = Path(__file__).parent
# The requirements files list every package that is needed, so pip resolves no dependencies. optimum-intel requires
# torchvision, which a text model never uses, and whose usual build does not load with a CPU build of torch.
PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--no-deps")
LIMITS = "see docs/benchmarks/peers.md"
FOR_AVX2 = "-avx2"  # ends the name of an environment that is compiled for AVX2
# llama.cpp is compiled, for this processor, as its documentation recommends, or for AVX2; without image support.
COMPILED = {
    "llama-cpp": "-DGGML_NATIVE=ON",
    f"llama-cpp{FOR_AVX2}": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON",
}
BUILT_FROM_SOURCE = ("--no-binary", "llama-cpp-python")
# Peers that the user builds; the variable names the folder of the build.
EXTERNAL = {"ik-llama": "TAPEOUT_IK_LLAMA"}
REPORTED = ("onnxruntime", "openvino", "optimum", "nncf", "llama", "vllm", "torch", "transformers")


class PeerError(TapeoutError):
    """A peer cannot be installed, converted or run."""


def peers_folder() -> Path:
    return Path(os.environ.get("TAPEOUT_PEERS") or Path.home() / ".cache/tapeout/peers")


def requirements(environment: str) -> Path:
    return HERE / f"requirements-{environment.removesuffix(FOR_AVX2)}.txt"


def limited(system: System) -> System:
    """The same peer, compiled for AVX2 where it is compiled when it is installed."""
    name = f"{system.environment}{FOR_AVX2}"
    return replace(system, environment=name) if name in COMPILED else system


def hiding_library() -> Path:
    """``hide_features.c``, compiled: preloaded, it makes ``cpuid`` report AVX2 and nothing newer.

    :class:`PeerError` if it does not compile.
    """
    source = HERE / "hide_features.c"
    library = peers_folder() / f"hide-features-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        words = ("-m", "ziglang", "cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source))
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        if done.returncode:
            raise PeerError(f"{source} does not compile: {done.stderr[-500:]}", remedy="use Linux on x86-64")
    return library


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
            remedy=LIMITS,
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
    from_source = BUILT_FROM_SOURCE if environment in COMPILED else ()
    build_options = {"CMAKE_ARGS": f"{COMPILED.get(environment, '')} -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF"}
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin/python"), *PIP, *from_source, "-r", str(pins)],
    ]
    log = peers_folder() / f"{environment}.install.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        for command in commands:
            code = subprocess.run(
                command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, **build_options}, check=False
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
