"""The knapsack of a precision plan: the best choice of one option per unit within a budget of KL and one of bytes.

A unit is a set of linears that take the same scheme, or the embeddings, or the KV cache; each of its options has a cost
in seconds under a workload, bytes, and a KL measured with everything else in float. KL is taken to add up over units,
which is an assumption: who uses a plan must measure its KL as a whole. Choosing is a multiple-choice knapsack
(Kellerer, Pferschy, Pisinger 2004, Knapsack Problems, chapter 11), solved to optimality by HiGHS
(``scipy.optimize.milp``).
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tapeout.artifact import Frozen
from tapeout.errors import QuantizationError

Goal = Literal["seconds", "bytes"]
FRONTIER_SHOWN = 50  # plans of a frontier that is drawn
SOLVER_SECONDS = 10.0  # of one plan; one that is not proven to be the best in this time says so
SLACK = 1e-6  # of a budget: without it, HiGHS cuts off plans that meet the budget exactly
# Objective and budgets are scaled to this: the tolerance of HiGHS, 1e-6, is then a thousandth of the slack. Where the
# two were equal, its presolve cut off a plan that meets two budgets exactly, and called the next best one optimal.
SCALE = 1e3
OPTIMAL, INFEASIBLE = 0, 2  # statuses of scipy.optimize.milp
ROUNDS = 6  # plans that are measured as a whole
NEAR = 0.95  # of the limit: a KL between is not worth another round
SHORTER = 0.98  # by which the aim shrinks each time a corrected budget still led beyond the limit
ROUNDING = 1e-12  # of a budget: a plan that meets it exactly must not fail by the last bit of a sum


class Option(Frozen):
    """What a unit may get. ``seconds``, by the tokens of a step, are of all of the unit, once."""

    name: str
    seconds: dict[int, float]
    bytes: int
    kl: float


class Workload(Frozen):
    """Share of all tokens by the tokens of their step: 1 for single-stream decode, 128 for prefill, ..."""

    shares: dict[int, float]

    def cost(self, option: Option) -> float:
        """Seconds per token of the workload."""
        missing = self.shares.keys() - option.seconds.keys()
        if missing:
            raise QuantizationError(
                f"{option.name} was not timed at {sorted(missing)} tokens",
                expected="costs at every step size of the workload",
                remedy="measure these step sizes, or leave them out of the workload",
            )
        return sum(share * option.seconds[tokens] / tokens for tokens, share in self.shares.items())


class PlanChoice(Frozen):
    unit: str
    option: str
    seconds: float  # per token
    bytes: int
    kl: float


class Chosen(Frozen):
    """``seconds``, ``bytes`` and ``kl`` are sums over the choices. ``exact``: no plan is better."""

    choices: tuple[PlanChoice, ...]
    seconds: float
    bytes: int
    kl: float
    exact: bool


@dataclass(frozen=True)
class PlanBudget:
    """Budgets of a whole plan; None: as much as it takes."""

    kl: float | None = None
    bytes: int | None = None


def choose(
    units: Mapping[str, Sequence[Option]], workload: Workload, limits: PlanBudget, minimize: Goal = "seconds"
) -> Chosen:
    """The plan of least ``minimize`` within ``limits``.

    :class:`QuantizationError` when a unit has no option, a figure is negative or not finite, or no plan fits.

    >>> fast = Option(name="int8", seconds={1: 1.0}, bytes=1, kl=0.02)
    >>> safe = Option(name="fp32", seconds={1: 3.0}, bytes=4, kl=0.0)
    >>> plan = choose({"qkv": [fast, safe], "o": [safe]}, Workload(shares={1: 1.0}), PlanBudget(kl=0.03))
    >>> [c.option for c in plan.choices], plan.seconds
    (['int8', 'fp32'], 4.0)
    """
    plan = _Knapsack(units, workload, minimize).solved(limits)
    if plan is None:
        raise _unreachable(units, limits)
    return plan


def frontier(units: Mapping[str, Sequence[Option]], workload: Workload, minimize: Goal = "seconds") -> list[Chosen]:
    """The best plans, in order of KL, at evenly spaced budgets of KL: from the least there is to the most that is worth
    spending.
    """
    knapsack = _Knapsack(units, workload, minimize)
    most = knapsack.solved(PlanBudget())
    assert most is not None
    plans = [most]
    least = math.fsum(min(option.kl for option in options) for options in units.values())
    for budget in np.linspace(most.kl, least, FRONTIER_SHOWN)[1:]:
        if plans[-1].kl <= budget:
            continue
        plan = knapsack.best(minimize, {"kl": float(budget)})
        assert plan is not None
        if getattr(plan, minimize) <= getattr(plans[-1], minimize):
            plans.pop()
        plans.append(plan)
    return plans[::-1]


class Round(Frozen):
    """A plan that was tried. ``budget`` bounded the sum of KLs; ``predicted_kl`` is that sum, and ``joint_kl`` was
    measured of all choices at once. ``seconds`` per token and ``bytes`` are of the chosen units.
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
    limits: PlanBudget,
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
            chosen = choose(units, workload, PlanBudget(budget, limits.bytes), minimize)
        except QuantizationError:
            if not rounds:
                raise
            break  # no sum is small enough for what whole plans were found to cost
        options = tuple(choice.option for choice in chosen.choices)
        if options in seen:
            break
        seen.add(options)
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


class _Knapsack:
    """One binary variable per option of each unit."""

    def __init__(self, units: Mapping[str, Sequence[Option]], workload: Workload, minimize: Goal) -> None:
        for unit, options in units.items():
            if not options:
                raise QuantizationError(f"{unit} has no option", expected="at least one option for each unit")
        self._choices = [_choice(unit, option, workload) for unit, options in units.items() for option in options]
        starts = np.cumsum([0, *(len(options) for options in units.values())])
        self._units = np.repeat(np.arange(len(units)), np.diff(starts))
        spent = {part: np.array([getattr(c, part) for c in self._choices]) for part in ("seconds", "bytes", "kl")}
        self._least = {part: math.fsum(np.minimum.reduceat(values, starts[:-1])) for part, values in spent.items()}
        # What an option spends beyond the least of its unit: what is left of a budget is shared out among these.
        self._beyond = {p: v - np.minimum.reduceat(v, starts[:-1])[self._units] for p, v in spent.items()}
        self._minimize = minimize

    def solved(self, limits: PlanBudget) -> Chosen | None:
        """The plan of the least value within the limits and, of these, of the least KL; None where there is none."""
        budgets = {"kl": limits.kl, "bytes": limits.bytes}
        plan = self.best(self._minimize, budgets)
        if plan is None:
            return None
        same = self.best("kl", budgets | {self._minimize: getattr(plan, self._minimize)})
        return plan if same is None or same.kl >= plan.kl else same.model_copy(update={"exact": plan.exact})

    def best(self, minimize: str, budgets: Mapping[str, float | None]) -> Chosen | None:
        """A plan of the least ``minimize`` within the budgets of what they name; None where there is none."""
        left = {p: limit * (1 + ROUNDING) - self._least[p] for p, limit in budgets.items() if limit is not None}
        if min(left.values(), default=0.0) < 0:
            return None
        refused: list[Any] = []  # plans that only meet a budget within the tolerance of HiGHS
        while True:
            chosen, picked = self._solution(minimize, left, refused)
            if chosen is None or all(getattr(chosen, p) <= self._least[p] + value for p, value in left.items()):
                return chosen
            refused.append(picked)

    def _solution(self, minimize: str, left: Mapping[str, float], refused: Sequence[Any]) -> tuple[Chosen | None, Any]:
        """The best plan but for those ``refused``, and which options it takes."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        count = len(self._choices)
        allowed = np.all([self._beyond[part] <= value for part, value in left.items()] or [True], axis=0)
        constraints = [LinearConstraint(csr_array((np.ones(count), (self._units, np.arange(count)))), 1, 1)]
        constraints += [
            LinearConstraint(
                (np.where(allowed, self._beyond[part], 0) * (SCALE / value))[None], -np.inf, SCALE * (1 + SLACK)
            )
            for part, value in left.items()
            if value
        ]
        constraints += [LinearConstraint(plan[None], -np.inf, plan.sum() - 1) for plan in refused]
        value = self._beyond[minimize]
        limits: Any = (np.zeros(count), np.broadcast_to(allowed, count).astype(float))
        with _silent():
            result: Any = milp(
                value * (SCALE / (value.max() or 1.0)),
                integrality=np.ones(count),
                bounds=Bounds(*limits),
                constraints=constraints,
                options={"mip_rel_gap": 0.0, "time_limit": SOLVER_SECONDS},
            )
        if result.x is None:
            if result.status == INFEASIBLE:
                return None, None
            raise QuantizationError(
                f"HiGHS found no plan: {result.message}",
                expected=f"one in {SOLVER_SECONDS:g} s",
                remedy="run it again with less other work on the machine, or write plan.schemes out",
            )
        picked = np.rint(result.x)
        choices = [choice for choice, taken in zip(self._choices, picked, strict=True) if taken]
        chosen = Chosen(
            choices=tuple(choices),
            seconds=math.fsum(c.seconds for c in choices),
            bytes=sum(c.bytes for c in choices),
            kl=math.fsum(c.kl for c in choices),
            exact=result.status == OPTIMAL,
        )
        return chosen, picked


@contextmanager
def _silent() -> Generator[None]:
    """Discard what C code prints on standard output.

    HiGHS calls printf when it repairs a solution, whatever its options say, presolve on or off. The C library keeps
    such lines in a buffer of its own, so that is flushed before and after.
    """
    flush = ctypes.CDLL(None).fflush
    flush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _choice(unit: str, option: Option, workload: Workload) -> PlanChoice:
    seconds = workload.cost(option)
    if not all(math.isfinite(value) and value >= 0 for value in (seconds, option.bytes, option.kl)):
        raise QuantizationError(
            f"{unit} with {option.name}: {seconds} s, {option.bytes} bytes, KL {option.kl}",
            expected="finite figures, none negative",
            remedy="measure it again",
        )
    return PlanChoice(unit=unit, option=option.name, seconds=seconds, bytes=option.bytes, kl=option.kl)


def _unreachable(units: Mapping[str, Sequence[Option]], limits: PlanBudget) -> QuantizationError:
    needs = [
        f"{what} {limit:g}, of which the most sparing options need {sum(min(values) for values in spent):g}"
        for what, limit, spent in (
            ("KL", limits.kl, [[option.kl for option in options] for options in units.values()]),
            ("bytes", limits.bytes, [[option.bytes for option in options] for options in units.values()]),
        )
        if limit is not None
    ]
    return QuantizationError(
        f"no plan within {' and '.join(needs)}",
        expected="budgets that one plan can keep to at the same time",
        remedy="raise plan.max_kl or plan.max_bytes, or leave to `auto` what the recipe writes out of the plan",
    )
