"""The comparison's bookkeeping on made-up timings: order, medians, paired ratios, classes, bars and domination."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.adapters.wire import timed_steps
from benchmarks.peers.judge import (
    BARS,
    Measured,
    Sample,
    Workload,
    bars,
    beaten_presets,
    classes,
    dominators,
    paired_ratio,
    rivals,
    roofline_share,
    schedule,
    speed_bar,
)
from benchmarks.peers.report import Run, page, plot, write
from benchmarks.peers.run import arguments, our_systems
from benchmarks.peers.systems import OURS, PEERS
from tapeout.errors import EvidenceError

ROOT = Path(__file__).parents[2]
ONE = Workload("decode", 1)


def row(
    name: str,
    kl: float | None,
    *speeds: float,
    ours: bool = False,
    bits: float = 8,
    own_row: bool = False,
    workload: Workload = ONE,
    budget_bytes: int | None = None,
) -> Measured:
    sample = Sample(phase=workload.phase, size=workload.size, tokens_per_s=speeds)
    return Measured(
        name=name,
        ours=ours,
        own_row=own_row,
        weight_bits=bits,
        file_bytes=10**8,
        peak_bytes=5 * 10**8,
        samples=(sample,) if speeds else (),
        kl=kl,
        top_token=None if kl is None else 0.9,
        step_bytes=10**8 if ours else None,
        budget_bytes=budget_bytes,
    )


@given(st.lists(st.text("abcdef", min_size=1), min_size=1, max_size=6, unique=True), st.integers(1, 7))
def test_every_system_is_measured_once_a_round_on_every_workload(names: list[str], rounds: int) -> None:
    workloads = [ONE, Workload("prefill", 128)]
    order = list(schedule(names, workloads, rounds))
    assert Counter(order) == Counter((r, w, n) for r in range(rounds) for w in workloads for n in names)


@given(st.integers(2, 6), st.integers(1, 6))
def test_systems_alternate_and_take_turns_at_being_first(count: int, rounds: int) -> None:
    names = [f"s{i}" for i in range(count)]
    order = list(schedule(names, [ONE], rounds))
    for number in range(rounds):
        turn = [name for r, _, name in order if r == number]
        assert turn[0] == names[number % count]
        assert sorted(turn) == names, "nobody is measured twice before all others were measured"


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(0.1, 10)), min_size=1, max_size=9))
def test_a_paired_ratio_is_blind_to_what_slows_both(rounds: list[tuple[float, float]]) -> None:
    """Each round's machine speed cancels, however it drifts; only engines of constant ratio show it exactly."""
    machine = [speed for speed, _ in rounds]
    assert paired_ratio([2 * speed for speed in machine], machine) == pytest.approx(2)
    ratios = sorted(ratio for _, ratio in rounds)
    found = paired_ratio([speed * ratio for speed, ratio in rounds], machine)
    assert ratios[0] * (1 - 1e-9) <= found <= ratios[-1] * (1 + 1e-9)


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        paired_ratio([1.0, 2.0], [1.0])


def test_the_speed_is_the_median_and_nothing_when_it_was_not_measured() -> None:
    measured = row("a", 0.01, 5, 100, 7)
    assert measured.speed(ONE) == 7
    assert measured.speed(Workload("decode", 8)) is None


@pytest.mark.parametrize(
    ("kl", "bits", "own_row", "expected"),
    [
        (0.02, 8, False, ("near-lossless",)),
        (0.0201, 8, False, ()),
        (0.3, 4, False, ("4-bit",)),
        (0.01, 4, False, ("near-lossless", "4-bit")),
        (0.3, 6.25, False, ("4-bit",)),
        (0.3, 6.3, False, ()),
        (0.0, 4, True, ()),
        (None, 4, False, ()),
    ],
)
def test_classes_go_by_measured_kl_and_weight_bits(
    kl: float | None, bits: float, own_row: bool, expected: tuple[str, ...]
) -> None:
    assert classes(row("x", kl, 1, bits=bits, own_row=own_row)) == expected


def test_a_four_bit_peer_counts_only_where_our_kl_is_no_higher() -> None:
    ours = row("ours", 0.2, 30, ours=True, bits=4.7)
    worse, equal, better = (row(n, kl, 10, bits=4) for n, kl in (("worse", 0.4), ("equal", 0.2), ("better", 0.1)))
    assert [m.name for m in rivals(ours, "4-bit", [ours, worse, equal, better])] == ["worse", "equal"]


def test_in_the_near_lossless_class_every_peer_of_the_class_counts() -> None:
    ours, closer = row("ours", 0.02, 30, ours=True), row("closer", 0.001, 10)
    assert rivals(ours, "near-lossless", [ours, closer, row("far", 0.03, 99)]) == [closer]


def test_a_bar_is_held_against_the_rival_that_leaves_us_least_ahead() -> None:
    ours = row("ours", 0.01, 150, 140, 160, ours=True)
    slow, fast = row("slow", 0.01, 50, 50, 50), row("fast", 0.01, 100, 100, 100)
    bar = speed_bar(ours, "near-lossless", ONE, [ours, slow, fast])
    assert (bar.peer, bar.value, bar.bound, bar.met) == ("fast", 1.5, 1.4, True)
    assert speed_bar(row("ours", 0.01, 139, 139, 139, ours=True), "near-lossless", ONE, [fast]).met is False


def test_without_a_rival_no_bar_is_met() -> None:
    bar = speed_bar(row("ours", 0.01, 150, ours=True), "near-lossless", ONE, [row("broken", None, 10)])
    assert (bar.peer, bar.value, bar.met) == (None, None, None)


def test_a_bundle_outside_of_every_class_has_no_bar() -> None:
    assert bars([row("ours", 0.5, 999, ours=True), row("peer", 0.01, 1)], 1e9) == []


@pytest.mark.parametrize(("budget", "met"), [(250 * 10**6, True), (249 * 10**6, False)])
def test_memory_and_roofline_are_held_against_their_bounds(budget: int, met: bool) -> None:
    ours = row("ours", 0.01, 220, ours=True, budget_bytes=budget)
    found = {bar.what: bar for bar in bars([ours], 40e9)}
    assert found["peak memory, MB"].met is met
    assert found["share of the roofline, B=1"].value == pytest.approx(0.55)
    assert roofline_share(row("peer", 0.01, 220), 40e9) is None


def test_the_bars_are_those_of_the_task() -> None:
    assert {str(w): bound for w, bound in BARS["4-bit"].items()} == {
        "decode, B=1": 1.4,
        "decode, B=8": 1.3,
        "decode, B=32": 1.3,
        "prefill, 128 tokens": 1.0,
        "prefill, 1,024 tokens": 1.0,
    }
    assert BARS["near-lossless"][Workload("decode", 32)] == 1.4


def test_a_peer_dominates_only_if_it_is_faster_and_closer_than_all_our_bundles() -> None:
    fast, close = row("fast", 0.3, 200, ours=True), row("close", 0.01, 100, ours=True)
    assert dominators([fast, close, row("between", 0.1, 150)], ONE) == []
    assert dominators([fast, close, row("faster but further", 0.02, 300)], ONE) == []
    assert dominators([fast, close, row("both", 0.005, 300)], ONE) == ["both"]
    assert dominators([fast, close, row("equal", 0.01, 200)], ONE) == []
    assert beaten_presets([fast, close, row("between", 0.1, 250)], ONE) == [("between", "fast")]


def test_domination_is_not_denied_when_nothing_of_ours_was_measured() -> None:
    with pytest.raises(ValueError, match="no bundle of ours"):
        dominators([row("ours", None, 100, ours=True), row("peer", 0.1, 10)], ONE)


def counts(sequence: Sequence[Sequence[int]]) -> tuple[float, int]:
    steps = iter(sequence)
    return timed_steps(lambda: next(steps), len(sequence[0]), 2)


def test_only_steps_in_which_every_row_gains_one_token_are_timed() -> None:
    # Row 1 reads its prompt while row 0 decodes; then two pure steps; then the engine says nothing of row 1 once.
    _, counted = counts([[1, 0], [2, 1], [3, 2], [4, 3]])
    assert counted == 2
    _, counted = counts([[1, 1], [2, 1], [3, 2], [4, 3]])
    assert counted == 2


def run_of(*systems: Measured, failures: dict[str, str] | None = None) -> Run:
    return Run(
        systems=systems,
        failures=failures or {},
        bandwidth_gb_s=40.0,
        threads=2,
        rounds=1,
        prompt_tokens=128,
        new_tokens=128,
        documents=30,
        machine="a processor",
        model="a model",
    )


def test_the_page_says_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    ours, peer = row("ours", 0.01, 150, ours=True), row("peer", 0.011, 100)
    run = run_of(ours, peer, failures={"other": "it ended"})
    write(run, tmp_path)
    text = (tmp_path / "cpu.md").read_text()
    assert "| ours | near-lossless | decode, B=1 | 1.50 | at least 1.40 | peer | yes |" in text
    assert "| **ours** | near-lossless | 0.0100 | 90.0% | 150 |" in text
    assert "- **other**: it ended" in text
    assert Run.model_validate_json((tmp_path / "cpu.json").read_text()) == run
    assert (tmp_path / "cpu.svg").read_text().startswith("<svg")


def test_the_plot_has_a_mark_for_every_engine_with_a_speed_and_a_kl() -> None:
    drawn = plot(run_of(row("ours", 0.0, 150, ours=True), row("peer", 0.3, 90), row("silent", None, 10)))
    assert len(re.findall(r"<circle [^>]*><title>", drawn)) == 2 and "silent" not in drawn


def test_a_run_without_our_own_bundle_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="none of our bundles"):
        write(run_of(row("peer", 0.1, 10)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_rival_is_told_in_the_page() -> None:
    assert "no rival measured" in page(run_of(row("ours", 0.01, 150, ours=True)))


def test_bundles_are_named_on_the_command_line() -> None:
    found = our_systems(arguments(["--ours", "near-lossless=a/b", "--ours", "4-bit=c"]).ours)
    assert {system.name: str(folder) for system, folder in found.items()} == {
        "tapeout near-lossless": "a/b",
        "tapeout 4-bit": "c",
    }
    with pytest.raises(EvidenceError, match="NAME=FOLDER"):
        our_systems(["artifacts/candidate"])


@pytest.mark.parametrize("system", PEERS, ids=lambda system: system.name)
def test_every_peer_has_an_adapter_and_exact_pins(system: object) -> None:
    environment, adapter = getattr(system, "environment", ""), getattr(system, "adapter", "")
    assert environment != OURS
    assert (ROOT / f"benchmarks/peers/adapters/{adapter}.py").is_file()
    pins = (ROOT / f"benchmarks/peers/requirements-{environment}.txt").read_text().split()
    assert pins and all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
