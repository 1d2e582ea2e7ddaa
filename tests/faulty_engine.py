"""An engine in a process of its own that crashes, hangs or fails where a test asks for it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from engines.protocol import Entry, Result
from runtime.engine import worker
from runtime.engine.opening import Opened
from runtime.wire.messages import EngineInfo
from runtime.wire.start import EngineSettings
from tapeout.errors import ArtifactError
from tapeout.file_hashes import sha256_file
from tests.fake_engine import HistoryEngine

VOCABULARY, STOP = 16, 0
FAIL, HANG, CRASH = 13, 14, 15  # tokens that are never chosen; feeding one does it
REFUSES = "refuses"  # name of a folder that cannot be opened
DIES = "dies"  # and of one whose engine opens, and crashes in its first step


WORKER = "tests.faulty_engine"  # the module that a client runs


class FaultyEngine(HistoryEngine):
    def __init__(self, bundle: Faulty) -> None:
        seed = 0 if bundle.name == DIES else int(bundle.name)
        super().__init__(
            VOCABULARY,
            slots=bundle.slots,
            max_tokens=bundle.max_tokens,
            block_tokens=bundle.block_tokens,
            seed=seed,
        )
        self.table[:, FAIL:] = -100
        self.step_seconds, self.token_seconds = bundle.step_seconds, bundle.token_seconds
        self.crash, self.dies = bundle.crash, bundle.name == DIES

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        tokens = [token for entry in batch for token in entry.tokens]
        fed = set(tokens)
        if self.crash in fed or self.dies:
            os._exit(1)
        if HANG in fed:
            time.sleep(1000)
        if FAIL in fed:
            raise RuntimeError("the engine cannot run this batch")
        time.sleep(self.step_seconds + self.token_seconds * len(tokens))
        return super().step(batch)


@dataclass(frozen=True)
class Faulty:
    """What stands for a bundle. ``name``: the seed of its weights. ``crash``: token at which the process ends."""

    name: str = "7"
    step_seconds: float = 0.002
    token_seconds: float = 0.0
    slots: int = 32
    max_tokens: int = 256
    block_tokens: int = 4
    crash: int = CRASH
    folder: str = ""  # with text files
    level: str = ""  # that it says it runs at
    cold_seconds: float = 0.0  # that it says it took to open

    def __str__(self) -> str:
        """In place of a folder."""
        return orjson.dumps(asdict(self)).decode()


def open_faulty(folder: Path, _: EngineSettings) -> Opened:
    bundle = Faulty(**orjson.loads(str(folder)))
    if bundle.name == REFUSES:
        raise ArtifactError("no record.json", expected="a bundle", remedy="build one")
    engine = FaultyEngine(bundle)
    has = engine.capabilities
    info = EngineInfo(
        engine.digest,
        bundle.name,
        has.max_tokens,
        has.vocab_size,
        has.block_tokens,
        has.blocks,
        has.block_bytes,
        weight_bytes=0,
        stop_tokens=frozenset({STOP}),
        files={path.name: sha256_file(path) for path in Path(bundle.folder).iterdir()} if bundle.folder else {},
        level=bundle.level,
        moves_blocks=True,
        cold_seconds=bundle.cold_seconds,
    )
    return Opened(engine, info, folder=Path(bundle.folder))


def alone(engine: HistoryEngine, prompt: Sequence[int], new: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """The greedy answer of a request that has the engine for itself, its stop token included."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(engine.logits_after(tokens).argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


if __name__ == "__main__":
    worker.main(open_faulty)
