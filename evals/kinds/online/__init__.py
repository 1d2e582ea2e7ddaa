"""Online: a challenger on live traffic beside the champion (``evals/kinds/online/measure.py`` judges it).

It comes after the gate, when a challenger is registered, so no verdict of the gate holds it: `tapeout promote` asks for
it where the recipe says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from engines.bundle import EngineBundle
from evals.block import Block, FactRow, fact_metrics
from evals.check import JudgedVerdict, Outcome
from evals.kind import Bounds, EvidenceKind
from evals.kinds.online.sequential import AnytimeTest
from tapeout.artifact import ParentTypes, Record, load
from tapeout.errors import ExitCode
from tapeout.observations import OBSERVATIONS_FILE, Observation, ShadowPlan
from tapeout.recipe import Count, Fraction, Section

LIVE = "Live traffic"
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


def frozen_plan(settings: Online, champion: str, challenger: str, share: float | None = None) -> ShadowPlan:
    """Frozen before the first conversation. ``champion``, ``challenger``: digests of their bundles."""
    return ShadowPlan(
        champion=champion,
        challenger=challenger,
        share=settings.share if share is None else share,
        max_disagreement=settings.max_disagreement,
        confidence=settings.confidence,
        min_conversations=settings.min_conversations,
        max_missed=settings.max_missed,
    )


class OnlineVerdict(Record):
    """``upper``: of the mean disagreement, at the plan's confidence, however often one has looked."""

    artifact_type: ClassVar[str] = "OnlineVerdict"
    remedy: ClassVar[str] = "run `tapeout shadow-verdict` again"
    schema_version: ClassVar[int] = 1
    parent_types: ClassVar[ParentTypes] = {
        "champion": (EngineBundle.artifact_type,),
        "challenger": (EngineBundle.artifact_type,),
    }

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


class OnlineKind(EvidenceKind[OnlineVerdict, Observation, Bounds]):
    order, name, folder, needed = 90, "online", "online", "never"
    artifact_types, items_file = ("OnlineVerdict",), OBSERVATIONS_FILE
    report, item, bounds = OnlineVerdict, Observation, Bounds

    def block(self, folder: Path, verdict: JudgedVerdict) -> Block:
        found = load(folder, OnlineVerdict).record
        against = f"champion {found.plan.champion[:12]}, challenger {found.plan.challenger[:12]}"
        facts = (
            FactRow("outcome", "Outcome", found.outcome.value, note=f"{found.reason}; {against}"),
            FactRow("conversations", "Conversations", found.conversations, note=f"{found.missed} were missed"),
            FactRow("failed", "Answers that the challenger failed on", found.failed),
            *(
                (
                    FactRow("disagreement", "Tokens that disagree", found.disagreement, "fraction"),
                    FactRow("upper", "Upper bound of that", found.upper, "fraction"),
                )
                if found.disagreement is not None and found.upper is not None
                else ()
            ),
        )
        return Block(LIVE, "Challenger beside the champion", facts=facts, metrics=fact_metrics("online", facts))


KIND = OnlineKind()
