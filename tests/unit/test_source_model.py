"""The checkpoint's own model: several texts at once, and long ones in parts, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals.kinds.source.measure import SourceLM, source_item
from pipeline.export import source_model
from pipeline.export.source_model import CheckpointModel
from tapeout.errors import EvidenceError
from tests.fake_engine import History
from tests.families import FAMILIES, random_model, save_checkpoint

TEXTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [3] * 9]
LAST = [2, 1, 3, 4]


@pytest.mark.parametrize(
    ("rows", "together"),
    [
        (1, [1, 1, 1, 1]),  # what is wanted of one text may have more than the bound
        (9, [3, 1]),  # the first three want positions 1 to 3, which are computed of each
        (10**6, [4]),
    ],
)
def test_logits_that_are_computed_together_are_bounded(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, together: list[int]
) -> None:
    model = CheckpointModel(tiny_checkpoint, "", tmp_path, adapter=None, positions=64)
    whole = [np.concatenate(list(model.parts(text))) for text in TEXTS]
    assert [len(logits) for logits in whole] == [3, 4, 4, 9]
    monkeypatch.setattr(source_model, "LOGIT_BYTES", 4 * rows * whole[0].shape[1])
    forward, computed = model._model.forward, list[tuple[int, ...]]()  # pyright: ignore[reportPrivateUsage]

    def watched(**given: Any) -> Any:
        output = forward(**given)
        computed.append(tuple(output.logits.shape))
        return output

    monkeypatch.setattr(model._model, "forward", watched)  # pyright: ignore[reportPrivateUsage]
    found = model.batch(TEXTS, LAST)
    assert [shape[0] for shape in computed] == together
    assert all(np.prod(shape[:2]) <= rows for shape in computed if shape[0] > 1)
    for logits, expected, count in zip(found, whole, LAST, strict=True):
        np.testing.assert_allclose(logits, expected[-count:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "phi3-longrope"])
def test_a_long_text_comes_in_parts_that_know_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """With sliding windows too. Planted: parts that do not see those before."""
    checkpoint = save_checkpoint(random_model(family), tmp_path / "checkpoint")
    model = CheckpointModel(checkpoint, "", tmp_path, adapter=None, positions=64)
    tokens = np.random.default_rng(0).integers(3, 90, 50).tolist()
    (whole,) = model.parts(tokens)
    for rows, lengths in ((50, [50]), (20, [20, 20, 10]), (7, [7] * 7 + [1])):
        monkeypatch.setattr(source_model, "LOGIT_BYTES", 4 * rows * whole.shape[1])
        parts = list(model.parts(tokens))
        assert [len(part) for part in parts] == lengths
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-4, atol=1e-4)


def test_an_answer_that_is_longer_than_the_engines_have_positions_is_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    model = CheckpointModel(tiny_checkpoint, "", tmp_path, adapter=None, positions=64)
    lm = SourceLM(model, None, max_tokens=4)
    assert len(lm._loglikelihood_tokens([(None, [1, 2], [3] * 4)])) == 1  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(EvidenceError, match="5 continuation tokens"):
        lm._loglikelihood_tokens([(None, [1, 2], [3] * 5)])  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("missing", "vocabulary", "found"), [(1, 32, "after 8 of 9 tokens"), (0, 31, "31 logits after each token")]
)
def test_logits_that_are_not_those_of_the_whole_text_are_refused(missing: int, vocabulary: int, found: str) -> None:
    class Wrong:
        def parts(self, tokens: list[int]) -> list[Any]:
            return [np.zeros((len(tokens) - missing, vocabulary), np.float32)]

    model: Any = Wrong()
    with pytest.raises(EvidenceError, match=found):
        source_item(model, History(), History(), "document", list(range(10)))
