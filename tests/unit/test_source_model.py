"""The checkpoint's own model: several texts at once, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals.source import SourceLM
from pipeline.export import source_model
from pipeline.export.source_model import CheckpointModel
from tapeout.errors import EvidenceError

TEXTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [3] * 9]
LAST = [2, 1, 3, 4]


@pytest.mark.parametrize(
    ("rows", "together"),
    [
        (1, [1, 1, 1, 1]),  # one text may have more than the bound
        (9, [3, 1]),  # the first three want positions 1 to 3, which are computed of each
        (10**6, [4]),
    ],
)
def test_logits_that_are_computed_together_are_bounded(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, together: list[int]
) -> None:
    model = CheckpointModel(tiny_checkpoint, "", tmp_path, adapter=None, positions=64)
    whole = [model(text) for text in TEXTS]
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


def test_an_answer_that_is_longer_than_the_engines_have_positions_is_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    model = CheckpointModel(tiny_checkpoint, "", tmp_path, adapter=None, positions=64)
    lm = SourceLM(model, None, max_tokens=4)
    assert len(lm._loglikelihood_tokens([(None, [1, 2], [3] * 4)])) == 1  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(EvidenceError, match="5 continuation tokens"):
        lm._loglikelihood_tokens([(None, [1, 2], [3] * 5)])  # pyright: ignore[reportPrivateUsage]
