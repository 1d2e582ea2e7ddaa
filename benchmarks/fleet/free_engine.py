"""An engine whose steps cost nothing, so that only the way of its tokens to a client is timed.

Steps end at a fixed pace. Each token is the time at which its step has ended, of the clock that all processes of a
machine share: so whoever gets it knows how long it was under way.

    python -m benchmarks.fleet.free_engine DESCRIPTOR START          # as a server starts its own engine
    python -m benchmarks.fleet.free_engine tcp:127.0.0.1:0 START     # as `tapeout engine` listens, with processes.KEY
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.fleet.processes import KEY
from engines.protocol import EngineCapabilities, Entry, Result, WholeSteps
from engines.step_inputs import NO_SLOTS
from runtime.engine import worker
from runtime.engine.opening import Opened
from runtime.wire.address import Address
from runtime.wire.messages import EngineInfo
from runtime.wire.start import EngineSettings, Start

WRAP = 1 << 31  # microseconds, after which times begin anew; also the vocabulary
MOST_TOKENS, STREAMS, BLOCK_TOKENS = 8192, 64, 64


def now() -> int:
    """Microseconds, as tokens have them."""
    return time.monotonic_ns() // 1000 % WRAP


def since(token: int) -> int:
    """Microseconds since the step of a token has ended."""
    return (now() - token) % WRAP


class FreeEngine(WholeSteps):
    """``step_seconds``: between the ends of two steps."""

    digest = "0" * 64

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds, self._due = step_seconds, time.monotonic()
        self.capabilities = EngineCapabilities(
            block_tokens=BLOCK_TOKENS,
            blocks=STREAMS * MOST_TOKENS // BLOCK_TOKENS,
            block_bytes=1,
            max_batch=STREAMS,
            max_tokens=MOST_TOKENS,
            vocab_size=WRAP,
            shares_blocks=True,
            chooses_tokens=True,
        )

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        at = time.monotonic()
        self._due = max(self._due + self._step_seconds, at)
        time.sleep(self._due - at)
        token, nothing = Result(np.array([now()])), Result()
        return [nothing if entry.positions is not None and not len(entry.positions) else token for entry in batch]

    def prepare(self, ahead: int) -> bool:
        return False

    def copy_block(self, source: int, target: int, tokens: int) -> None: ...

    def copy_state(self, source: int, target: int) -> None:
        NO_SLOTS.copy(source, target)

    def close(self) -> None: ...


def open_free(bundle: Path, _: EngineSettings) -> Opened:
    """``bundle``: the seconds of a step, in place of a folder. The name is that of its process."""
    engine = FreeEngine(float(str(bundle)))
    has = engine.capabilities
    info = EngineInfo(
        engine.digest,
        str(os.getpid()),
        has.max_tokens,
        has.vocab_size,
        has.block_tokens,
        has.blocks,
        has.block_bytes,
        weight_bytes=0,
        stop_tokens=frozenset(),
    )
    return Opened(engine, info)


def main() -> None:
    if sys.argv[1].isdigit():
        worker.main(open_free)
        return
    listener = Address.parse(sys.argv[1]).listen(KEY)
    print(Address(*listener.getsockname()[:2]), flush=True)
    worker.listen(Start.decode(sys.argv[2]), listener, KEY, open_free)


if __name__ == "__main__":
    main()
