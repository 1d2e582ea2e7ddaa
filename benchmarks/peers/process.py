"""Control of a peer's process: it has its own process group, answers over a pipe, and is paused while others run."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tapeout.errors import TapeoutError

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 900.0  # for one command; a conversion takes a minute, a measurement seconds


class PeerFailedError(TapeoutError):
    """The peer answered with an error, ended or did not answer in time."""


class PeerProcess:
    """One peer, which runs from the first command to the last. Between commands it can be paused (SIGSTOP).

    A paused peer uses no processor time, even if its idle threads spin, so only the peer that is timed runs.
    ``preload``: a library that is loaded before all others.
    """

    def __init__(self, adapter: str, python: Path, log: Path, threads: int = 2, *, preload: Path | None = None) -> None:
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        if preload:
            limits["LD_PRELOAD"] = str(preload)
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.adapter, self._log = adapter, log
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [str(python), "-m", f"benchmarks.peers.adapters.{adapter}"],
                cwd=ROOT,
                env={**environment, **limits, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                start_new_session=True,
            )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send one command and wait for its answer. :class:`PeerFailedError` names the peer's log."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            stdin.flush()
            line = stdout.readline() if select.select([stdout], [], [], TIMEOUT_SECONDS)[0] else None
        except BrokenPipeError:
            line = b""
        if not line:
            what = f"gave no answer in {TIMEOUT_SECONDS:.0f} s" if line is None else "ended"
            raise PeerFailedError(f"{self.adapter} {what} during the command {command}", remedy=f"read {self._log}")
        answer = json.loads(line)
        if "error" in answer:
            message = f"{self.adapter} failed in the command {command}: {answer['error']}"
            raise PeerFailedError(message, remedy=f"read {self._log}")
        return answer["ok"]

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def peak_memory_bytes(self) -> int:
        """Largest resident memory so far, summed over the process of a paused peer, its children, and the largest of
        those that have ended.

        :class:`PeerFailedError` if the peer has ended.
        """
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        peaks = [_peak_bytes(pid) for pid in (self._process.pid, *(child.pid for child in children))]
        if not peaks[0]:
            raise PeerFailedError(f"{self.adapter} ended before its memory was read", remedy=f"read {self._log}")
        self.resume()
        try:
            return sum(peaks) + self.ask("ended_children")["peak_bytes"]
        finally:
            self.pause()

    def close(self) -> None:
        self.resume()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # of a command that it ended before
            self._process.stdin.close()  # the peer ends when its input is closed
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


def _peak_bytes(pid: int) -> int:
    """Peak resident memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
