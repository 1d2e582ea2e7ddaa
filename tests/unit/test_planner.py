from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import QuantizationError
from quantization import planner
from quantization.planner import Option, Workload, choose

ONE_ROW = Workload(shares={1: 1.0})


def options() -> st.SearchStrategy[list[Option]]:
    # Few distinct values, so that ties and sums that meet the budget exactly are common.
    option = st.builds(
        lambda seconds, size, kl: Option(
            kernel=f"{seconds}/{size}/{kl}", seconds={1: seconds}, bytes=size, kl=kl / 1000
        ),
        *(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)),
    )
    return st.lists(option, min_size=1, max_size=4)


def cheapest(units: dict[str, list[Option]], resource: str, budget: float) -> float | None:
    within = [
        sum(o.seconds[1] for o in plan)
        for plan in itertools.product(*units.values())
        if math.fsum(getattr(o, resource) for o in plan) <= budget * (1 + 1e-12)
    ]
    return min(within, default=None)


@settings(max_examples=300, deadline=None)
@given(
    found=st.lists(options(), min_size=1, max_size=5),
    resource=st.sampled_from(["kl", "bytes"]),
    limit=st.integers(0, 30),
)
def test_the_plan_is_the_cheapest_of_all_that_fit(found: list[list[Option]], resource: Any, limit: int) -> None:
    units = {f"unit {n}": unit for n, unit in enumerate(found)}
    budget = limit / 1000 if resource == "kl" else limit
    best = cheapest(units, resource, budget)
    if best is None:
        with pytest.raises(QuantizationError, match="no plan within"):
            choose(units, ONE_ROW, resource=resource, budget=budget)
        return
    plan = choose(units, ONE_ROW, resource=resource, budget=budget)
    assert plan.exact and plan.cost == pytest.approx(best)
    assert getattr(plan, resource) <= budget * (1 + 1e-9) + 1e-15
    assert [c.unit for c in plan.choices] == list(units)
    for choice in plan.choices:
        assert (choice.bytes, choice.kl) in {(o.bytes, o.kl) for o in units[choice.unit] if o.kernel == choice.kernel}


@settings(max_examples=50, deadline=None)
@given(found=st.lists(options(), min_size=4, max_size=6), limit=st.integers(10, 30))
def test_a_thinned_frontier_still_keeps_to_the_budget(found: list[list[Option]], limit: int) -> None:
    units = {f"unit {n}": unit for n, unit in enumerate(found)}
    if cheapest(units, "bytes", limit) is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "FRONTIER_POINTS", 2)
        plan = choose(units, ONE_ROW, resource="bytes", budget=limit)
    assert plan.bytes <= limit


def test_the_workload_decides_between_kernels_of_few_and_of_many_rows() -> None:
    narrow = Option(kernel="4-bit", seconds={1: 1.0, 32: 20.0}, bytes=1, kl=0.0)
    wide = Option(kernel="int8", seconds={1: 2.0, 32: 8.0}, bytes=2, kl=0.0)
    units = {"qkv": [narrow, wide]}

    def kernel(shares: dict[int, float]) -> str:
        return choose(units, Workload(shares=shares), resource="kl", budget=0).choices[0].kernel

    assert kernel({1: 1.0}) == "4-bit" and kernel({32: 1.0}) == "int8"
    assert kernel({1: 0.5, 32: 0.5}) == "4-bit"  # a token of single-stream decode costs as much as a whole step


def test_what_was_not_measured_is_refused() -> None:
    option = Option(kernel="fp32", seconds={1: 1.0}, bytes=1, kl=0.0)
    with pytest.raises(QuantizationError, match=r"not timed at \[8\] rows"):
        choose({"o": [option]}, Workload(shares={1: 0.5, 8: 0.5}), resource="kl", budget=1)
    with pytest.raises(QuantizationError, match="o has no kernel"):
        choose({"o": []}, ONE_ROW, resource="kl", budget=1)
    with pytest.raises(QuantizationError, match="KL nan"):
        choose({"o": [option.model_copy(update={"kl": math.nan})]}, ONE_ROW, resource="kl", budget=1)
