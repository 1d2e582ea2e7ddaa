"""What the page of ``benchmarks.fleet.streaming`` says of figures that are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.fleet.gaps import Gaps
from benchmarks.fleet.new_engine import FirstToken
from benchmarks.fleet.streaming import QUICK, Found, bars, page

COST = {"gateway": 5.0, "engine": 4.0, "both": 9.0, "both_least": 8.0, "both_most": 10.0}
TRANSIT = {"transit_p50": 300.0, "transit_p99": 900.0}
ADMITTED = {"mean": 10.0, "p50": 9.0, "p99": 20.0, "processor": 100.0}


def figures(both: float = 10.0, transit: float = 350.0) -> dict[str, Any]:
    """``both``, ``transit``: of the fleet of one."""
    local = COST | TRANSIT
    costs = {
        "local engine": local,
        "fleet of one": local | {"both": both, "transit_p50": transit},
        "fleet of two": local,
    }
    return {"step_seconds": 0.01, "streams": {"16": costs, "64": costs}}


SOUND = Found(
    "candidate",
    2,
    QUICK,
    figures(),
    {
        "SIGKILL": Gaps(1, [0.5, 0.6], [0.3, 0.4], [0.7], 8, 8),
        "SIGSTOP": Gaps(1, [1.2, 1.4], [0.3, 0.4], [0.7], 8, 8),
    },
    {"cold": [FirstToken(0.9, 3.0, 4.0, 2.0)], "standby": [FirstToken(0.1, 0.3, 0.4, 2.0)]},
    {"per_second": 200, "ways": {"one gateway alone": ADMITTED, "shared, SQLite": ADMITTED | {"mean": 30.0}}},
)


def missed(found: Found) -> list[str]:
    return [bar.what for bar in bars(found) if not bar.holds]


def test_a_gap_at_a_kill_may_be_longer_by_what_computing_the_prompt_takes() -> None:
    assert not missed(SOUND) and "11 of 11 bars hold" in page(SOUND)
    late = {**SOUND.gaps, "SIGKILL": replace(SOUND.gaps["SIGKILL"], alone=[0.3, 0.3])}
    assert missed(replace(SOUND, gaps=late)) == ["gap at SIGKILL beyond computing the prompt again"]
    late = {**SOUND.gaps, "SIGSTOP": replace(SOUND.gaps["SIGSTOP"], gaps=[1.2, 1.6])}
    assert missed(replace(SOUND, gaps=late)) == ["gap at SIGSTOP"]


def test_an_answer_that_differs_and_a_signal_that_interrupted_nothing_miss_the_bar() -> None:
    for gaps in (replace(SOUND.gaps["SIGKILL"], same=7), Gaps(1, answers=8, same=8)):
        assert len(missed(replace(SOUND, gaps={**SOUND.gaps, "SIGKILL": gaps}))) == 1


def test_tokens_new_engines_and_admission_are_compared_with_their_bars() -> None:
    tokens = replace(SOUND, tokens=figures(both=11.0))
    (what,) = missed(tokens)
    assert what.endswith("64 streams a replica")
    assert len(missed(replace(SOUND, tokens=figures(transit=401.0)))) == 2
    slow = [*SOUND.new["standby"], FirstToken(0.1, 0.5, 0.6, 2.0)]
    assert missed(replace(SOUND, new={**SOUND.new, "standby": slow})) == [
        "step of the load to the first token of another engine, standby"
    ]
    ways = {**SOUND.admission["ways"], "shared, PostgreSQL": ADMITTED | {"mean": 61.0}}
    found = replace(SOUND, admission={**SOUND.admission, "ways": ways})
    assert missed(found) == ["added to admission, limits shared, PostgreSQL"]
