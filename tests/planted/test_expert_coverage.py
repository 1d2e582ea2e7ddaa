"""Texts of an evaluation that do not reach the experts of a mixture: what is wrong with these would not show."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals.check import Outcome
from evals.kind import Report
from evals.kinds.parity import ParityItem, ParityReport
from tests.compared import checks_of, compared
from tests.family_engines import Made, make, words

FAMILY, DOCUMENTS, TOKENS, CHOSEN, EXPERTS = "qwen3_moe", 4, 24, 2, 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(FAMILY, tmp_path_factory.mktemp(FAMILY))


def outcome(report: Report[ParityReport, ParityItem]) -> Outcome:
    """Of the experts that were reached. No other check fails."""
    checks = checks_of(report, DOCUMENTS)
    assert not any(check.outcome is Outcome.FAIL for check in checks.values())
    return checks["parity_experts"].outcome


def test_a_text_that_reaches_half_of_the_experts(made: Made, tmp_path: Path) -> None:
    """A word that is repeated is the same token to every layer, and chooses the same two experts of four."""
    report = compared(made, tmp_path, [[20] * TOKENS], TOKENS)
    one_word = report.items[0]
    assert all(sorted(visits) == [0, 0, TOKENS, TOKENS] for visits in one_word.visits.values())
    alike = tuple(one_word.model_copy(update={"doc_hash": str(number)}) for number in range(DOCUMENTS))
    assert outcome(Report(report.ref, report.record, alike)) is Outcome.INCONCLUSIVE


def test_texts_that_reach_all_experts(made: Made, tmp_path: Path) -> None:
    report = compared(made, tmp_path, words(FAMILY, DOCUMENTS, TOKENS, 2), TOKENS)
    assert report.record.experts == {f"model.layers.{layer}.mlp.experts.down_proj": EXPERTS for layer in range(2)}
    for item in report.items:
        assert all(sum(visits) == CHOSEN * item.tokens for visits in item.visits.values())
    assert outcome(report) is Outcome.PASS
