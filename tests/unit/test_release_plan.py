"""Which bundle a conversation gets while one takes the place of another, and when a canary has shown enough."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from evals.check import Outcome
from evals.kinds.online.canary import CanaryBounds, Figures, judge_canary
from runtime.gateway.fleet import release
from runtime.gateway.fleet.release import (
    BundleChoice,
    PlanFile,
    ReleasePlan,
    ReleasePlanError,
    conversation_key,
    plan_path,
)

OLD, NEW = "a" * 64, "b" * 64
BOTH = {OLD, NEW}
openings = st.binary(max_size=20)


def plan(share: float) -> ReleasePlan:
    return ReleasePlan(stable=OLD, candidate=NEW, share=share, phase="canary")


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = plan_path(tmp_path / "fleet.yaml")
    plans = PlanFile(path)
    assert plans.read() is None
    plans.write(plan(0.25), None)
    assert plans.read() == plan(0.25) and [one.name for one in tmp_path.iterdir()] == ["fleet.release.json"]
    path.write_text("{}")
    with pytest.raises(ReleasePlanError, match="is no release plan"):
        plans.read()
    with pytest.raises(ValidationError):
        ReleasePlan(stable=OLD, share=1.5, phase="canary")


@given(openings, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_only_adds_conversations(opening: bytes, one: float, other: float) -> None:
    key, (low, high) = conversation_key(opening), sorted([one, other])
    if plan(low).drawn(key) == NEW:
        assert plan(high).drawn(key) == NEW
    assert plan(0.0).drawn(key) == OLD and plan(1.0).drawn(key) == NEW


def test_the_share_is_that_of_conversations() -> None:
    drawn = [plan(0.1).drawn(conversation_key(str(n).encode())) for n in range(10_000)]
    assert 900 < drawn.count(NEW) < 1100


@given(openings, st.floats(0, 1), st.lists(st.floats(0, 1), max_size=5))
def test_a_conversation_stays_while_its_bundle_has_engines(opening: bytes, first: float, later: list[float]) -> None:
    """Planted: each turn drawn anew."""
    choice = BundleChoice()
    begun = choice.choose(opening, plan(first), OLD, BOTH, BOTH)
    assert {choice.choose(opening, plan(share), OLD, BOTH, BOTH) for share in later} <= {begun}
    other = (BOTH - {begun}).pop()
    assert choice.choose(opening, plan(first), OLD, {other}, BOTH) == other, "none is ready: another one answers"
    assert choice.choose(opening, plan(first), OLD, BOTH, BOTH) == begun, "and it was back in time"
    assert choice.choose(opening, plan(first), OLD, set(), BOTH) == begun, "nobody is ready: it waits"
    assert choice.choose(opening, plan(first), OLD, {other}, {other}) == other, "it has no engines any more"
    assert choice.choose(opening, plan(first), OLD, BOTH, BOTH) == other


def test_without_a_plan_there_is_one_bundle() -> None:
    assert {BundleChoice().choose(bytes([n]), None, OLD, {OLD}, {OLD}) for n in range(99)} == {OLD}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "KEPT_CONVERSATIONS", 10)
    choice = BundleChoice()
    for number in range(100):
        choice.choose(str(number).encode(), plan(1.0), OLD, BOTH, BOTH)
    assert len(choice._kept) == 10  # pyright: ignore[reportPrivateUsage]
    assert choice.choose(b"99", plan(0.0), OLD, BOTH, BOTH) == NEW, "the latest are kept"
    assert choice.choose(b"0", plan(0.0), OLD, BOTH, BOTH) == OLD


def figures(calls: int, failed: int = 0, slow: int = 0) -> Figures:
    return Figures(calls=calls, failed=failed, first_tokens=(0, calls - failed - slow, slow))


@pytest.mark.parametrize(
    ("candidate", "outcome", "said"),
    [
        (figures(400), Outcome.PASS, "0 failed, 0 slow"),
        (figures(400, slow=20), Outcome.PASS, "20 slow"),
        (figures(50), Outcome.INCONCLUSIVE, "at least 100 of each"),
        (figures(0), Outcome.INCONCLUSIVE, "at least 100 of each"),
        (figures(110), Outcome.INCONCLUSIVE, "not yet decided: 0 of 110 calls of the candidate failed"),
        (figures(400, failed=40), Outcome.FAIL, "40 of 400 calls of the candidate failed"),
        (figures(20, failed=20), Outcome.FAIL, "20 of 20 calls of the candidate failed"),
        (figures(400, slow=200), Outcome.FAIL, "200 of 400 calls of the candidate are slow"),
        (figures(400, slow=80), Outcome.INCONCLUSIVE, "80 of 400 calls of the candidate are slow"),
    ],
)
def test_a_canary_is_judged_by_what_users_got(candidate: Figures, outcome: Outcome, said: str) -> None:
    found = judge_canary(figures(4000, slow=100), candidate, CanaryBounds())
    assert found.outcome is outcome and said in found.reason


def test_a_canary_without_a_stable_bundle_beside_it_passes_nothing() -> None:
    assert judge_canary(Figures(), figures(4000), CanaryBounds()).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("stable", [figures(400, failed=400), Figures(calls=400, failed=400), figures(400, failed=301)])
def test_a_canary_is_not_slow_beside_a_stable_bundle_that_answers_nothing(stable: Figures) -> None:
    """Planted: without a first token of the stable bundle, every call of the candidate counted as slow."""
    found = judge_canary(stable, figures(4000), CanaryBounds())
    assert found.outcome is Outcome.INCONCLUSIVE
    assert f"{400 - stable.failed} calls of the stable bundle got a first token" in found.reason
