"""Parity counts every position once, by the definition of KL, and refuses what it cannot compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.protocol import FloatArray
from evals.parity import ITEMS_FILE, compare, parity
from evals.reports import ParityItem, ParityReport, read_items
from evals.text import CHUNK_TOKENS, token_hash
from pipeline import artifact
from pipeline.errors import EvidenceError
from tests.fake_engine import HistoryEngine

VOCAB = 32


def reference_of(engine: HistoryEngine):
    return lambda tokens: np.stack([engine.logits_after(tokens[: i + 1]) for i in range(len(tokens))])


def log_softmax(logits: FloatArray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=4))
def test_an_engine_agrees_with_itself_at_every_position(documents: list[list[int]]) -> None:
    engine = HistoryEngine(VOCAB)
    items = compare(engine, reference_of(HistoryEngine(VOCAB)), documents)
    assert [item.doc_hash for item in items] == [token_hash(document) for document in documents]
    assert [(i.tokens, i.kl_sum, i.kl_max, i.agree) for i in items] == [(len(d), 0, 0, len(d)) for d in documents]


@pytest.mark.parametrize("length", [1, 5, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 30])
def test_kl_is_by_definition_across_chunks(length: int) -> None:
    document = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    reference = reference_of(HistoryEngine(VOCAB))
    noisy = HistoryEngine(VOCAB, noise=0.2, max_tokens=1024)
    (item,) = compare(noisy, reference, [document])
    p, q = log_softmax(reference(document)), log_softmax(reference_of(noisy)(document))
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    assert item.tokens == length
    assert item.kl_sum == pytest.approx(kl.sum(), rel=1e-5)
    assert item.kl_max == pytest.approx(kl.max(), rel=1e-5)
    assert item.agree == (p.argmax(1) == q.argmax(1)).sum()


def test_the_report_names_both_sides_and_keeps_every_item(tmp_path: Path) -> None:
    engine = HistoryEngine(VOCAB, noise=0.1)
    documents = [[1, 2, 3], [4, 5]]
    reference = reference_of(HistoryEngine(VOCAB))
    report = parity(engine, reference, documents, tmp_path / "parity", quantized="ab" * 32, parents={"bundle": "cd"})
    assert report.record == ParityReport(candidate=engine.digest, quantized="ab" * 32, documents=2)
    assert list(read_items(report.folder / ITEMS_FILE, ParityItem)) == compare(engine, reference, documents)
    assert artifact.load(tmp_path / "parity", ParityReport).digest == report.digest


def not_a_number(tokens: Sequence[int]) -> FloatArray:
    logits = np.zeros((len(tokens), VOCAB), np.float32)
    logits[2, 3] = np.nan
    return logits


@pytest.mark.parametrize(
    ("reference", "documents", "message"),
    [
        (reference_of(HistoryEngine(VOCAB)), [], "no documents"),
        (reference_of(HistoryEngine(VOCAB)), [[1], []], "a document of 0 tokens"),
        (reference_of(HistoryEngine(VOCAB)), [[1] * 65], "a document of 65 tokens"),
        (reference_of(HistoryEngine(VOCAB + 1)), [[1, 2]], r"\(2, 32\) logits from the engine, \(2, 33\)"),
        (lambda tokens: np.zeros((len(tokens) + 1, VOCAB), np.float32), [[1, 2]], "logits from the engine"),
        (not_a_number, [[1, 2, 3, 4]], "reference returned NaN or infinite logits at position 2"),
    ],
)
def test_refuses_what_it_cannot_compare(reference, documents: list[list[int]], message: str, tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=message):
        parity(HistoryEngine(VOCAB), reference, documents, tmp_path / "parity", quantized="", parents={})
    assert not (tmp_path / "parity").exists()
