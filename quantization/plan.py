"""PrecisionPlan: the scheme of every unit, of embeddings and KV cache too, its cost in time, bytes and KL, and why.

The folder holds ``plan.md``, the same for reading; where the plan was chosen and not written out, also ``frontier.csv``
(the best plan at every KL) and ``frontier.svg``. Units take times and KLs apart; a whole plan is more than their sum,
so ``rounds`` keep what was measured of it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from quantization.plan_solver import Round
from tapeout.artifact import Frozen, ParentTypes, Record
from tapeout.recipe import KVCache, Plan
from tapeout.schemes import Scheme

PLAN_FILE, FRONTIER_FILE = "plan.md", "frontier.csv"
EMBEDDINGS, KV_CACHE, RECURRENT_STATE = "embeddings", "KV cache", "recurrent state"  # units beside those of linears
AS_WRITTEN = "written in the recipe"


class PlanPart(Frozen):
    """``seconds`` per token of the workload and ``kl`` in nats per token are None where they were not measured, and
    ``bytes`` where they were not counted: those of a KV cache depend on slots and context, which a plan that is written
    out does not.
    """

    name: str
    bytes: int | None = None
    seconds: float | None = None
    kl: float | None = None
    reason: str


class UnitPlan(PlanPart):
    groups: tuple[str, ...]  # as the PortableGraph names them
    scheme: Scheme  # as it was asked for; a group size that does not divide the inputs shrinks


class CachePlan(PlanPart):
    settings: KVCache


class StatePlan(PlanPart):
    """Of recurrences, as the model keeps it: float32 where it has none, whatever was asked."""

    dtype: Literal["float32", "bfloat16"]


class Search(Frozen):
    """How a plan was chosen: what was asked for, what it stands on, and what was measured of whole plans."""

    goal: str
    workload: dict[int, float]  # tokens of a step: share of all tokens
    max_kl: float
    max_bytes: int | None
    target: str
    timed: bool  # False: no device was at hand, and times follow from what the target declares
    threads: int
    slots: int  # sequences whose KV cache counts,
    context: int  # of so many tokens each
    predicted_kl: float  # the sum over units, embeddings and KV cache among them
    joint_kl: float  # of all of them at once
    rounds: tuple[Round, ...]  # plans that were measured as a whole; this one is among them
    exact: bool  # no plan is better by these figures
    samples: tuple[str, ...]  # hashes of the calibration samples that whole plans were measured on


class PrecisionPlan(Record):
    artifact_type: ClassVar[str] = "PrecisionPlan"
    schema_version: ClassVar[int] = 6  # 6: experts in bits of their own
    remedy: ClassVar[str] = "run `dvc repro plan`"
    parent_types: ClassVar[ParentTypes] = {
        "graph": ("PortableGraph",),
        "calibration": ("Calibration",),
        "sensitivity": ("Sensitivity",),
    }

    asked: Plan  # by the recipe: what decides, with defaults for what nothing reads
    units: tuple[UnitPlan, ...]  # every linear but the head
    embeddings: UnitPlan  # and the head
    kv_cache: CachePlan
    recurrent_state: StatePlan
    search: Search | None  # None: the plan is written in the recipe

    @property
    def schemes(self) -> dict[str, Scheme]:
        """By group."""
        return {group: unit.scheme for unit in self.units for group in unit.groups}


def decisive(asked: Plan) -> Plan:
    """The same plan with defaults for what nothing reads: where schemes are written out, nothing is searched for.

    >>> decisive(Plan(goal="latency")) == Plan()
    True
    """
    if asked.schemes == "auto":
        return asked
    return Plan(
        schemes=asked.schemes,
        embeddings=asked.embeddings,
        kv_cache=asked.kv_cache,
        recurrent_state=asked.recurrent_state,
    )


def summary(plan: PrecisionPlan) -> str:
    """How the plan came about, in a few sentences."""
    search = plan.search
    if search is None:
        return "Written in the recipe; nothing was measured of it. `schemes: auto` chooses by measurement."
    shares = ", ".join(
        f"{share:.0%} at {tokens} {'token' if tokens == 1 else 'tokens'} a step"
        for tokens, share in sorted(search.workload.items())
    )
    goal = "for the fewest bytes" if search.goal == "memory" else f"for the least time per token ({shares})"
    where = f"{search.target} with {search.threads} threads" if search.timed else search.target
    times = "" if search.timed else "No device timed anything: times follow from the target's declared throughput. "
    return (
        f"Chosen {goal} on {where}, with a KL of at most {search.max_kl:g} and a "
        f"KV cache for {search.slots} sequences of {search.context} tokens. {times}"
        f"The KLs of units sum to {search.predicted_kl:.4f}; all schemes at once have {search.joint_kl:.4f}, on "
        f"{len(search.samples)} samples that no unit was measured on."
    )


COLUMNS = ("unit", "scheme", "µs/token", "MB", "KL", "why")


def table(plan: PrecisionPlan) -> list[tuple[str, ...]]:
    """A row per unit, then embeddings, KV cache and the sum of what was counted; ``COLUMNS`` names the cells."""

    def row(part: PlanPart, scheme: str) -> tuple[str, ...]:
        return (
            part.name,
            scheme,
            "" if part.seconds is None else f"{part.seconds * 1e6:.1f}",
            "" if part.bytes is None else f"{part.bytes / 1e6:.2f}",
            "" if part.kl is None else f"{part.kl:.5f}",
            part.reason,
        )

    units, cache, search = (*plan.units, plan.embeddings), plan.kv_cache, plan.search
    seconds = [part.seconds for part in (*units, cache)]
    together = PlanPart(
        name="all",
        bytes=sum(part.bytes or 0 for part in (*units, cache)),
        seconds=None if None in seconds else sum(taken or 0.0 for taken in seconds),
        kl=None if search is None else search.predicted_kl,
        reason="" if search is None else f"{search.joint_kl:.5f} at once, of {search.max_kl:g}",
    )
    rows = [row(unit, unit.scheme.name) for unit in units]
    state = plan.recurrent_state
    return [
        *rows,
        row(cache, cache.settings.name),
        *([row(state, state.dtype)] if plan.asked.recurrent_state != "float32" else []),
        row(together, ""),
    ]


def text(plan: PrecisionPlan) -> str:
    """The plan as Markdown."""
    search = plan.search
    lines = ["# Precision plan", "", summary(plan), "", f"| {' | '.join(COLUMNS)} |", "|---|---|--:|--:|--:|---|"]
    lines += [f"| {' | '.join(row)} |" for row in table(plan)]
    if search is not None:
        lines += ["", "Plans that were measured as a whole:", "", "| budget of the sum | sum | at once | µs | MB |"]
        lines += ["|--:|--:|--:|--:|--:|"]
        lines += [
            f"| {r.budget:.4f} | {r.predicted_kl:.4f} | {r.joint_kl:.4f} | {r.seconds * 1e6:.1f} "
            f"| {r.bytes / 1e6:.2f} |"
            for r in search.rounds
        ]
    return "\n".join(lines) + "\n"
