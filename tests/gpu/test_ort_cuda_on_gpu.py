"""``ort-cuda`` engines on a GPU. Skipped without one: nothing here has run on a GPU yet.

Run it alone, in an environment with onnxruntime-gpu: ``pytest tests/gpu/test_ort_cuda_on_gpu.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engines.load import load
from engines.protocol import Entry
from engines.sequences import Sequences
from engines.targets.ort_cuda import hardware
from tapeout.schemes import Scheme
from tests.families import vocab_size
from tests.ort_cuda.bundles import cuda_bundle, rounded

pytestmark = pytest.mark.skipif(bool(hardware.refusal()[0]), reason=f"ort-cuda: {hardware.refusal()[0]}")
FAMILIES = ("llama", "llama-biases", "qwen3", "gemma2", "mistral-short-window", "gpt2", "phi")
TOKENS = 40
HALF = 1e-2  # of the largest logit
Pair = Callable[..., tuple[Sequences, Sequences]]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """The engine on the GPU, and one on the CPU with the same weights."""
    opened: list[Sequences] = []

    def get(family: str, *, quantized: bool = False, int8_cache: bool = False) -> tuple[Sequences, Sequences]:
        four, eight = (Scheme(bits=bits, group_size=32, symmetric=True) for bits in (4, 8))
        coded, decoded = rounded(family, qkv=four, o=eight, gate_up=four, down=eight) if quantized else (None, None)
        cuda_bundle(family, tmp_path / "gpu", coded, int8_cache=int8_cache)
        cuda_bundle(family, tmp_path / "cpu", decoded, int8_cache=int8_cache, target="ort-cpu")
        opened.extend(Sequences(load(tmp_path / name)) for name in ("gpu", "cpu"))
        return opened[0], opened[1]

    yield get
    for one in opened:
        one.engine.close()


def tokens_of(family: str, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab_size(family), TOKENS).tolist()


def require_close(actual: np.ndarray, expected: np.ndarray, bound: float = HALF) -> None:
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() < bound * np.abs(expected).max()


@pytest.mark.parametrize("int8_cache", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_decoded_tokens(pair: Pair, family: str, quantized: bool, int8_cache: bool) -> None:
    engine, reference = pair(family, quantized=quantized, int8_cache=int8_cache)
    bound, tokens = (4 if int8_cache else 1) * HALF, tokens_of(family)
    whole = [one.prefill(0, tokens[:30], positions=range(30)) for one in (engine, reference)]
    require_close(whole[0], whole[1], bound)
    for step in range(4):  # the first replays what was captured when the engine was opened
        decoded = [one.decode([tokens[30 + step]], [30 + step]) for one in (engine, reference)]
        require_close(decoded[0], decoded[1], bound)


def test_a_ragged_batch_in_every_bucket(pair: Pair) -> None:
    engine, reference = pair("llama")
    rows = [tokens_of("llama", seed) for seed in range(8)]
    lengths = [3, 30, 1, 17, 8, 29, 2, 22]
    for slot, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        for one in (engine, reference):
            one.prefill(slot, row[:length])
    for batch in (8, 5, 3, 2, 1, 7):
        fed = [row[n] for row, n in zip(rows, lengths, strict=True)][:batch]
        decoded = [one.decode(fed, lengths[:batch]) for one in (engine, reference)]
        require_close(decoded[0], decoded[1])
        lengths = [n + 1 if slot < batch else n for slot, n in enumerate(lengths)]


def test_a_mixed_step_and_a_neighbour_that_is_left_alone(pair: Pair) -> None:
    engine, reference = pair("qwen3")
    rows = [tokens_of("qwen3", seed) for seed in range(3)]
    results = []
    for one in (engine, reference):
        each = one.engine.capabilities.blocks // 8
        table = [range(slot * each, (slot + 1) * each) for slot in range(3)]
        one.prefill(0, rows[0][:10])
        one.prefill(1, rows[1][:20])
        entries = [Entry([rows[0][10]], 10, table[0], "logits"), Entry(rows[2][:25], 0, table[2], "logits")]
        mixed = [result.logits for result in one.engine.step(entries)]
        results.append([*mixed, one.decode([rows[1][20]], [20], first_slot=1)])
    for actual, expected in zip(*results, strict=True):
        require_close(actual, expected)


def test_a_copied_block_continues_as_its_source(pair: Pair) -> None:
    engine, _ = pair("llama")
    tokens = tokens_of("llama")
    engine.prefill(0, tokens[:20])
    expected = engine.decode([tokens[20]], [20])
    each = engine.engine.capabilities.blocks // 8
    engine.engine.copy_block(0, each, 20)
    np.testing.assert_allclose(engine.decode([tokens[20]], [20], first_slot=1), expected, atol=1e-2)


def test_the_same_step_twice_is_the_same(pair: Pair) -> None:
    engine, _ = pair("llama", quantized=True)
    tokens = tokens_of("llama")
    engine.prefill(0, tokens[:20])
    np.testing.assert_array_equal(engine.decode([tokens[20]], [20]), engine.decode([tokens[20]], [20]))
