"""The GPU benchmark's bookkeeping, on engines that need no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.run import GpuNumbers, batch_difference, page, timings
from benchmarks.peers.corpus import Corpus
from engines.protocol import FloatArray
from tests.fake_engine import History

ROOT = Path(__file__).parents[2]
CORPUS = Corpus(prompts=((3, 4, 5, 6), (7, 8, 9)), long_prompts={8: (tuple(range(3, 11)),)}, documents=())


def numbers(**changes: object) -> GpuNumbers:
    record = GpuNumbers(
        folder="artifacts/targets/fp8/tensorrt-rtx-sm89",
        digest="0" * 64,
        precision="fp8",
        capability="sm89",
        engine_mb=151.0,
        open_s=(3.0, 0.5),
        kl=0.045,
        top_token=0.91,
        perplexity_ratio=1.05,
        portable_kl=0.046,
        batch_difference=1e-3,
        prefill_ms={128: 4.0},
        decode_ms={1: 1.0, 16: 2.0},
    )
    return record.model_copy(update=changes)


def test_engines_take_turns_at_every_batch_size_they_have() -> None:
    engines = [History(seed=seed) for seed in (1, 2)]
    messages: list[str] = []
    first, second = timings(engines, [[1, 3], [1]], CORPUS, rounds=2, new_tokens=2, progress=messages.append)
    assert [sorted(times) for times in first] == [[8], [1, 3]] and [sorted(times) for times in second] == [[8], [1]]
    assert all(ms > 0 for times in (*first, *second) for ms in times.values())
    assert messages == ["round 1 of 2", "round 2 of 2"]
    assert engines[0].engine.steps.count([8]) == 4  # per round: one untimed, one timed


def test_logits_that_depend_on_the_batch_are_found() -> None:
    class Leaky(History):
        def decode(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> FloatArray:
            logits = super().decode(tokens, lengths, first_slot=first_slot)
            return logits + np.float32(0.5 * (len(logits) - 1))

    assert batch_difference(History(), CORPUS.prompts) == 0
    assert batch_difference(Leaky(), CORPUS.prompts) > 0.01


@pytest.mark.parametrize(
    ("kl", "portable", "expected"),
    [(0.045, 0.046, True), (0.001, 1e-6, True), (0.3, 0.046, False), (0.004, 1e-6, False), (0.1, None, None)],
)
def test_an_engine_is_compared_with_its_lowered_graph(kl: float, portable: float | None, expected: bool | None) -> None:
    assert numbers(kl=kl, portable_kl=portable).as_predicted is expected


def test_the_page_shows_speeds_and_differences() -> None:
    text = page([numbers(), numbers(precision="int4", kl=0.5)], rounds=5, documents=8)
    assert "32,000 at 128 tokens" in text and "1,000 at batch 1, 8,000 at batch 16" in text
    assert text.count("**differs**") == 1 and text.startswith("# Engines on sm89")


def test_a_missing_bundle_is_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.run", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "record.json" in done.stderr and "Traceback" not in done.stderr
