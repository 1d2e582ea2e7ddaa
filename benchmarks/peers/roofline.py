"""The share of the roofline at batch 1: decode steps and reads of the memory in turns, in one process.

A step reads its weights, of experts those that one token chooses, and reads and writes the recurrent state.

A virtual machine's bandwidth may change by half within a minute (30 to 50 GB/s where nothing else ran). So a bandwidth
that was read before or after a run says little about its steps. Turns of a fraction of a second meet the same one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

from benchmarks.peers.judge import Turns
from engines.bundle import EngineBundle
from engines.costs.bandwidth import read_bandwidth
from engines.load import load
from engines.sequences import Sequences
from tapeout import artifact

TURNS = 40
STEPS = 5  # of a turn


def in_turns(folder: Path, threads: int, prompt: Sequence[int], turns: int = TURNS, level: str = "") -> Turns:
    """Decode one sequence of the bundle in ``folder``; between turns of ``STEPS`` steps read the memory.

    ``level``: of native kernels; default the best of this processor.
    """
    record = artifact.load(folder, EngineBundle).record
    with closing(Sequences(load(folder, threads=threads, slots=1, level=level))) as engine:
        chosen, length = [int(engine.prefill(0, prompt)[0].argmax())], len(prompt)
        reads, steps = [read_bandwidth(threads, trials=1)], []
        for _ in range(turns):
            seconds = []
            for _ in range(STEPS):
                start = time.perf_counter()
                chosen = engine.decode_greedy(chosen, [length]).tolist()
                seconds.append(time.perf_counter() - start)
                length += 1
            steps.append(record.decode_bytes / median(seconds))
            reads.append(read_bandwidth(threads, trials=1))
    return Turns(steps=tuple(steps), reads=tuple(map(max, itertools.pairwise(reads))))
