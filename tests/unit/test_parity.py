"""Parity counts every position once, by the definition of KL, blames the right linear, and refuses what it cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.protocol import FloatArray, IntArray
from evals.items import read_items
from evals.kinds.parity import KIND, ParityItem, ParityReport
from evals.kinds.parity.embedding import embedding_error
from evals.kinds.parity.measure import compare, parity, parity_metrics
from evals.text import token_hash
from tapeout import artifact
from tapeout.errors import EvidenceError
from tests.fake_engine import MACHINE

VOCAB, WIDTH = 32, 8
HEAD = "head.weight"


class TwoLayers:
    """tokens -> first -> tanh -> second -> tanh -> head, as probe and as reference; ``fault`` spoils one product."""

    def __init__(self, fault: str = "", size: float = 0.0, vocab: int = VOCAB) -> None:
        draw = np.random.default_rng(5)
        self.table = draw.standard_normal((VOCAB, WIDTH)).astype(np.float32)
        self.first = draw.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        self.second = draw.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        self.head = draw.standard_normal((WIDTH, vocab)).astype(np.float32)
        self.fault, self.size = fault, size

    def run(self, tokens: Sequence[int], given: Mapping[str, FloatArray]) -> tuple[FloatArray, dict[str, FloatArray]]:
        own: dict[str, FloatArray] = {}
        hidden = self.table[list(tokens)]
        for name, weight in (("first.weight", self.first), ("second.weight", self.second), (HEAD, self.head)):
            own[name] = hidden @ weight
            if name == self.fault:
                own[name] = own[name] * np.float32(1 + self.size)
            hidden = np.tanh(given.get(name, own[name]))
        return own[HEAD], own

    @property
    def probe(self) -> Inside:
        return Inside(self)

    def __call__(self, tokens: Sequence[int]) -> FloatArray:
        return self.run(tokens, {})[0]

    def attention_errors(self) -> dict[str, tuple[float, float]]:
        return {}

    def states(self) -> dict[str, list[FloatArray]]:
        return {}

    def choices(self) -> dict[str, IntArray]:
        return {}

    def experts(self) -> dict[str, int]:
        return {}

    def state_rounding(self, tokens: Sequence[int]) -> None:
        return None

    def embedding(self) -> FloatArray:
        return self.table

    def teacher_forced(
        self, tokens: Sequence[int], outputs: Mapping[str, FloatArray], attention: Mapping[str, FloatArray]
    ) -> tuple[FloatArray, dict[str, tuple[float, float]]]:
        logits, own = self.run(tokens, outputs)
        errors = {n: float(np.linalg.norm(own[n] - v) / np.linalg.norm(v)) for n, v in outputs.items()}
        return logits, {name: (error, error) for name, error in errors.items()}


@dataclass
class Inside:
    """The same as an engine that is probed."""

    model: TwoLayers

    def __call__(self, tokens: Sequence[int]) -> tuple[FloatArray, dict[str, FloatArray]]:
        return self.model.run(tokens, {})

    def attention(self) -> dict[str, FloatArray]:
        return {}

    def states(self) -> dict[str, FloatArray]:
        return {}

    def choices(self) -> dict[str, IntArray]:
        return {}

    def embedding(self) -> Iterator[FloatArray]:
        yield self.model.table[:5]
        yield self.model.table[5:]


def log_softmax(logits: FloatArray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=4))
def test_an_engine_agrees_with_itself_at_every_position(documents: list[list[int]]) -> None:
    items = compare(TwoLayers().probe, TwoLayers(), documents, head=HEAD)
    assert [item.doc_hash for item in items] == [token_hash(document) for document in documents]
    assert [(i.tokens, i.kl_sum, i.agree, i.worst_error) for i in items] == [(len(d), 0, len(d), 0) for d in documents]


def test_kl_is_by_definition_locked_and_free() -> None:
    document = np.random.default_rng(1).integers(0, VOCAB, 50).tolist()
    engine, reference = TwoLayers("first.weight", 0.2), TwoLayers()
    (item,) = compare(engine.probe, reference, [document], head=HEAD)
    logits, outputs = engine.probe(document)
    del outputs[HEAD]
    for expected, total in (
        (reference(document), item.free_kl_sum),
        (reference.teacher_forced(document, outputs, {})[0], item.kl_sum),
    ):
        p, q = log_softmax(expected), log_softmax(logits)
        assert total == pytest.approx((np.exp(p) * (p - q)).sum(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("fault", ["first.weight", "second.weight"])
def test_a_fault_is_blamed_on_its_linear_and_does_not_spread(fault: str) -> None:
    (item,) = compare(TwoLayers(fault, 0.01).probe, TwoLayers(), [[1, 2, 3, 4]], head=HEAD)
    assert item.worst_linear == fault
    assert item.worst_error == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert item.kl_sum == pytest.approx(0, abs=1e-6)  # the head itself is sound and starts from the given values
    assert item.free_kl_sum is not None and item.free_kl_sum > 1e-6


def test_a_fault_in_the_head_moves_the_locked_logits() -> None:
    (item,) = compare(TwoLayers(HEAD, 0.5).probe, TwoLayers(), [[1, 2, 3, 4]], head=HEAD)
    assert item.worst_error == 0
    assert item.kl_sum > 0.01


def test_the_report_names_both_sides_and_keeps_every_item(tmp_path: Path) -> None:
    engine, reference, documents = TwoLayers("first.weight", 0.1), TwoLayers(), [[1, 2, 3], [4, 5]]
    digests: dict[str, Any] = {"candidate": "cd" * 32, "built_from": "ab" * 32, "executed_on": MACHINE}
    report = parity(
        engine.probe, reference, documents, tmp_path / "parity", max_tokens=8, head=HEAD, parents={}, **digests
    )
    record = report.record
    assert (record.documents, record.vocabulary, record.max_tokens) == (3, VOCAB, 8)
    assert (record.embedding.rows, record.embedding.error, record.head.rows) == (VOCAB, 0, VOCAB)
    items = read_items(report.folder / KIND.items_file, ParityItem)
    joined = [1, 2, 3, 4, 5, 1, 2, 3]
    assert list(items[:2]) == compare(engine.probe, reference, documents, head=HEAD)
    assert list(items[2:]) == compare(engine.probe, reference, [joined], head=HEAD, free=False)
    assert parity_metrics(items)["worst_error"] == max(i.worst_error for i in items)
    assert artifact.load(tmp_path / "parity", ParityReport).digest == report.digest


def test_the_worst_embedding_is_found_in_whatever_pieces_they_come() -> None:
    expected = TwoLayers().table
    actual = expected.copy()
    actual[7] *= 1.5
    for at in (1, 7, 8, VOCAB):
        found = embedding_error((actual[:at], actual[at:]), expected)
        assert (found.rows, found.worst) == (VOCAB, 7)
        assert found.error == pytest.approx(0.5)


@pytest.mark.parametrize("rows", [[VOCAB - 1], [VOCAB, 1], [5, VOCAB], []])
def test_a_table_of_another_size_is_refused(rows: list[int]) -> None:
    pieces = [np.zeros((count, WIDTH), np.float32) for count in rows]
    with pytest.raises(EvidenceError, match=r"embeddings.* from the engine, \(32, 8\) from the reference"):
        embedding_error(pieces, TwoLayers().table)


class NotANumber(TwoLayers):
    def teacher_forced(
        self, tokens: Sequence[int], outputs: Mapping[str, FloatArray], attention: Mapping[str, FloatArray]
    ) -> tuple[FloatArray, dict[str, tuple[float, float]]]:
        logits, errors = super().teacher_forced(tokens, outputs, attention)
        logits[2, 3] = np.nan
        return logits, errors


class NotANumberInside(TwoLayers):
    """One product cannot be computed; with the engine's output in its place, the logits are sound."""

    def teacher_forced(
        self, tokens: Sequence[int], outputs: Mapping[str, FloatArray], attention: Mapping[str, FloatArray]
    ) -> tuple[FloatArray, dict[str, tuple[float, float]]]:
        logits, errors = super().teacher_forced(tokens, outputs, attention)
        return logits, {**errors, "second.weight": (np.nan, np.nan)}


class NotANumberOfAttention(TwoLayers):
    def attention_errors(self) -> dict[str, tuple[float, float]]:
        return {"second.weight": (0.0, np.inf)}


class NothingInside(TwoLayers):
    def teacher_forced(
        self, tokens: Sequence[int], outputs: Mapping[str, FloatArray], attention: Mapping[str, FloatArray]
    ) -> tuple[FloatArray, dict[str, tuple[float, float]]]:
        return super().teacher_forced(tokens, outputs, attention)[0], {}


@pytest.mark.parametrize(
    ("reference", "documents", "message"),
    [
        (TwoLayers(), [], "no documents"),
        (TwoLayers(vocab=VOCAB + 1), [[1, 2]], r"\(2, 32\) logits from the engine, \(2, 33\)"),
        (NotANumber(), [[1, 2, 3, 4]], "reference returned NaN or infinite logits at position 2"),
        (NotANumberInside(), [[1, 2, 3, 4]], r"the error of second\.weight is nan, nan at the worst"),
        (
            NotANumberOfAttention(),
            [[1, 2, 3, 4]],
            r"the error of attention before second\.weight is 0\.0, inf at the worst",
        ),
        (NothingInside(), [[1, 2, 3, 4]], "no linear to compare but the output head"),
    ],
)
def test_refuses_what_it_cannot_compare(
    reference: TwoLayers, documents: list[list[int]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EvidenceError, match=message):
        parity(
            TwoLayers().probe,
            reference,
            documents,
            tmp_path / "parity",
            max_tokens=8,
            head=HEAD,
            candidate="",
            built_from="",
            executed_on=MACHINE,
            parents={},
        )
    assert not (tmp_path / "parity").exists()
