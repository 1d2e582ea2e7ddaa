from __future__ import annotations

import ctypes
import itertools
import math
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantization import plan_solver
from quantization.plan_solver import Option, PlanBudget, Workload, choose, frontier
from tapeout.errors import QuantizationError

DECODE = Workload(shares={1: 1.0})


def options() -> st.SearchStrategy[list[Option]]:
    # Few distinct values whose sums are exact, so that ties and sums that meet the budget are common.
    option = st.builds(
        lambda seconds, size, kl: Option(name=f"{seconds}/{size}/{kl}", seconds={1: seconds}, bytes=size, kl=kl / 1024),
        *(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)),
    )
    return st.lists(option, min_size=1, max_size=4)


Units = dict[str, list[Option]]


def plans_within(units: Units, limits: PlanBudget) -> list[tuple[Option, ...]]:
    return [
        plan
        for plan in itertools.product(*units.values())
        if (limits.kl is None or math.fsum(o.kl for o in plan) <= limits.kl * (1 + 1e-12))
        and (limits.bytes is None or sum(o.bytes for o in plan) <= limits.bytes)
    ]


def total(plan: tuple[Option, ...], goal: str) -> float:
    return sum(o.seconds[1] if goal == "seconds" else o.bytes for o in plan)


@settings(max_examples=300, deadline=None)
@given(
    found=st.lists(options(), min_size=1, max_size=5),
    kl=st.none() | st.integers(0, 30).map(lambda n: n / 1024),
    size=st.none() | st.integers(0, 30),
    goal=st.sampled_from(["seconds", "bytes"]),
)
def test_the_plan_is_the_best_of_all_that_fit(
    found: list[list[Option]], kl: float | None, size: int | None, goal: Any
) -> None:
    units, limits = {f"unit {n}": unit for n, unit in enumerate(found)}, PlanBudget(kl, size)
    within = plans_within(units, limits)
    if not within:
        with pytest.raises(QuantizationError, match="no plan within"):
            choose(units, DECODE, limits, goal)
        return
    plan = choose(units, DECODE, limits, goal)
    assert plan.exact and getattr(plan, goal) == pytest.approx(min(total(other, goal) for other in within))
    assert kl is None or plan.kl <= kl * (1 + 1e-9) + 1e-15
    assert size is None or plan.bytes <= size
    assert [c.unit for c in plan.choices] == list(units)
    for choice in plan.choices:
        assert (choice.bytes, choice.kl) in {(o.bytes, o.kl) for o in units[choice.unit] if o.name == choice.option}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), goal=st.sampled_from(["seconds", "bytes"]), tight=st.booleans())
@example(seed=1855, goal="seconds", tight=False)  # the best plan meets both budgets exactly
def test_figures_as_they_are_measured_are_weighed_to_the_last_digit(seed: int, goal: Any, tight: bool) -> None:
    random = Random(seed)
    units = {
        f"unit {n}": [
            Option(
                name=str(k),
                seconds={1: random.uniform(1e-6, 1e-4)},
                bytes=random.randrange(1000, 10**8),
                kl=random.uniform(0, 1e-3) * random.choice([1e-5, 1]),
            )
            for k in range(4)
        ]
        for n in range(4)
    }
    plans = list(itertools.product(*units.values()))
    some = random.choice(plans) if not tight else min(plans, key=lambda plan: math.fsum(o.kl for o in plan))
    limits = PlanBudget(kl=math.fsum(o.kl for o in some), bytes=None if tight else sum(o.bytes for o in some))
    best = min(total(plan, goal) for plan in plans_within(units, limits))
    plan = choose(units, DECODE, limits, goal)
    assert plan.exact and getattr(plan, goal) == pytest.approx(best, rel=1e-7)
    assert limits.kl is not None and plan.kl <= limits.kl * (1 + 1e-12)
    assert limits.bytes is None or plan.bytes <= limits.bytes


def test_of_plans_of_equal_value_the_one_of_least_kl_is_chosen() -> None:
    units = {name: [Option(name=str(kl), seconds={1: 1.0}, bytes=8, kl=kl) for kl in (0.3, 0.1, 0.2)] for name in "ab"}
    assert choose(units, DECODE, PlanBudget(bytes=16), "bytes").kl == pytest.approx(0.2)
    assert [plan.kl for plan in frontier(units, DECODE)] == [pytest.approx(0.2)]


def test_a_plan_that_time_did_not_allow_to_prove_keeps_to_the_budget_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = Random(0)
    units = {
        f"unit {n}": [
            Option(name=str(k), seconds={1: random.random()}, bytes=random.randrange(10**6), kl=random.random())
            for k in range(8)
        ]
        for n in range(60)
    }
    limits = PlanBudget(kl=16.0, bytes=20_000_000)
    monkeypatch.setattr(plan_solver, "SOLVER_SECONDS", 600.0)
    best = choose(units, DECODE, limits)
    monkeypatch.setattr(plan_solver, "SOLVER_SECONDS", 1e-6)
    try:
        hurried = choose(units, DECODE, limits)
    except QuantizationError as error:
        assert "HiGHS found no plan" in error.found
    else:
        assert not hurried.exact and hurried.kl <= 16.0 and hurried.bytes <= 20_000_000
        assert hurried.seconds >= best.seconds


@settings(max_examples=100, deadline=None)
@given(found=st.lists(options(), min_size=1, max_size=4))
def test_the_frontier_holds_the_best_plan_of_every_budget(found: list[list[Option]]) -> None:
    units = {f"unit {n}": unit for n, unit in enumerate(found)}
    points = frontier(units, DECODE)
    assert [p.kl for p in points] == sorted(p.kl for p in points)
    assert all(after.seconds < before.seconds for before, after in itertools.pairwise(points))
    for point in points:
        assert choose(units, DECODE, PlanBudget(kl=point.kl)).seconds == pytest.approx(point.seconds)
    assert points[-1].seconds == pytest.approx(choose(units, DECODE, PlanBudget()).seconds)


def test_a_long_frontier_is_thinned_but_keeps_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [Option(name=str(n), seconds={1: 10.0 - n}, bytes=1, kl=n / 100) for n in range(10)]
    monkeypatch.setattr(plan_solver, "FRONTIER_SHOWN", 4)
    points = frontier({"qkv": kernels}, DECODE)
    assert len(points) <= 5 and (points[0].kl, points[-1].kl) == (0.0, 0.09)


def test_the_workload_decides_between_options_of_few_and_of_many_tokens() -> None:
    narrow = Option(name="4-bit", seconds={1: 1.0, 32: 20.0}, bytes=1, kl=0.0)
    wide = Option(name="int8", seconds={1: 2.0, 32: 8.0}, bytes=2, kl=0.0)
    units = {"qkv": [narrow, wide]}

    def option(shares: dict[int, float]) -> str:
        return choose(units, Workload(shares=shares), PlanBudget(kl=0.0)).choices[0].option

    assert option({1: 1.0}) == "4-bit" and option({32: 1.0}) == "int8"
    assert option({1: 0.5, 32: 0.5}) == "4-bit"  # a token of single-stream decode costs as much as a whole step


@pytest.mark.parametrize("seed", [221, 375, 619])  # where HiGHS repairs a solution, and prints that it does
def test_nothing_is_printed(capfd: pytest.CaptureFixture[str], seed: int) -> None:
    random = Random(seed)
    units: dict[str, list[Option]] = {}
    for n in range(10):
        size = random.randrange(10**3, 10**7)
        units[f"unit {n}"] = [
            Option(
                name=str(bits),
                seconds={1: size * bits * random.uniform(0.9, 1.1) * 1e-9},
                bytes=size * bits // 8,
                kl=random.uniform(0.5, 2) * 10 ** (-bits / 2),
            )
            for bits in (4, 6, 8, 16)
        ]
    kls = [[option.kl for option in options] for options in units.values()]
    least, most = math.fsum(map(min, kls)), math.fsum(map(max, kls))
    libc = ctypes.CDLL(None)
    libc.printf(b"before\n")  # into the buffer of the C library
    choose(units, DECODE, PlanBudget(kl=least + (most - least) * random.random()))
    libc.printf(b"after\n")
    libc.fflush(None)
    assert capfd.readouterr().out == "before\nafter\n"


def test_what_was_not_measured_is_refused() -> None:
    option = Option(name="fp32", seconds={1: 1.0}, bytes=1, kl=0.0)
    with pytest.raises(QuantizationError, match=r"not timed at \[8\] tokens"):
        choose({"o": [option]}, Workload(shares={1: 0.5, 8: 0.5}), PlanBudget(kl=1.0))
    with pytest.raises(QuantizationError, match="o has no option"):
        choose({"o": []}, DECODE, PlanBudget(kl=1.0))
    with pytest.raises(QuantizationError, match="KL nan"):
        choose({"o": [option.model_copy(update={"kl": math.nan})]}, DECODE, PlanBudget(kl=1.0))
