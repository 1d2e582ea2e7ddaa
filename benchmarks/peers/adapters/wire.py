"""The loop of every peer's process: read a command as one line of JSON, execute it, write the answer as one line.

It runs inside each peer's own environment, so it imports only the standard library and numpy. Every duration is
measured here, in the peer's process, around the peer's own calls. It never includes the pipe or JSON.

B  batch size      S  tokens of a text      V  vocabulary size
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy._core._multiarray_umath import __cpu_features__
from numpy.typing import NDArray

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Decoded:
    """``seconds``: total time of ``steps`` steps in which each of the B sequences gained one token."""

    seconds: float
    steps: int
    tokens: list[list[int]]  # [B, new tokens], to check that the peer's text makes sense


class Peer(Protocol):
    def prepare(self, checkpoint: Path, source: Path, folder: Path, variant: str) -> None:
        """Convert the float ``checkpoint``, a Hugging Face folder, into ``folder``. ``source``: the original file."""
        ...

    def load(self, folder: Path, variant: str, threads: int, max_batch: int, max_tokens: int) -> dict[str, Any]:
        """Open the model for up to ``max_batch`` sequences of ``max_tokens``. Returns facts for the report.

        ``avx512``, of an engine that was compiled for a processor: whether its code has AVX-512.
        """
        ...

    def prefill(self, tokens: Sequence[int]) -> float:
        """Seconds from an empty cache until the first new token is chosen."""
        ...

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        """Greedy continuation of a batch of B prompts. Each first token is chosen before the time starts."""
        ...

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits or log-probabilities ``[S, V]``: entry i predicts token i + 1. KL is the same for both."""
        ...


def timed_steps(step: Callable[[], Sequence[int]], batch: int, steps: int) -> tuple[float, int]:
    """Total seconds and number of the pure decode steps of an engine with its own scheduler.

    ``step`` runs one iteration and returns the number of new tokens of each sequence so far. An iteration counts only
    if every sequence had its first token before it and gained exactly one token in it. So iterations with prefill, or
    in which a sequence gains no token, do not count.
    """
    counts: Sequence[int] = [0] * batch
    seconds, counted = 0.0, 0
    while min(counts) < steps + 1:
        start = time.perf_counter()
        after = step()
        elapsed = time.perf_counter() - start
        if min(counts) >= 1 and all(new == old + 1 for new, old in zip(after, counts, strict=True)):
            seconds, counted = seconds + elapsed, counted + 1
        counts = list(after)
    return seconds, counted


def file_bytes(folder: Path, *patterns: str) -> int:
    return sum(path.stat().st_size for pattern in patterns for path in folder.glob(pattern))


def serve(peer: Peer) -> None:
    """Answer commands until ``close`` or the end of standard input. Output of libraries goes to standard error."""
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        command = request.pop("command")
        if command == "close":
            break
        try:
            answer = {"ok": _execute(peer, command, request)}
        except Exception as error:  # a failure of the peer is an answer, which the report shows; the run continues
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    answers.flush()
    os._exit(0)  # some peers hang in their destructors


def _end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends. A paused process cannot see that its input was closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _execute(peer: Peer, command: str, request: dict[str, Any]) -> Any:
    if command == "prepare":
        peer.prepare(Path(request["checkpoint"]), Path(request["source"]), Path(request["folder"]), request["variant"])
        return None
    if command == "load":
        facts = peer.load(
            Path(request["folder"]), request["variant"], request["threads"], request["max_batch"], request["max_tokens"]
        )
        return {"avx512": __cpu_features__["AVX512F"], **facts}  # what a library that asks the processor sees
    if command == "prefill":
        return {"seconds": peer.prefill(request["tokens"])}
    if command == "decode":
        decoded = peer.decode(request["prompts"], request["new_tokens"])
        if decoded.steps < request["new_tokens"] * 0.9:
            raise RuntimeError(f"only {decoded.steps} of {request['new_tokens']} steps decoded the whole batch")
        return {"seconds": decoded.seconds, "steps": decoded.steps, "tokens": decoded.tokens}
    if command == "ended_children":
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10}
    if command == "logits":
        values = np.ascontiguousarray(peer.logits(request["tokens"]), np.float32)
        np.save(request["file"], values)
        return {"shape": list(values.shape)}
    raise ValueError(f"unknown command {command!r}")
