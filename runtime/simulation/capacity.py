"""How many replicas a traffic needs to meet its objectives, and what that costs: the answer of ``tapeout capacity``.

The fleet is simulated with one number of replicas after the other. More of them make nothing slower, so the smallest
number that meets the objectives is found by doubling and then halving.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from runtime.simulation.fleet import FleetFigures, FleetShape, FleetSimulation, Late
from runtime.simulation.step_lengths import StepLengths
from runtime.simulation.traffic import Traffic
from runtime.wire.limits import Limits
from tapeout.slo import LatencyObjective, ServiceLevelObjectives

CONFIDENCE = 0.95  # with which the largest of too few values is no bound of a percentile
# A full queue would hide how late requests are.
EVERYONE_WAITS = Limits(max_waiting=1 << 40, max_waiting_tokens=1 << 60)


@dataclass(frozen=True)
class CapacityRow:
    """What so many replicas gave. ``ttft`` and ``itl``: share of the events within the objective; None without one.

    ``cost``: of a million tokens of answers, in the currency of the price, at the tokens that were asked for.
    """

    replicas: int
    figures: FleetFigures
    ttft: float | None
    itl: float | None
    meets: bool
    cost: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class CapacityOutcome(Enum):
    """``MISSED``: not even the most replicas that were tried are enough. ``TOO_SHORT``: too few requests to say."""

    FOUND = "found"
    MISSED = "missed"
    TOO_SHORT = "too short"


@dataclass(frozen=True)
class CapacityAnswer:
    """``rows``: of all numbers of replicas that were tried, ascending. ``needed``: requests, for a percentile."""

    answer: CapacityOutcome
    replicas: int | None
    rows: tuple[CapacityRow, ...]
    needed: int


def events_needed(share: float) -> int:
    """Fewest values of which the largest is an upper bound of a percentile at 95 %: ``share ** n <= 0.05``.

    >>> events_needed(0.99), events_needed(0.95)
    (299, 59)
    """
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(share))


def find_capacity(
    workload: Traffic,
    lengths: StepLengths,
    slo: ServiceLevelObjectives,
    *,
    shape: FleetShape,
    price_per_hour: float,
    most_replicas: int = 64,
    progress: Callable[[CapacityRow], None] = lambda row: None,
) -> CapacityAnswer:
    """``shape``: of the fleet but for its size. ``price_per_hour``: of a replica. ``progress`` gets each row."""
    needed = max(events_needed(goal.share) for goal in (slo.ttft, slo.itl) if goal is not None)
    rows = dict[int, CapacityRow]()

    def meets(replicas: int) -> bool:
        if replicas not in rows:
            rows[replicas] = tried(workload, lengths, replace(shape, engines=replicas), slo, price_per_hour)
            progress(rows[replicas])
        return rows[replicas].meets

    least, most = 0, min(busy_replicas(workload, lengths), most_replicas)  # too few, and enough once it meets
    while not (enough := meets(most)) and most < most_replicas:
        least, most = most, min(2 * most, most_replicas)
    while enough and most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if meets(middle) else (middle, most)
    found = CapacityOutcome.FOUND if enough else CapacityOutcome.MISSED
    if enough and rows[most].figures.requests < needed:
        found = CapacityOutcome.TOO_SHORT
    return CapacityAnswer(
        found, most if found is CapacityOutcome.FOUND else None, tuple(rows[number] for number in sorted(rows)), needed
    )


def tried(
    workload: Traffic, lengths: StepLengths, shape: FleetShape, slo: ServiceLevelObjectives, price_per_hour: float
) -> CapacityRow:
    """One number of replicas. It ends early once more requests are late than the objective allows."""
    late = None
    if slo.ttft is not None:
        late = Late(slo.ttft.seconds, math.ceil((1 - slo.ttft.share) * workload.turns) + 1)
    simulation = FleetSimulation(workload, lengths, shape)
    figures = simulation.run(late)
    ttft, itl = _within(simulation.ttft, slo.ttft), _within(simulation.itl, slo.itl)
    goals = [(ttft, slo.ttft), (itl, slo.itl)]
    meets = figures.whole and all(share is None or goal is None or share >= goal.share for share, goal in goals)
    return CapacityRow(shape.engines, figures, ttft, itl, meets, cost(workload, shape.engines, price_per_hour))


def cost(workload: Traffic, replicas: int, price_per_hour: float) -> float:
    """Of a million tokens of answers, where the replicas are paid for as long as the traffic lasts."""
    seconds = max((conversation.start for conversation in workload.conversations), default=0.0)
    tokens = sum(len(turn.answer) for conversation in workload.conversations for turn in conversation.turns)
    return replicas * price_per_hour * seconds / 3600 / tokens * 1e6 if tokens else 0.0


def busy_replicas(workload: Traffic, lengths: StepLengths) -> int:
    """About as many as would be busy all the time with prompts that share everything: where to begin to look."""
    seconds = max((conversation.start for conversation in workload.conversations), default=0.0)
    most = max(count for count, _ in lengths.decodes)
    decode = lengths.seconds(most, 0) / most
    tokens = sum(len(turn.answer) for conversation in workload.conversations for turn in conversation.turns)
    return max(1, math.ceil(tokens * decode / seconds)) if seconds else 1


def _within(seconds: Any, goal: LatencyObjective | None) -> float | None:
    if goal is None:
        return None
    return sum(second <= goal.seconds for second in seconds) / len(seconds) if len(seconds) else 1.0
