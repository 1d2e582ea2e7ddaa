"""Our own bundles, through the same loader as evaluation and serving."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.adapters.wire import Decoded, serve


class Ours:
    def prepare(self, checkpoint: Path, source: Path, folder: Path, variant: str) -> None:
        raise NotImplementedError("bundles are built by the pipeline: `dvc repro build-candidate`")

    def load(self, folder: Path, variant: str, threads: int, max_batch: int, max_tokens: int) -> dict[str, Any]:
        from engines.bundle import EngineBundle
        from engines.load import load
        from engines.sequences import Sequences
        from tapeout import artifact

        # A prompt begins from nothing, as those of the other systems do: no copy of recurrent state is kept.
        snapshots = 0 if artifact.load_record(folder, EngineBundle).record.io.slot_bytes else None
        # The variant is the level of native kernels.
        engine = load(folder, threads=threads, slots=max_batch, snapshots=snapshots, level=variant)
        self._engine = Sequences(engine, slots=max_batch)
        if self._engine.max_tokens < max_tokens:
            raise ValueError(f"{folder} has {self._engine.max_tokens} positions; {max_tokens} are needed")
        return {"digest": self._engine.digest}

    def prefill(self, tokens: Sequence[int]) -> float:
        start = time.perf_counter()
        self._engine.prefill(0, tokens).argmax()
        return time.perf_counter() - start

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        chosen = [int(self._engine.prefill(slot, prompt)[0].argmax()) for slot, prompt in enumerate(prompts)]
        lengths = [len(prompt) for prompt in prompts]
        history = [[token] for token in chosen]
        start = time.perf_counter()
        for _ in range(new_tokens):
            chosen = self._engine.decode_greedy(chosen, lengths).tolist()
            lengths = [length + 1 for length in lengths]
            for tokens, token in zip(history, chosen, strict=True):
                tokens.append(token)
        return Decoded(time.perf_counter() - start, new_tokens, history)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return self._engine.prefill(0, tokens, positions=range(len(tokens)))


if __name__ == "__main__":
    serve(Ours())
