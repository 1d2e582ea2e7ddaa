"""Evidence from live traffic: does a challenger answer as the champion does? Stage-less; `tapeout shadow-verdict`.

A server mirrors a share of its calls to the challenger (``runtime/server/shadow.py``), which scores the champion's own
answers. The unit is one conversation, its value the share of tokens where the engines' likeliest tokens differ, as in
the gate's ``shadow_agreement``. The test (``evals/sequential.py``) may be looked at after every conversation.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from engines.bundle import EngineBundle
from evals.check import Outcome
from evals.sequential import AnytimeTest
from evals.statistics import bounded_mean
from tapeout.artifact import Artifact, ArtifactRef, Record, Roles, create, load
from tapeout.errors import EvidenceError, ExitCode
from tapeout.observations import (
    OBSERVATIONS_FILE,
    PLAN_FILE,
    Observation,
    Observations,
    ShadowPlan,
    read_observations,
    read_plan,
)
from tapeout.recipe import Count, Fraction, Section

EXIT_CODES = {
    Outcome.PASS: ExitCode.PASS,
    Outcome.FAIL: ExitCode.GATE_FAILED,
    Outcome.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
}


class Online(Section):
    """Section ``online`` of a recipe: what live traffic must show of a challenger."""

    required: bool = False  # `tapeout promote` demands a PASS on live traffic
    max_disagreement: float = Field(default=0.10, gt=0, le=0.5)  # mean over conversations, of the champion's tokens
    confidence: float = Field(default=0.95, ge=0.9, lt=1)
    min_conversations: Count = 100
    max_missed: Fraction = 0.2  # of the conversations that were picked
    share: Fraction = 0.05  # of all calls, that are mirrored

    def plan(self, champion: str, challenger: str, share: float | None = None) -> ShadowPlan:
        """Frozen before the first conversation. ``champion``, ``challenger``: digests of their bundles."""
        return ShadowPlan(
            champion=champion,
            challenger=challenger,
            share=self.share if share is None else share,
            max_disagreement=self.max_disagreement,
            confidence=self.confidence,
            min_conversations=self.min_conversations,
            max_missed=self.max_missed,
        )


class OnlineVerdict(Record):
    """``upper``: of the mean disagreement, at the plan's confidence, however often one has looked."""

    noun: ClassVar[str] = "OnlineVerdict"
    remedy: ClassVar[str] = "run `tapeout shadow-verdict` again"
    schema_version: ClassVar[int] = 1
    parent_roles: ClassVar[Roles] = {"champion": (EngineBundle.noun,), "challenger": (EngineBundle.noun,)}

    outcome: Outcome
    reason: str
    plan: ShadowPlan
    conversations: int
    missed: int
    failed: int
    disagreement: float | None
    upper: float | None
    test: AnytimeTest

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.outcome]


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
    bundles = {role: ArtifactRef(EngineBundle.noun, getattr(plan, role)) for role in ("champion", "challenger")}
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
    if (again.outcome, again.conversations, again.missed, again.plan) != (
        verdict.record.outcome,
        verdict.record.conversations,
        verdict.record.missed,
        verdict.record.plan,
    ):
        raise EvidenceError(
            f"the observations in {folder} give {again.outcome.value}, not the recorded {verdict.record.outcome.value}",
            expected="a verdict that its own observations give",
            remedy=OnlineVerdict.remedy,
        )
    return verdict
