"""An engine in a process of its own that crashes, hangs or fails where a test asks for it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.protocol import Entry, Result
from runtime.engine.opening import Opened
from runtime.wire.messages import EngineInfo
from tapeout.errors import ArtifactError
from tests.fake_engine import HistoryEngine

VOCABULARY, STOP = 16, 0
FAIL, HANG, CRASH = 13, 14, 15  # tokens that are never chosen; feeding one does it
REFUSES = "refuses"  # name of a folder that cannot be opened
DIES = "dies"  # and of one whose engine opens, and crashes in its first step


class FaultyEngine(HistoryEngine):
    def __init__(self, opener: OpenFaulty, seed: int) -> None:
        super().__init__(
            VOCABULARY,
            slots=opener.slots,
            max_tokens=opener.max_tokens,
            block_tokens=opener.block_tokens,
            seed=seed,
        )
        self.table[:, FAIL:] = -100
        self.step_seconds, self.crash, self.dies = opener.step_seconds, opener.crash, False

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        fed = {token for entry in batch for token in entry.tokens}
        if self.crash in fed or self.dies:
            os._exit(1)
        if HANG in fed:
            time.sleep(1000)
        if FAIL in fed:
            raise RuntimeError("the engine cannot run this batch")
        time.sleep(self.step_seconds)
        return super().step(batch)


@dataclass(frozen=True)
class OpenFaulty:
    """The folder's name is the seed of the engine's weights. ``crash``: token at which the process ends."""

    step_seconds: float = 0.002
    slots: int = 32
    max_tokens: int = 256
    block_tokens: int = 4
    crash: int = CRASH

    def engine(self, folder: Path) -> FaultyEngine:
        engine = FaultyEngine(self, 0 if folder.name == DIES else int(folder.name))
        engine.dies = folder.name == DIES
        return engine

    def __call__(self, folder: Path) -> Opened:
        if folder.name == REFUSES:
            raise ArtifactError("no record.json", expected="a bundle", remedy="build one")
        engine = self.engine(folder)
        has = engine.capabilities
        info = EngineInfo(
            engine.digest,
            folder.name,
            has.max_tokens,
            has.vocab_size,
            has.block_tokens,
            has.blocks,
            has.block_bytes,
            weight_bytes=0,
            stop_tokens=frozenset({STOP}),
        )
        return Opened(engine, info)


def alone(engine: HistoryEngine, prompt: Sequence[int], new: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """The greedy answer of a request that has the engine for itself, its stop token included."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(engine.logits_after(tokens).argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]
