"""Which kernel each unit gets: the best choice of all that keep to a budget of quality (KL) and one of bytes.

A unit is a set of linears that take the same kernel, or the tables, or the KV cache; each of its options has a cost in
seconds under a workload, bytes, and a KL measured with everything else in float. KL is taken to add up over units,
which is an assumption: who uses a plan must measure its KL as a whole. Choosing is a multiple-choice knapsack, solved
exactly over the Pareto frontier of (KL, bytes, cost), unit by unit (Kellerer, Pferschy, Pisinger 2004, Knapsack
Problems, section 11.2).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tapeout.artifact import Frozen
from tapeout.errors import QuantizationError

Goal = Literal["seconds", "bytes"]
FRONTIER_POINTS = 20_000  # beyond this many, some are left out, and the plan says so
FRONTIER_SHOWN = 200  # of a frontier that is drawn
ROUNDS = 6  # plans that are measured as a whole
NEAR = 0.95  # of the limit: a KL between is not worth another round
SHORTER = 0.98  # by which the aim shrinks each time a corrected budget still led beyond the limit
ROUNDING = 1e-12  # of a budget: a plan that meets it exactly must not fail by the last bit of a sum


class Option(Frozen):
    """One kernel for one unit. ``seconds`` by row count: all of the unit, once."""

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
    seconds: float  # per token
    bytes: int
    kl: float


class Chosen(Frozen):
    """``seconds``, ``bytes`` and ``kl`` are sums over the choices. ``exact``: no plan was left out of the search."""

    choices: tuple[Choice, ...]
    seconds: float
    bytes: int
    kl: float
    exact: bool


class _Point(NamedTuple):
    """A plan of the units so far: what it spends of the budgets that are set, and what is to be least."""

    kl: float
    bytes: int
    value: float
    choice: int  # of the last unit
    before: _Point | None


@dataclass(frozen=True)
class Limits:
    """Budgets of a whole plan; None: as much as it takes."""

    kl: float | None = None
    bytes: int | None = None


def choose(
    units: Mapping[str, Sequence[Option]], workload: Workload, limits: Limits, minimize: Goal = "seconds"
) -> Chosen:
    """The plan of least ``minimize`` within ``limits``.

    :class:`QuantizationError` when a unit has no option, a figure is negative or not finite, or no plan fits.

    >>> fast = Option(kernel="int8", seconds={1: 1.0}, bytes=1, kl=0.02)
    >>> safe = Option(kernel="fp32", seconds={1: 3.0}, bytes=4, kl=0.0)
    >>> plan = choose({"qkv": [fast, safe], "o": [safe]}, Workload(shares={1: 1.0}), Limits(kl=0.03))
    >>> [c.kernel for c in plan.choices], plan.seconds
    (['int8', 'fp32'], 4.0)
    """
    chosen = {unit: [_choice(unit, option, workload) for option in options] for unit, options in units.items()}
    for unit, choices in chosen.items():
        if not choices:
            raise QuantizationError(f"{unit} has no kernel", expected="at least one option for each unit")
    points, exact = _frontier(chosen, limits, minimize)
    if not points:
        raise _unreachable(chosen, limits)
    return _plan(chosen, min(points, key=lambda point: (point.value, point.kl)), exact)


def frontier(units: Mapping[str, Sequence[Option]], workload: Workload, minimize: Goal = "seconds") -> list[Chosen]:
    """The best plan at every KL there is one for, in order of KL; of very many, evenly spaced ones and the last."""
    chosen = {unit: [_choice(unit, option, workload) for option in options] for unit, options in units.items()}
    points, exact = _frontier(chosen, Limits(kl=math.inf), minimize)
    shown = points[:: -(-len(points) // FRONTIER_SHOWN)]
    if shown[-1] is not points[-1]:
        shown.append(points[-1])
    return [_plan(chosen, point, exact) for point in shown]


class Round(Frozen):
    """A plan that was tried. ``budget`` bounded the sum of KLs; ``predicted_kl`` is that sum, and ``joint_kl`` was
    measured of all kernels at once. ``seconds`` per token and ``bytes`` are of the chosen units.
    """

    budget: float
    predicted_kl: float
    joint_kl: float
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Settled:
    chosen: Chosen
    round: Round  # in which it was tried
    rounds: tuple[Round, ...]


def settle(
    units: Mapping[str, Sequence[Option]],
    workload: Workload,
    limits: Limits,
    minimize: Goal,
    *,
    joint_kl: Callable[[Chosen], float],
) -> Settled:
    """The best plan found whose KL as a whole is within ``limits.kl``, and every plan that was tried.

    ``joint_kl`` measures a plan as a whole. The budget of the sum starts at the limit and is then scaled, up or down,
    by limit over joint KL, until a plan comes close below the limit, or comes again; less is aimed at after plans that
    missed it all the same. :class:`QuantizationError` when no plan tried was within the limit.
    """
    limit = limits.kl
    assert limit is not None
    budget, aim, seen = limit, limit, set[tuple[str, ...]]()
    best: tuple[Chosen, Round] | None = None
    rounds: list[Round] = []
    while len(rounds) < ROUNDS:
        try:
            chosen = choose(units, workload, Limits(budget, limits.bytes), minimize)
        except QuantizationError:
            if not rounds:
                raise
            break  # no sum is small enough for what whole plans were found to cost
        kernels = tuple(choice.kernel for choice in chosen.choices)
        if kernels in seen:
            break
        seen.add(kernels)
        joint = joint_kl(chosen)
        rounds.append(
            Round(budget=budget, predicted_kl=chosen.kl, joint_kl=joint, seconds=chosen.seconds, bytes=chosen.bytes)
        )
        if joint <= limit and (best is None or getattr(chosen, minimize) < getattr(best[0], minimize)):
            best = (chosen, rounds[-1])
        if NEAR * limit <= joint <= limit or not joint:
            break
        if joint > limit and len(rounds) > 1:
            aim *= SHORTER
        budget = chosen.kl * aim / joint
    if best is None:
        raise QuantizationError(
            f"no plan has a KL of at most {limit:g} as a whole; the least of {len(rounds)} is "
            f"{min(r.joint_kl for r in rounds):.4g}",
            expected="a plan within plan.max_kl",
            remedy="raise plan.max_kl, or plan.max_bytes where it is set",
        )
    return Settled(*best, tuple(rounds))


def _frontier(chosen: Mapping[str, Sequence[Choice]], limits: Limits, minimize: Goal) -> tuple[list[_Point], bool]:
    """Of all plans within the limits, those that no other beats, in order of KL; and whether none was left out."""
    kl_limit = 0.0 if limits.kl is None else limits.kl * (1 + ROUNDING)
    bytes_limit = 0 if limits.bytes is None else limits.bytes

    def spent(choice: Choice) -> tuple[float, int]:
        return (0.0 if limits.kl is None else choice.kl, 0 if limits.bytes is None else choice.bytes)

    # What the units to come spend at least: a partial plan that cannot be completed is dropped at once.
    least = [tuple(min(spent(c)[part] for c in choices) for part in (0, 1)) for choices in chosen.values()]
    points, exact = [_Point(0.0, 0, 0.0, -1, None)], True
    for number, choices in enumerate(chosen.values()):
        kl_left = kl_limit - math.fsum(kl for kl, _ in least[number + 1 :])
        bytes_left = bytes_limit - sum(size for _, size in least[number + 1 :])
        reached: list[_Point] = []
        for index, choice in enumerate(choices):
            kl, size = spent(choice)
            value = getattr(choice, minimize)
            reached.extend(
                _Point(point.kl + kl, point.bytes + size, point.value + value, index, point)
                for point in points
                if point.kl + kl <= kl_left + ROUNDING * kl_limit and point.bytes + size <= bytes_left
            )
        points = _pareto(reached)
        if len(points) > FRONTIER_POINTS:
            # Each that stays is a real plan, so the budgets hold; the one that spends least is the first.
            points, exact = points[:: -(-len(points) // FRONTIER_POINTS)], False
    return points, exact


def _pareto(points: list[_Point]) -> list[_Point]:
    """Those that no other equals or beats in KL, bytes and value at once, in order of KL."""
    kept: list[_Point] = []
    sizes: list[int] = []  # of the points so far, those that are best in bytes and value: bytes rise, values fall
    values: list[float] = []
    for point in sorted(points, key=lambda p: p[:3]):
        place = bisect.bisect_right(sizes, point.bytes)
        if place and values[place - 1] <= point.value:
            continue
        kept.append(point)
        start = bisect.bisect_left(sizes, point.bytes)
        end = start
        while end < len(sizes) and values[end] >= point.value:
            end += 1
        sizes[start:end], values[start:end] = [point.bytes], [point.value]
    return kept


def _plan(chosen: Mapping[str, Sequence[Choice]], point: _Point, exact: bool) -> Chosen:
    picked: list[Choice] = []
    step: _Point | None = point
    for choices in reversed(list(chosen.values())):
        assert step is not None
        picked.append(choices[step.choice])
        step = step.before
    picked.reverse()
    return Chosen(
        choices=tuple(picked),
        seconds=math.fsum(c.seconds for c in picked),
        bytes=sum(c.bytes for c in picked),
        kl=math.fsum(c.kl for c in picked),
        exact=exact,
    )


def _choice(unit: str, option: Option, workload: Workload) -> Choice:
    seconds = workload.cost(option)
    if not all(math.isfinite(value) and value >= 0 for value in (seconds, option.bytes, option.kl)):
        raise QuantizationError(
            f"{unit} with {option.kernel}: {seconds} s, {option.bytes} bytes, KL {option.kl}",
            expected="finite figures, none negative",
            remedy="measure it again",
        )
    return Choice(unit=unit, kernel=option.kernel, seconds=seconds, bytes=option.bytes, kl=option.kl)


def _unreachable(chosen: Mapping[str, Sequence[Choice]], limits: Limits) -> QuantizationError:
    needs = [
        f"{what} {limit:g}, of which the most sparing kernels need {sum(min(values) for values in spent):g}"
        for what, limit, spent in (
            ("KL", limits.kl, [[c.kl for c in choices] for choices in chosen.values()]),
            ("bytes", limits.bytes, [[c.bytes for c in choices] for choices in chosen.values()]),
        )
        if limit is not None
    ]
    return QuantizationError(
        f"no plan within {' and '.join(needs)}",
        expected="budgets that one plan can keep to at the same time",
        remedy="raise plan.max_kl or plan.max_bytes, or leave to `auto` what the recipe writes out of the plan",
    )
