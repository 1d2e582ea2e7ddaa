"""The online test: its error rates in short form, its state, and the file that it is read from."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gate.online import ABOVE, BELOW, HALF, NONE, ON, Result, Row, page, rows, run_row
from evals.check import Outcome
from evals.kinds.online import KIND, Online, frozen_plan
from evals.kinds.online.measure import conclude, fold, judge, load_judged
from evals.kinds.online.sequential import AnytimeTest
from evals.statistics import bounded_mean
from tapeout.errors import ArtifactError, EvidenceError
from tapeout.observations import (
    OBSERVATIONS_FILE,
    PLAN_FILE,
    Observation,
    ObservationLog,
    Observations,
    read_observations,
    read_plan,
)

CHAMPION, CHALLENGER = "a" * 64, "b" * 64
PLAN = frozen_plan(Online(), CHAMPION, CHALLENGER)
ROWS = rows()
RUNS, CONVERSATIONS = 60, 600
shares = st.lists(st.integers(0, 32).map(lambda agree: agree / 32), max_size=80)


def run_test(values: list[float], bound: float = 0.1) -> AnytimeTest:
    test = AnytimeTest(bound, 0.95)
    for value in values:
        test = test.after(value)
    return test


# the test


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.promise != NONE], ids=lambda row: f"{row.promise}: {row.title}"
)
def test_every_promise_is_kept(row: Row) -> None:
    result = run_row(row, RUNS if row.promise != HALF else 15, CONVERSATIONS)
    assert result.holds(), result


def test_a_repeated_test_of_a_fixed_sample_is_wrong_more_often() -> None:
    peeking = [run_row(row, 200, CONVERSATIONS) for row in ROWS if row.peeking]
    assert peeking and all(len(result.passed_after) / result.runs > 0.1 for result in peeking)


def test_the_simulation_sees_a_test_that_does_not_hold() -> None:
    row = next(row for row in ROWS if row.peeking)
    result = run_row(row, 200, CONVERSATIONS)
    assert not Result(row.title, ON, result.runs, result.passed_after, result.failed).holds()
    assert not Result(row.title, ABOVE, result.runs, result.passed_after, result.failed).holds()
    assert not Result(row.title, BELOW, result.runs, (), result.runs).holds()
    assert not Result(row.title, HALF, 3, (500,) * 3, 0).holds()


def test_the_page_shows_every_row() -> None:
    text = page([Result("steady", HALF, 4, (100, 120, 300), 0), Result("odd", ON, 100, (9,) * 50, 0)])
    assert "| steady | 4 | 75.0 ± 21.7 % | 0.0 ± 21.7 % | 210 |  |" in text and "1 of 2 rows" in text


def test_the_page_that_ships_has_every_row_and_keeps_every_promise() -> None:
    shipped = (Path(__file__).parents[2] / "docs/benchmarks/online.md").read_text()
    assert [row.title for row in ROWS if f"| {row.title} |" not in shipped] == []
    assert f"{len(ROWS)} of {len(ROWS)} rows keep their promise" in shipped


@given(shares, st.integers(0, 80))
def test_a_state_that_was_written_and_read_goes_on_exactly(values: list[float], at: int) -> None:
    kept = AnytimeTest(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in json.loads(json.dumps(asdict(run_test(values[:at])), allow_nan=False)).items()
        }
    )
    for value in values[at:]:
        kept = kept.after(value)
    assert kept == run_test(values)


@given(shares, st.randoms())
def test_the_capital_does_not_depend_on_the_order(values: list[float], rng: random.Random) -> None:
    shuffled = rng.sample(values, len(values))
    assert run_test(values).below == pytest.approx(run_test(shuffled).below)


@given(shares, st.sampled_from([0.02, 0.1, 0.4]))
def test_the_capital_is_that_of_the_bet(values: list[float], bound: float) -> None:
    """A bet on both sides at once: no values make both capitals large, and one unit never makes either infinite."""
    test = run_test(values, bound)
    assert all(map(math.isfinite, (*test.below, *test.above))) and test.units == len(values)
    assert test.log_below <= len(values) * math.log(1 + bound / (1 - bound)) + 1e-9


def test_one_conversation_of_total_disagreement_does_not_end_the_test() -> None:
    assert run_test([1.0] + [0.02] * 150).outcome is Outcome.PASS


def test_it_passes_when_the_bound_of_the_gate_does() -> None:
    values = [0.03, 0.06, 0.0, 0.09] * 40
    test = AnytimeTest(0.1, 0.95)
    for count, value in enumerate(values, start=1):
        test = test.after(value)
        upper = bounded_mean(values[:count], 0, 1, 0.95).upper
        assert (test.log_below >= test.needed) == (upper <= 0.1) or abs(upper - 0.1) < 1e-3


def test_a_pass_is_lost_when_traffic_changes_and_a_fail_stays() -> None:
    test, seen = run_test([0.0] * 100), list[Outcome]()
    for value in [0.4] * 200 + [0.0] * 400:
        test = test.after(value)
        seen.append(test.outcome)
    assert list(dict.fromkeys(seen)) == [Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.FAIL]


@pytest.mark.parametrize("value", [-0.01, 1.01, math.nan])
def test_a_value_that_is_no_share_is_refused(value: float) -> None:
    with pytest.raises(ValueError):
        run_test([value])


# the log


def key(number: int) -> str:
    return f"{number:016x}"


def observe(log: ObservationLog, numbers: range, agree: int = 31, tokens: int = 32, failed: bool = False) -> None:
    for number in numbers:
        assert log.pick(key(number))
        log.add(Observation(conversation=key(number), prompt_tokens=9, tokens=tokens, agree=agree, failed=failed))


def test_a_log_goes_on_where_it_was(tmp_path: Path) -> None:
    log = ObservationLog(tmp_path, PLAN)
    observe(log, range(150))
    log.pick(key(1000))
    log.close()
    again = ObservationLog(tmp_path, PLAN)
    assert not again.pick(key(3)) and not again.pick(key(1000)) and len(again.made) == 150
    observe(again, range(150, 200))
    found = read_observations(tmp_path)
    assert (len(found.made), found.missed) == (200, 1)
    assert fold(PLAN, found.made) == run_test([1 / 32] * 200)
    again.close()


@given(cut=st.integers(1, 60))
def test_a_line_that_was_cut_off_is_left_out(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("log")
    log = ObservationLog(folder, PLAN)
    observe(log, range(3))
    log.close()
    path = folder / OBSERVATIONS_FILE
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(read_observations(folder).made) == 2
    log = ObservationLog(folder, PLAN)
    assert log.pick(key(2)) is False
    log.add(Observation(conversation=key(2), prompt_tokens=9, tokens=32, agree=32))
    log.close()
    assert len(read_observations(folder).made) == 3


@pytest.mark.parametrize("line", ["{}", "no JSON", '{"picked": "Who am I?"}', json.dumps({"picked": key(0)})])
def test_lines_of_another_kind_are_refused(tmp_path: Path, line: str) -> None:
    log = ObservationLog(tmp_path, PLAN)
    observe(log, range(2))
    log.close()
    with (tmp_path / OBSERVATIONS_FILE).open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(EvidenceError, match="line 5 of"):
        read_observations(tmp_path)


def test_a_conversation_counts_once(tmp_path: Path) -> None:
    log = ObservationLog(tmp_path, PLAN)
    observe(log, range(2))
    log.add(Observation(conversation=key(1), prompt_tokens=9, tokens=32, agree=32))
    with pytest.raises(EvidenceError, match="observed before"):
        read_observations(tmp_path)


def test_bounds_are_not_changed_once_a_test_has_begun(tmp_path: Path) -> None:
    ObservationLog(tmp_path, PLAN).close()
    for other in (
        frozen_plan(Online(max_disagreement=0.2), CHAMPION, CHALLENGER),
        frozen_plan(Online(), CHAMPION, "c" * 64),
    ):
        with pytest.raises(EvidenceError, match="a test of another plan"):
            ObservationLog(tmp_path, other)
    assert read_plan(tmp_path) == PLAN


def test_two_servers_cannot_write_one_log(tmp_path: Path) -> None:
    log = ObservationLog(tmp_path, PLAN)
    with pytest.raises(EvidenceError, match="another server"):
        ObservationLog(tmp_path, PLAN)
    log.close()
    ObservationLog(tmp_path, PLAN).close()


# the verdict


def made(count: int, agree: int = 31, missed: int = 0, failed: int = 0) -> Observations:
    found = [Observation(conversation=key(i), prompt_tokens=9, tokens=32, agree=agree) for i in range(count)]
    found += [
        Observation(conversation=key(count + i), prompt_tokens=9, tokens=32, agree=0, failed=True)
        for i in range(failed)
    ]
    return Observations(tuple(map(key, range(count + missed + failed))), tuple(found))


@pytest.mark.parametrize(
    ("found", "outcome", "reason"),
    [
        (made(150), Outcome.PASS, "is below 0.1"),
        (made(99), Outcome.INCONCLUSIVE, "99 of at least 100"),
        (made(0), Outcome.INCONCLUSIVE, "0 of at least 100"),
        (made(150, missed=60), Outcome.INCONCLUSIVE, "60 of 210 conversations were missed"),
        (made(150, agree=29), Outcome.INCONCLUSIVE, "not yet told from 0.1"),
        (made(200, agree=26), Outcome.FAIL, "is above 0.1"),
        (made(120, failed=60), Outcome.FAIL, "is above 0.1"),  # a challenger that crashes on what it cannot answer
    ],
)
def test_outcomes(found: Observations, outcome: Outcome, reason: str) -> None:
    verdict = judge(PLAN, found)
    assert (verdict.outcome, reason in verdict.reason) == (outcome, True), verdict.reason


def test_twice_the_bound_does_not_pass() -> None:
    assert judge(PLAN, made(400, agree=32 - 6)).outcome is Outcome.FAIL


def test_a_verdict_is_an_artifact_that_its_observations_give(tmp_path: Path) -> None:
    log = ObservationLog(tmp_path / "log", PLAN)
    observe(log, range(150))
    verdict = conclude(tmp_path / "log", tmp_path / "online")
    observe(log, range(150, 160))  # a server goes on
    log.close()
    assert verdict.record.outcome is Outcome.PASS and verdict.record.conversations == 150
    assert {role: parent.digest for role, parent in verdict.parents.items()} == {
        "champion": CHAMPION,
        "challenger": CHALLENGER,
    }
    assert load_judged(tmp_path / "online").digest == verdict.digest
    block = KIND.block(tmp_path / "online", None)  # type: ignore[arg-type]
    assert block.metrics["online.disagreement"] == 1 / 32 and block.metrics["online.conversations"] == 150
    assert verdict.record.upper is not None and 1 / 32 < verdict.record.upper < 0.1
    for name in (PLAN_FILE, OBSERVATIONS_FILE):
        path = tmp_path / "online" / name
        text = path.read_text()
        path.write_text(text.replace("31", "32").replace("0.1", "0.2"))
        with pytest.raises(ArtifactError):
            load_judged(tmp_path / "online")
        path.write_text(text)


def test_a_folder_without_a_test_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"no plan\.json"):
        conclude(tmp_path, tmp_path / "online")
    assert not (tmp_path / "online").exists()


@pytest.mark.parametrize(
    ("field", "value"), [("max_missed", math.nan), ("max_disagreement", math.nan), ("confidence", 1.5), ("share", -1.0)]
)
def test_a_plan_of_bounds_that_bound_nothing_is_refused(tmp_path: Path, field: str, value: float) -> None:
    """Planted: beside a bound of NaN no share of missed conversations is too large, and none is looser."""
    (tmp_path / PLAN_FILE).write_text(json.dumps(PLAN.model_dump() | {field: value}))
    with pytest.raises(EvidenceError, match="is not a plan"):
        read_plan(tmp_path)
