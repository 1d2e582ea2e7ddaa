"""The kept logits of an engine: what another engine's are compared with."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import FloatArray
from evals.kinds.parity.reference_logits import KEPT_TOKENS, LevelItem, ReferenceLogits
from evals.text import kl_divergences
from tapeout.errors import EvidenceError

VOCABULARY = 300


def logits(seed: int, count: int, scale: float = 3.0) -> FloatArray:
    return (scale * np.random.default_rng(seed).normal(size=(count, VOCABULARY))).astype(np.float32)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 99), st.floats(0, 1))
def test_the_divergence_is_at_most_that_of_the_whole_vocabulary(lengths: list[int], seed: int, noise: float) -> None:
    """Tokens that count as one cannot add to it; with few tokens left over it is nearly all."""
    reference = ReferenceLogits()
    for number, count in enumerate(lengths):
        reference.add(list(range(count)), logits(seed + number, count))
    for number, count in enumerate(lengths):
        own = logits(seed + number, count)
        other = (own + np.float32(noise) * logits(seed + 77, count, 1.0)).astype(np.float32)
        item = reference.compare(number, [other])
        whole = kl_divergences(own, other)
        assert item.kl_sum <= whole.sum() + 1e-4 * count
        assert item.kl_sum >= 0.4 * whole.sum() - 1e-4 * count
        assert item.agree == (own.argmax(axis=1) == other.argmax(axis=1)).sum()


def test_what_is_kept_is_read_back(tmp_path: Path) -> None:
    reference = ReferenceLogits()
    reference.add([5, 6, 7], logits(1, 3))
    reference.add([8], logits(2, 1))
    reference.save(tmp_path / "kept.npz")
    again = ReferenceLogits.load(tmp_path / "kept.npz")
    assert again.documents == [[5, 6, 7], [8]] and again.ids[0].shape == (3, KEPT_TOKENS)
    assert again.compare(0, [logits(1, 3)]) == reference.compare(0, [logits(1, 3)])
    same = again.compare(1, [logits(2, 1)])
    assert same.kl_sum == pytest.approx(0, abs=1e-6) and same.agree == same.tokens == 1


def test_blocks_and_chunks_give_the_same_as_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = logits(1, 11), logits(2, 11)
    found: list[tuple[ReferenceLogits, LevelItem]] = []
    for rows, chunks in ((100, [other]), (4, [other[:5], other[5:6], other[6:]]), (3, iter(np.split(other, 11)))):
        monkeypatch.setattr("evals.text.BLOCK_ROWS", rows)
        reference = ReferenceLogits()
        reference.add(range(11), own)
        found.append((reference, reference.compare(0, chunks)))
    for reference, item in found[1:]:
        np.testing.assert_array_equal(reference.ids[0], found[0][0].ids[0])
        np.testing.assert_array_equal(reference.logprobs[0], found[0][0].logprobs[0])
        assert item == found[0][1]


def test_memory_does_not_grow_with_the_document() -> None:
    """Beside the logits: what is kept, and one block."""
    own = np.tile(logits(1, 64), (8, 20))
    tracemalloc.start()
    try:
        reference = ReferenceLogits()
        reference.add(range(len(own)), own)
        reference.compare(0, [own])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < own.nbytes / 4


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda rows: [rows[:2]], "2 rows of logits for 3 tokens"),
        (lambda rows: [rows, rows[:1]], "more than 3 rows"),
        (lambda rows: [rows[:1], np.where(rows[1:] == rows[2, 0], np.nan, rows[1:])], "infinite logits at position 2"),
    ],
    ids=["too few", "too many", "NaN"],
)
def test_logits_that_cannot_be_compared_are_refused(
    spoil: Callable[[FloatArray], list[FloatArray]], found: str
) -> None:
    reference = ReferenceLogits()
    reference.add([5, 6, 7], logits(1, 3))
    with pytest.raises(EvidenceError, match=found):
        reference.compare(0, spoil(logits(1, 3)))
