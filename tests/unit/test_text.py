from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.kinds.text import text_items
from evals.text import CHUNK_TOKENS, compare, kl_divergences, log_likelihoods, token_hash
from tapeout.errors import EvidenceError, RequestError
from tests.fake_engine import History


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("scale", [0.01, 3.0, 200.0])
@pytest.mark.parametrize("rows", [1, 4, 11])
def test_kl_and_likelihood_match_float64(scale: float, rows: int) -> None:
    rng = np.random.default_rng(rows)
    baseline = (scale * rng.normal(size=(rows, 5000))).astype(np.float32)
    candidate = baseline + (0.1 * rng.normal(size=baseline.shape)).astype(np.float32)
    targets = rng.integers(5000, size=rows).tolist()
    p, q = _log_softmax(baseline), _log_softmax(candidate)
    np.testing.assert_allclose(kl_divergences(baseline, candidate), (np.exp(p) * (p - q)).sum(axis=1), atol=2e-6)
    np.testing.assert_allclose(log_likelihoods(baseline, targets), p[range(rows), targets], rtol=1e-6, atol=1e-6)


def test_kl_of_equal_rows_is_zero_and_survives_large_offsets() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 100)).astype(np.float32)
    assert kl_divergences(logits, logits).tolist() == [0.0] * 5
    assert kl_divergences(logits, logits + np.float32(1024)).max() < 1e-4  # a shift changes no probability


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 31), min_size=2, max_size=40), st.data())
def test_compare_predicts_each_position_from_its_own_history(tokens: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(tokens) - 1))
    left, right = History(noise=0.0), History(noise=0.3)
    result = compare(left, right, tokens, first=first)
    base = np.stack([left.engine.logits_after(tokens[:i]) for i in range(first, len(tokens))])
    other = np.stack([right.engine.logits_after(tokens[:i]) for i in range(first, len(tokens))])
    assert len(result.kl) == len(tokens) - first
    np.testing.assert_allclose(result.kl, kl_divergences(base, other))
    np.testing.assert_allclose(result.candidate_nll, -log_likelihoods(other, tokens[first:]))
    assert result.agree.tolist() == (base.argmax(axis=1) == other.argmax(axis=1)).tolist()


@pytest.mark.parametrize("first", [1, 200, CHUNK_TOKENS + 50])
def test_long_documents_are_fed_in_pieces_with_the_same_result(first: int) -> None:
    tokens = np.random.default_rng(1).integers(32, size=2 * CHUNK_TOKENS + 30).tolist()
    left, right = History(max_tokens=1000), History(max_tokens=1000, noise=0.2)
    result = compare(left, right, tokens, first=first)
    assert len(left.engine.steps) > 1
    want = [left.engine.logits_after(tokens[:i]) for i in range(first, len(tokens))]
    np.testing.assert_allclose(result.baseline_nll, -log_likelihoods(np.stack(want), tokens[first:]))


def test_an_engine_agrees_with_itself() -> None:
    (item,) = text_items(History(), History(), [[1, 2, 3, 4]])
    assert (item.tokens, item.agree, item.kl_sum, item.kl_max) == (3, 3, 0.0, 0.0)
    assert item.baseline_nll == item.candidate_nll > 0
    assert item.doc_hash == token_hash([1, 2, 3, 4]) != token_hash([1, 2, 34])


@pytest.mark.parametrize("document", [[], [7]])
def test_documents_with_nothing_to_predict_are_refused(document: list[int]) -> None:
    with pytest.raises(EvidenceError, match="document 1"):
        text_items(History(), History(), [[1, 2], document])


def test_documents_that_do_not_fit_are_refused() -> None:
    engine = History(max_tokens=8)
    assert len(compare(engine, engine, [1] * 9).kl) == 8
    with pytest.raises(EvidenceError, match="10 tokens"):
        compare(engine, engine, [1] * 10)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_logits_are_refused(poison: float, side: int) -> None:
    engines = History(), History()
    engines[side].engine.table[:, 5] = poison
    with pytest.raises(RequestError, match="not finite"):
        compare(*engines, [1, 2, 3])


def test_engines_of_different_vocabularies_are_refused() -> None:
    with pytest.raises(EvidenceError, match="candidate logits"):
        compare(History(32), History(33), [1, 2, 3])
