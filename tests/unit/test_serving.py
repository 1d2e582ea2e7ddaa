"""The paths of serving evidence use every slot, batch size and position, whatever an engine's size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evals.kind import Evidence
from evals.kinds.serving import KIND, ServedItem, ServingReport, ServingSettings
from evals.kinds.serving.measure import mixed_lengths, served_items, serving, serving_metrics, windows
from runtime.wire.limits import Limits
from tapeout.artifact import ArtifactRef
from tapeout.errors import EvidenceError, RequestError
from tests.fake_engine import MACHINE, History
from tests.planted.test_pressure import END, V, answerer, decode

TEXT = [number * number % 31 for number in range(400)]
NOT_FLOAT = ("generation", "share", "reuse", "running", "joining", "resumed")
SETTINGS = ServingSettings(steps=3, answers=4, new_tokens=5)


def engines(slots: int, max_tokens: int) -> tuple[History, History, Callable[[], History]]:
    """Baseline, candidate, and what opens the candidate with another number of slots."""
    return (
        History(V, slots=slots, max_tokens=max_tokens, seed=1),
        History(V, slots=slots, max_tokens=max_tokens, seed=1, noise=0.01),
        lambda: History(V, slots=slots + 1, max_tokens=max_tokens, seed=1, noise=0.01),
    )


@pytest.mark.parametrize(("slots", "max_tokens"), [(1, 40), (2, 64), (3, 300), (5, 600), (17, 64)])
def test_a_sound_engine_is_measured_whole_and_agrees_with_itself(slots: int, max_tokens: int, tmp_path: Path) -> None:
    baseline, candidate, reopen = engines(slots, max_tokens)
    report = serving(
        SETTINGS,
        baseline,
        candidate,
        reopen,
        text=TEXT,
        draws=(),
        answerer=answerer,
        decode=decode,
        stop_tokens=[END],
        executed_on=MACHINE,
        folder=tmp_path / "serving",
        parents={},
    )
    recipe: Any = None
    found = KIND.load(report.folder, recipe)
    assert report.record == ServingReport(
        baseline=baseline.digest,
        candidate=candidate.digest,
        asked=SETTINGS,
        slots=slots,
        max_tokens=max_tokens,
        max_running=slots,
        step_tokens=256,
        draft_tokens=0,
        moved_tokens=0,
        items=len(found.items),
        draws=(),
        pressure=report.record.pressure,
        executed_on=MACHINE,
    )
    assert not any(one.wrong for one in report.record.pressure.answers)
    evidence = Evidence("b", "c", ArtifactRef("QuantizedModel", "q"), "cpu", (MACHINE,), {})
    assert KIND.problems(found, evidence) == []
    assert all(item.agree == item.tokens and item.kl_sum == item.error == item.gap == 0 for item in found.items)
    assert all((item.float_kl_sum is None) == (item.path in NOT_FLOAT) for item in found.items)
    assert any(item.float_kl_sum for item in found.items)
    assert serving_metrics(found.items)["agreement"] == 1


def test_every_length_and_the_longest_in_the_last_slot() -> None:
    for slots in (1, 3, 16, 40):
        rounds = list(mixed_lengths(slots, 2040))
        assert {length for lengths in rounds for length in lengths} >= {1, 2, 255, 256, 257, 1024, 2040}
        assert rounds[0][-1] == 2040 and all(len(lengths) == slots for lengths in rounds)


def test_every_batch_size_from_the_first_and_to_the_last_slot() -> None:
    found = list(windows(16, 8))
    assert {size for first, size in found if first == 0} == set(range(1, 17))
    assert {(16 - size, size) for size in range(1, 16)} <= set(found)


def test_logits_that_are_not_finite_are_refused() -> None:
    baseline, candidate, reopen = engines(2, 64)
    candidate.engine.table[:, 5] = float("nan")
    with pytest.raises(RequestError, match="not finite"):
        served_items(SETTINGS, baseline, candidate, reopen, TEXT)


def test_what_is_measured_by_default_is_what_the_server_runs_by_default() -> None:
    limits, settings = Limits(), ServingSettings()
    assert (limits.max_running, limits.step_tokens, limits.max_draft_tokens) == (
        settings.max_running,
        settings.step_tokens,
        settings.draft_tokens,
    )


def test_no_text_is_refused() -> None:
    with pytest.raises(EvidenceError, match="no text to serve"):
        served_items(SETTINGS, *engines(2, 64), [])


def test_an_item_holds_the_worst_of_its_positions() -> None:
    items = served_items(SETTINGS, *engines(2, 64), TEXT)
    decoded = [item for item in items if item.path == "decode"]
    assert max(item.last for item in decoded) == 63
    assert all(isinstance(item, ServedItem) and item.first <= item.last for item in items)


def test_the_candidate_is_open_once_and_the_float_engine_is_fed_several_streams_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    baseline, candidate, reopen = engines(5, 600)
    closed: list[History] = []
    for engine in (baseline, candidate):
        monkeypatch.setattr(engine, "close", lambda engine=engine: closed.append(engine))

    def when_others_are_closed() -> History:
        assert closed == [candidate, baseline]
        return reopen()

    served_items(SETTINGS, baseline, candidate, when_others_are_closed, TEXT)
    assert len(closed) == 2
    fed = baseline.engine.steps
    assert len(fed) < sum(map(len, fed)) / 2  # calls, and streams
    assert all(len(lengths) == 1 or sum(lengths) <= 600 for lengths in fed)
