"""Texts of an evaluation that do not reach the experts of a mixture: what is wrong with these would not show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engines.load import open_probe
from evals.check import Outcome
from evals.kind import Report
from evals.kinds.parity import KIND, ParityBounds, ParityItem, ParityReport
from evals.kinds.parity.measure import parity
from tapeout import artifact
from tapeout.artifact import ArtifactRef
from tests.fake_engine import MACHINE
from tests.family_engines import Made, make, reference_of, words

FAMILY, DOCUMENTS, TOKENS, CHOSEN, EXPERTS = "qwen3_moe", 4, 24, 2, 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(FAMILY, tmp_path_factory.mktemp(FAMILY))


def measured(made: Made, folder: Path, documents: Sequence[Sequence[int]]) -> Report[ParityReport, ParityItem]:
    written = parity(
        open_probe(made.bundle, folder, threads=1),
        reference_of(made),
        documents,
        folder / "parity",
        max_tokens=TOKENS,
        head=next(group.members[0] for group in made.graph.record.groups if group.name == "lm_head"),
        candidate="a" * 64,
        built_from="b" * 64,
        executed_on=MACHINE,
        parents={},
    )
    record = artifact.load_record(written.folder, ParityReport).record
    return Report(ArtifactRef("ParityReport", "0" * 64), record, KIND.load(written.folder, None).items)  # type: ignore[arg-type]


def outcome(report: Report[ParityReport, ParityItem]) -> Outcome:
    """Of the experts that were reached. No other check fails."""
    checks = KIND.judge(report, None, ParityBounds(min_documents=DOCUMENTS)).checks  # type: ignore[arg-type]
    assert not any(check.outcome is Outcome.FAIL for check in checks)
    return next(check.outcome for check in checks if check.name == "parity_experts")


def test_a_text_that_reaches_half_of_the_experts(made: Made, tmp_path: Path) -> None:
    """A word that is repeated is the same token to every layer, and chooses the same two experts of four."""
    report = measured(made, tmp_path, [[20] * TOKENS])
    one_word = report.items[0]
    assert all(sorted(visits) == [0, 0, TOKENS, TOKENS] for visits in one_word.visits.values())
    alike = tuple(one_word.model_copy(update={"doc_hash": str(number)}) for number in range(DOCUMENTS))
    assert outcome(Report(report.ref, report.record, alike)) is Outcome.INCONCLUSIVE


def test_texts_that_reach_all_experts(made: Made, tmp_path: Path) -> None:
    report = measured(made, tmp_path, words(FAMILY, DOCUMENTS, TOKENS, 2))
    assert report.record.experts == {f"model.layers.{layer}.mlp.experts.down_proj": EXPERTS for layer in range(2)}
    for item in report.items:
        assert all(sum(visits) == CHOSEN * item.tokens for visits in item.visits.values())
    assert outcome(report) is Outcome.PASS
