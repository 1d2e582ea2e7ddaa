"""The short form of `make simulate-gate`: every promise, with few runs, and what a broken bound looks like there."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike
from scipy.special import stdtrit

import evals.conditions
import evals.kinds.tasks
from benchmarks.gate.page import page
from benchmarks.gate.rows import BAD, BOUND, EQUAL, GOOD, NONE, RARE, Result, Row, run_row
from benchmarks.gate.simulate import rows
from evals.statistics import Estimate, bounded_mean

RUNS = 100
ROWS = rows()
TAKEN = (
    ("the run's own", "32 documents"),
    ("log-normal, σ = 1.5", "300 documents"),
    ("log-normal, σ = 1.5", "300 prompts"),
    ("rare: 1 % of documents, 50 times", "300 documents"),
    ("4 % of answers change, the same loss on every task", "2,500 items"),
    ("every task loses the margin", "2,500 items"),
    ("openbookqa alone loses 9 points", "500 items"),
    ("log-normal, σ = 1.5", "32 documents of source"),
    ("the engine guesses", "2,500 items"),
    ("the source model answers a fifth of all questions in another way", "48 questions"),
    ("the log-likelihoods of one task are shifted by twice the bound", "48 questions"),
    ("one way of serving has twice the bound", "one slot"),
    ("one token is drawn that numpy does not draw", "256 draws a setting"),
    ("twice the bound of one kind's tokens do not follow", "240 tokens a kind"),
    ("skewed noise", "3 repeats"),
    ("skewed noise", "5 repeats"),
    ("skewed noise", "7 repeats"),
)  # of the rows that promise no wrong pass


def name(row: Row) -> str:
    return f"{', '.join(row.checks)}-{next(iter(row.checks.values()))}-{row.units}-{row.promise}"


def taken(row: Row) -> bool:
    return row.promise in (BOUND, RARE, BAD) and any((title, row.units) in TAKEN for title in row.checks.values())


@pytest.mark.parametrize("row", filter(taken, ROWS), ids=name)
def test_a_check_is_seldom_wrong(row: Row) -> None:
    for result in run_row(row, RUNS):
        assert result.holds(0.95), result


def test_every_kind_of_row_is_taken() -> None:
    assert {row.promise for row in ROWS if taken(row)} == {BOUND, RARE, BAD}
    assert len(list(filter(taken, ROWS))) == len(TAKEN) + 1  # rare documents, with a limit and without


@pytest.mark.parametrize("row", [row for row in ROWS if row.promise in (GOOD, EQUAL)], ids=name)
def test_a_good_engine_passes_and_an_equal_one_does_not_fail(row: Row) -> None:
    (result,) = run_row(row, 15)
    assert result.holds(0.95), result


def student(values: ArrayLike, low: float, high: float, confidence: float) -> Estimate:
    x = np.asarray(values, dtype=np.float64)
    reach = float(stdtrit(len(x) - 1, confidence)) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Estimate(float(x.mean()), float(x.mean()) - reach, float(x.mean()) + reach, len(x), float(x.var(ddof=1)))


def test_the_simulation_sees_a_bound_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (
        row
        for row in ROWS
        if row.promise == BOUND and row.checks.get("kl", "").startswith("rare: 1 %") and "300" in row.units
    )
    monkeypatch.setattr(evals.conditions, "bounded_mean", student)
    found = {result.check: result for result in run_row(row, 4 * RUNS)}
    assert not found["kl"].holds(0.95)


def test_the_simulation_sees_a_check_of_tasks_that_always_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in ROWS if row.checks == {"accuracy_worst_task": "openbookqa alone loses the margin"})
    monkeypatch.setattr(
        evals.kinds.tasks,
        "_worst_task",
        lambda items, condition: condition.check(bounded_mean([0.0] * 300, -1, 1, 0.95)),
    )
    (result,) = run_row(row, RUNS)
    assert not result.holds(0.95)


def test_results_of_equal_seeds_are_equal() -> None:
    row = next(row for row in ROWS if row.units == "5 repeats")
    assert run_row(row, 200, seed=1) == run_row(row, 200, seed=1) != run_row(row, 200, seed=2)


def test_the_page_shows_every_row_and_names_a_broken_promise() -> None:
    kept = Result("kl", "own", "300 documents", BOUND, 2000, 10, 0)
    broken = Result("kl", "rare", "300 documents", RARE, 2000, 400, 0)
    free = Result("parity_kl", "rare", "32 documents", NONE, 2000, 400, 0)
    text = page([kept, broken, free], 2000, 0.95)
    assert [kept.holds(0.95), broken.holds(0.95), free.holds(0.95)] == [True, False, True]
    assert "| kl | rare | 300 documents | 20.0 ± 0.89 % | 0.0 ± 0.05 % |" in text and "2 of 3 rows" in text


def test_the_page_that_ships_keeps_every_promise() -> None:
    shipped = (Path(__file__).parents[2] / "docs/benchmarks/gate.md").read_text()
    count = sum(len(row.checks) for row in ROWS)
    assert f"{count} of {count} rows keep their promise" in shipped
