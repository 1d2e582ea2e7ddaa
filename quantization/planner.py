"""Which kernel each unit gets: the cheapest choice that keeps to a budget of quality (KL) or of bytes.

A unit is a set of linears that take the same kernel; each of its options has a cost in seconds under a workload,
bytes, and a KL measured with everything else in float. KL is taken to add up over units, which is an assumption: who
uses a plan must measure its KL as a whole. Choosing is a multiple-choice knapsack, solved exactly over the Pareto
frontier of (spent budget, cost), unit by unit (Kellerer, Pferschy, Pisinger 2004, Knapsack Problems, section 11.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.artifact import Frozen
from pipeline.errors import QuantizationError

Resource = Literal["kl", "bytes"]
FRONTIER_POINTS = 20_000  # beyond this many, neighbours are merged upwards in budget and the plan says so


class Option(Frozen):
    """One kernel for one unit. ``seconds`` by row count: all products of the unit, once."""

    kernel: str
    seconds: dict[int, float]
    bytes: int
    kl: float


class Workload(Frozen):
    """Share of all tokens by the rows they are computed with: 1 for single-stream decode, 128 for prefill, ..."""

    shares: dict[int, float]

    def cost(self, option: Option) -> float:
        """Seconds per token of the workload: a step over r rows serves r tokens."""
        missing = self.shares.keys() - option.seconds.keys()
        if missing:
            raise QuantizationError(
                f"{option.kernel} was not timed at {sorted(missing)} rows",
                expected="costs at every row count of the workload",
                remedy="measure these row counts, or leave them out of the workload",
            )
        return sum(share * option.seconds[rows] / rows for rows, share in self.shares.items())


class Choice(Frozen):
    unit: str
    kernel: str
    cost: float  # seconds per token
    bytes: int
    kl: float


class KernelPlan(Frozen):
    """``cost``, ``bytes`` and ``kl`` are sums over the choices. ``exact``: no frontier point had to be merged."""

    choices: tuple[Choice, ...]
    cost: float
    bytes: int
    kl: float
    exact: bool


@dataclass(frozen=True)
class _Point:
    spent: float
    cost: float
    choice: int
    before: _Point | None


def choose(
    units: Mapping[str, Sequence[Option]], workload: Workload, *, resource: Resource, budget: float
) -> KernelPlan:
    """The plan of lowest cost whose sum of ``resource`` is at most ``budget``.

    :class:`QuantizationError` when a unit has no option, a figure is negative or not finite, or no plan fits.

    >>> fast = Option(kernel="int8", seconds={1: 1.0}, bytes=1, kl=0.02)
    >>> safe = Option(kernel="fp32", seconds={1: 3.0}, bytes=4, kl=0.0)
    >>> plan = choose({"qkv": [fast, safe], "o": [safe]}, Workload(shares={1: 1.0}), resource="kl", budget=0.03)
    >>> [c.kernel for c in plan.choices], plan.cost
    (['int8', 'fp32'], 4.0)
    """
    chosen: dict[str, list[Choice]] = {}
    for unit, options in units.items():
        chosen[unit] = [_choice(unit, option, workload) for option in options]
        if not options:
            raise QuantizationError(f"{unit} has no kernel", expected="at least one option for each unit")
    least = math.fsum(min(getattr(c, resource) for c in choices) for choices in chosen.values())
    # The budget of a sum of floats: a plan that meets it exactly must not fail by the last bit.
    limit = budget * (1 + 1e-12) if budget > 0 else budget
    if not least <= limit:
        raise QuantizationError(
            f"no plan within {resource} {budget:g}",
            expected=f"at least {least:g}, what the most sparing kernels need",
            remedy="raise the budget, or add kernels that need less",
        )
    frontier, exact = [_Point(0.0, 0.0, -1, None)], True
    remaining = least
    for choices in chosen.values():
        remaining -= min(getattr(c, resource) for c in choices)
        reachable = [
            _Point(point.spent + getattr(c, resource), point.cost + c.cost, index, point)
            for point in frontier
            for index, c in enumerate(choices)
            if point.spent + getattr(c, resource) + remaining <= limit + 1e-15 * len(chosen)
        ]
        frontier = _pareto(reachable)
        if len(frontier) > FRONTIER_POINTS:
            frontier, exact = _thinned(frontier), False
    best: _Point | None = min(frontier, key=lambda point: (point.cost, point.spent))
    picked: list[Choice] = []
    for choices in reversed(chosen.values()):
        assert best is not None
        picked.append(choices[best.choice])
        best = best.before
    picked.reverse()
    return KernelPlan(
        choices=tuple(picked),
        cost=math.fsum(c.cost for c in picked),
        bytes=sum(c.bytes for c in picked),
        kl=math.fsum(c.kl for c in picked),
        exact=exact,
    )


def _choice(unit: str, option: Option, workload: Workload) -> Choice:
    cost = workload.cost(option)
    if not all(math.isfinite(value) and value >= 0 for value in (cost, option.bytes, option.kl)):
        raise QuantizationError(
            f"{unit} with {option.kernel}: {cost} s, {option.bytes} bytes, KL {option.kl}",
            expected="finite figures, none negative",
            remedy="measure it again",
        )
    return Choice(unit=unit, kernel=option.kernel, cost=cost, bytes=option.bytes, kl=option.kl)


def _pareto(points: list[_Point]) -> list[_Point]:
    """Those that no other beats in both; in order of what they spend."""
    kept: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.spent, p.cost)):
        if not kept or point.cost < kept[-1].cost:
            kept.append(point)
    return kept


def _thinned(frontier: list[_Point]) -> list[_Point]:
    """Every so many-th point, the most sparing one always kept: each is a real plan, so the budget still holds."""
    stride = -(-len(frontier) // FRONTIER_POINTS)
    return frontier[::stride]
