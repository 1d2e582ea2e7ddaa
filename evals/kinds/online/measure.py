"""Evidence from live traffic: does a challenger answer as the champion does? Stage-less; `tapeout shadow-verdict`.

A server mirrors a share of its calls to the challenger (``runtime/gateway/operations/shadow.py``), which scores the
champion's own answers. The unit is one conversation, its value the share of tokens where the engines' likeliest tokens
differ, as in the gate's ``shadow_agreement``. The test (``sequential.py``) may be looked at after every conversation.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from engines.bundle import EngineBundle
from evals.check import Outcome
from evals.kinds.online import OnlineVerdict
from evals.kinds.online.sequential import AnytimeTest
from evals.statistics import bounded_mean
from tapeout.artifact import Artifact, ArtifactRef, create, load
from tapeout.errors import EvidenceError
from tapeout.observations import (
    OBSERVATIONS_FILE,
    PLAN_FILE,
    Observation,
    Observations,
    ShadowPlan,
    read_observations,
    read_plan,
)


def fold(plan: ShadowPlan, observations: Iterable[Observation]) -> AnytimeTest:
    """The state of the test after these observations, in their order."""
    test = AnytimeTest(plan.max_disagreement, plan.confidence)
    for observation in observations:
        test = test.after(observation.disagreement)
    return test


def judge(plan: ShadowPlan, found: Observations) -> OnlineVerdict:
    """PASS, FAIL, or INCONCLUSIVE and why. Missing conversations never pass."""
    test = fold(plan, found.made)
    outcome, reason = _decide(plan, found, test)
    values = [observation.disagreement for observation in found.made]
    return OnlineVerdict(
        outcome=outcome,
        reason=reason,
        plan=plan,
        conversations=len(values),
        missed=found.missed,
        failed=sum(observation.failed for observation in found.made),
        disagreement=test.mean,
        upper=bounded_mean(values, 0, 1, plan.confidence).upper if values else None,
        test=test,
    )


def _decide(plan: ShadowPlan, found: Observations, test: AnytimeTest) -> tuple[Outcome, str]:
    level, bound = f"{100 * plan.confidence:g} %", f"{plan.max_disagreement:g}"
    if test.outcome is Outcome.FAIL:
        return Outcome.FAIL, f"the mean disagreement is above {bound}, at {level} confidence"
    if test.units < plan.min_conversations:
        return Outcome.INCONCLUSIVE, f"{test.units:,} of at least {plan.min_conversations:,} conversations"
    if found.missed > plan.max_missed * len(found.picked):
        share = f"{found.missed:,} of {len(found.picked):,} conversations were missed"
        return Outcome.INCONCLUSIVE, f"{share}; at most {100 * plan.max_missed:g} % may be"
    if test.outcome is Outcome.PASS:
        return Outcome.PASS, f"the mean disagreement is below {bound}, at {level} confidence"
    return Outcome.INCONCLUSIVE, f"the mean disagreement {test.mean:.4f} is not yet told from {bound}"


def conclude(log: Path, folder: Path) -> Artifact[OnlineVerdict]:
    """Write the verdict and the observations that it was reached on, from the folder of a test."""
    plan = read_plan(log)
    bundles = {
        role: ArtifactRef(EngineBundle.artifact_type, getattr(plan, role)) for role in ("champion", "challenger")
    }
    with create(folder, OnlineVerdict) as draft:
        for name in (PLAN_FILE, OBSERVATIONS_FILE):
            shutil.copyfile(log / name, draft.folder / name)
        # A server may append meanwhile: the copy is judged.
        draft.finish(judge(plan, read_observations(draft.folder)), parents=bundles)
    return load(folder, OnlineVerdict)


def load_judged(folder: Path) -> Artifact[OnlineVerdict]:
    """An online verdict whose observations give it. :class:`EvidenceError` if they do not."""
    verdict = load(folder, OnlineVerdict)
    verdict.verify()
    again = judge(read_plan(folder), read_observations(folder))
    compared = ("outcome", "plan", "conversations", "missed", "failed")
    if any(getattr(again, name) != getattr(verdict.record, name) for name in compared):
        raise EvidenceError(
            f"the observations in {folder} give {again.outcome.value}, not the recorded {verdict.record.outcome.value}",
            expected="a verdict that its own observations give",
            remedy=OnlineVerdict.remedy,
        )
    return verdict
