"""What every peer's process does: read one JSON command a line, carry it out, answer with one JSON line.

Runs inside each peer's own environment, so it needs the standard library and numpy alone. Every duration is taken here,
in the peer's process, around the peer's own calls: neither the pipe nor JSON is ever inside it.

B  rows decoded together      P  prompt tokens      S  tokens of a text      V  vocabulary size
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Decoded:
    """``steps`` steps in which each of the B rows gained one token took ``seconds`` together."""

    seconds: float
    steps: int
    tokens: list[list[int]]  # [B, new tokens], to see that the peer answers sensibly


class Peer(Protocol):
    def prepare(self, checkpoint: Path, source: Path, folder: Path, variant: str) -> None:
        """Convert the float checkpoint (Hugging Face folder; ``source``: the file it was read from) into ``folder``."""
        ...

    def load(self, folder: Path, variant: str, threads: int, rows: int, max_tokens: int) -> dict[str, Any]:
        """Open the model for up to ``rows`` sequences of ``max_tokens``; returns what the report should say of it."""
        ...

    def prefill(self, tokens: Sequence[int]) -> float:
        """Seconds from an empty cache until the first new token is chosen."""
        ...

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        """Greedy continuation of B prompts at once; the first token of each row is chosen before the clock starts."""
        ...

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits or log-probabilities ``[S, V]``: row i predicts token i + 1. KL takes either."""
        ...


def timed_steps(step: Callable[[], Sequence[int]], rows: int, steps: int) -> tuple[float, int]:
    """Seconds and number of the pure decode steps of an engine that schedules by itself.

    ``step`` runs one iteration and returns how many tokens each row has by then. An iteration counts only if every row
    had its first token before and gained exactly one: those that still read prompts, or end a row, do not.
    """
    counts: Sequence[int] = [0] * rows
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
    """Answer commands until ``close`` or the end of standard input. What libraries print goes to standard error."""
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
            answer = {"ok": _carry_out(peer, command, request)}
        except Exception as error:  # the peer's failure is an answer, told in the report; the run goes on
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    answers.flush()
    os._exit(0)  # some peers hang in their destructors


def _end_with_parent() -> None:
    """Linux kills this process when the run ends, however that was: stopped, it never sees its input close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _carry_out(peer: Peer, command: str, request: dict[str, Any]) -> Any:
    if command == "prepare":
        peer.prepare(Path(request["checkpoint"]), Path(request["source"]), Path(request["folder"]), request["variant"])
        return None
    if command == "load":
        return peer.load(
            Path(request["folder"]), request["variant"], request["threads"], request["rows"], request["max_tokens"]
        )
    if command == "prefill":
        return {"seconds": peer.prefill(request["tokens"])}
    if command == "decode":
        decoded = peer.decode(request["prompts"], request["new_tokens"])
        if decoded.steps < request["new_tokens"] * 0.9:
            raise RuntimeError(f"only {decoded.steps} of {request['new_tokens']} steps decoded all rows together")
        return {"seconds": decoded.seconds, "steps": decoded.steps, "tokens": decoded.tokens}
    if command == "logits":
        values = np.ascontiguousarray(peer.logits(request["tokens"]), np.float32)
        np.save(request["file"], values)
        return {"shape": list(values.shape)}
    raise ValueError(f"unknown command {command!r}")
