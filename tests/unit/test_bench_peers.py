"""The arithmetic of the comparison on invented speeds: order, medians, paired ratios, classes, bars, domination."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.adapters.ik_llama import ROW
from benchmarks.peers.adapters.wire import timed_steps
from benchmarks.peers.environments import EXTERNAL, PeerError, install, python_of, versions
from benchmarks.peers.judge import (
    BARS,
    Kind,
    Measured,
    Sample,
    Turns,
    Workload,
    bars,
    classes,
    dominated_bundles,
    dominators,
    paired_ratio,
    rivals,
    schedule,
    speed_bar,
)
from benchmarks.peers.process import PeerFailedError, PeerProcess
from benchmarks.peers.report import Run, page, plot, write
from benchmarks.peers.roofline import in_turns
from benchmarks.peers.run import arguments, our_systems
from benchmarks.peers.systems import OURS, PEERS
from tapeout.errors import EvidenceError
from tests.exported import build_float, family_graph

ROOT = Path(__file__).parents[2]
ONE = Workload("decode", 1)


def measured(
    name: str,
    kl: float | None,
    *speeds: float,
    ours: bool = False,
    bits: float = 8,
    unclassed: bool = False,
    workload: Workload = ONE,
    budget_bytes: int | None = None,
) -> Measured:
    sample = Sample(phase=workload.phase, size=workload.size, tokens_per_s=speeds)
    return Measured(
        name=name,
        ours=ours,
        unclassed=unclassed,
        weight_bits=bits,
        file_bytes=10**8,
        peak_bytes=5 * 10**8,
        samples=(sample,) if speeds else (),
        kl=kl,
        top_token=None if kl is None else 0.9,
        turns=Turns(steps=(10e9, 22e9, 33e9), reads=(20e9, 40e9, 60e9)) if ours else None,
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
        assert sorted(turn) == names, "each system is measured once per round"


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(0.1, 10)), min_size=1, max_size=9))
def test_machine_speed_cancels_in_a_paired_ratio(rounds: list[tuple[float, float]]) -> None:
    """The result is exact for a constant ratio, and otherwise lies between the smallest and the largest ratio."""
    machine = [speed for speed, _ in rounds]
    assert paired_ratio([2 * speed for speed in machine], machine) == pytest.approx(2)
    ratios = sorted(ratio for _, ratio in rounds)
    found = paired_ratio([speed * ratio for speed, ratio in rounds], machine)
    assert ratios[0] * (1 - 1e-9) <= found <= ratios[-1] * (1 + 1e-9)


def test_different_numbers_of_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        paired_ratio([1.0, 2.0], [1.0])


def test_the_speed_is_the_median_and_none_if_it_was_not_measured() -> None:
    system = measured("a", 0.01, 5, 100, 7)
    assert system.speed(ONE) == 7
    assert system.speed(Workload("decode", 8)) is None


@pytest.mark.parametrize(
    ("kl", "bits", "unclassed", "expected"),
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
def test_classes_depend_on_measured_kl_and_weight_bits(
    kl: float | None, bits: float, unclassed: bool, expected: tuple[str, ...]
) -> None:
    assert classes(measured("x", kl, 1, bits=bits, unclassed=unclassed)) == expected


def test_a_four_bit_peer_is_a_rival_only_if_our_kl_is_no_higher() -> None:
    ours = measured("ours", 0.2, 30, ours=True, bits=4.7)
    worse, equal, better = (measured(n, kl, 10, bits=4) for n, kl in (("worse", 0.4), ("equal", 0.2), ("better", 0.1)))
    assert [m.name for m in rivals(ours, "4-bit", [ours, worse, equal, better])] == ["worse", "equal"]


def test_in_the_near_lossless_class_every_peer_is_a_rival() -> None:
    ours, closer = measured("ours", 0.02, 30, ours=True), measured("closer", 0.001, 10)
    assert rivals(ours, "near-lossless", [ours, closer, measured("far", 0.03, 99)]) == [closer]


def test_a_bar_takes_the_rival_with_the_smallest_ratio() -> None:
    ours = measured("ours", 0.01, 150, 140, 160, ours=True)
    slow, fast = measured("slow", 0.01, 50, 50, 50), measured("fast", 0.01, 100, 100, 100)
    bar = speed_bar(ours, "near-lossless", ONE, [ours, slow, fast])
    assert (bar.peer, bar.value, bar.bound, bar.met) == ("fast", 1.5, 1.3, True)
    assert speed_bar(measured("ours", 0.01, 129, 129, 129, ours=True), "near-lossless", ONE, [fast]).met is False


def test_without_a_rival_no_bar_is_met() -> None:
    bar = speed_bar(measured("ours", 0.01, 150, ours=True), "near-lossless", ONE, [measured("broken", None, 10)])
    assert (bar.peer, bar.value, bar.met) == (None, None, None)


def test_a_bundle_in_no_class_has_no_bar() -> None:
    assert bars([measured("ours", 0.5, 999, ours=True), measured("peer", 0.01, 1)]) == []


@pytest.mark.parametrize(("budget", "met"), [(250 * 10**6, True), (249 * 10**6, False)])
def test_memory_and_roofline_are_compared_with_their_bounds(budget: int, met: bool) -> None:
    ours = measured("ours", 0.01, 220, ours=True, budget_bytes=budget)
    found = {bar.what: bar for bar in bars([ours])}
    assert found["peak memory, MB"].met is met
    assert found["share of the roofline, B=1"].value == pytest.approx(0.55)
    for read, met in ((10e9, True), (12e9, False), (9e9, False)):  # above one, the probe has a defect
        turns = ours.model_copy(update={"turns": Turns(steps=(10e9,), reads=(read,))})
        assert [bar.met for bar in bars([turns]) if bar.what.startswith("share")] == [met]


def test_steps_and_reads_take_turns(tmp_path: Path) -> None:
    bundle = build_float(family_graph("llama"), tmp_path / "bundle", slots=1)
    turns = in_turns(bundle.folder, threads=1, prompt=[5, 6, 7], turns=3)
    assert len(turns.steps) == len(turns.reads) == 3
    assert min(turns.steps) > 0 and turns.share > 0


def test_the_bars_are_the_required_ones() -> None:
    assert {str(w): bound for w, bound in BARS["4-bit"].items()} == {
        "decode, B=1": 1.2,
        "decode, B=8": 2.0,
        "decode, B=32": 2.0,
        "prefill, 128 tokens": 1.0,
        "prefill, 1,024 tokens": 1.0,
    }
    assert BARS["near-lossless"][Workload("decode", 32)] == 2.0


def test_each_kind_of_model_has_its_own_bars() -> None:
    speeds = {Workload("decode", 8): 16.0, Workload("prefill", 512): 12.5, Workload("prefill", 4096): 11.0}

    def found(kind: Kind) -> dict[str, bool | None]:
        samples = tuple(Sample(phase=w.phase, size=w.size, tokens_per_s=(s,)) for w, s in speeds.items())
        slower = tuple(s.model_copy(update={"tokens_per_s": (10.0,)}) for s in samples)
        turns = Turns(steps=(8.0,), reads=(10.0,))
        ours = measured("ours", None, ours=True, budget_bytes=10**9).model_copy(
            update={"samples": samples, "turns": turns, "by_format": True, "peak_bytes": 1_240_000_000}
        )
        peer = measured("peer", None).model_copy(update={"samples": slower, "by_format": True})
        return {bar.what: bar.met for bar in bars([ours, peer], kind)}

    decode, short, long = (str(workload) for workload in speeds)
    share, memory = "share of the roofline, B=1", "peak memory, MB"
    assert found("dense") == {decode: False, share: False, memory: True}
    assert found("experts") == {decode: True, short: False, share: True, memory: False}
    assert found("recurrent") == {decode: False, short: True, long: False, share: True, memory: False}


def test_a_peer_dominates_only_if_it_is_faster_and_has_a_lower_kl_than_all_our_bundles() -> None:
    fast, close = measured("fast", 0.3, 200, ours=True), measured("close", 0.01, 100, ours=True)
    assert dominators([fast, close, measured("between", 0.1, 150)], ONE) == []
    assert dominators([fast, close, measured("faster but further", 0.02, 300)], ONE) == []
    assert dominators([fast, close, measured("both", 0.005, 300)], ONE) == ["both"]
    assert dominators([fast, close, measured("equal", 0.01, 200)], ONE) == []
    assert dominated_bundles([fast, close, measured("between", 0.1, 250)], ONE) == [("between", "fast")]


def test_domination_is_unknown_if_no_bundle_of_ours_was_measured() -> None:
    with pytest.raises(ValueError, match="no bundle of ours"):
        dominators([measured("ours", None, 100, ours=True), measured("peer", 0.1, 10)], ONE)


def counts(history: Sequence[Sequence[int]]) -> tuple[float, int]:
    steps = iter(history)
    return timed_steps(lambda: next(steps), len(history[0]), 2)


def test_only_steps_in_which_every_sequence_gains_one_token_are_timed() -> None:
    # Sequence 1 is in prefill while sequence 0 decodes.
    _, counted = counts([[1, 0], [2, 1], [3, 2], [4, 3]])
    assert counted == 2
    # Sequence 1 gains no token in one step.
    _, counted = counts([[1, 1], [2, 1], [3, 2], [4, 3]])
    assert counted == 2


def run_of(*systems: Measured, failures: dict[str, str] | None = None) -> Run:
    return Run(
        systems=systems,
        failures=failures or {},
        threads=2,
        rounds=1,
        prompt_tokens=128,
        new_tokens=128,
        documents=30,
        machine="a processor",
        model="a model",
    )


def test_the_page_shows_what_was_measured_and_what_failed(tmp_path: Path) -> None:
    ours, peer = measured("ours", 0.01, 150, ours=True), measured("peer", 0.011, 100)
    run = run_of(ours, peer, failures={"other": "it ended"})
    write(run, tmp_path, "cpu")
    text = (tmp_path / "cpu.md").read_text()
    assert "| ours | near-lossless | decode, B=1 | 1.50 | at least 1.30 | peer | yes |" in text
    assert "| **ours** | near-lossless | 0.0100 | 90.0% | 150 |" in text
    assert "- **other**: it ended" in text
    assert Run.model_validate_json((tmp_path / "cpu.json").read_text()) == run
    assert (tmp_path / "cpu.svg").read_text().startswith("<svg")


def test_the_plot_has_a_point_for_every_engine_with_a_speed_and_a_kl() -> None:
    svg = plot(run_of(measured("ours", 0.0, 150, ours=True), measured("peer", 0.3, 90), measured("silent", None, 10)))
    assert len(re.findall(r"<title>(?:ours|peer): ", svg)) == 2 and "silent" not in svg


def test_a_run_without_our_own_bundle_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="none of our bundles"):
        write(run_of(measured("peer", 0.1, 10)), tmp_path / "out", "cpu")
    assert not (tmp_path / "out").exists()


def test_the_page_says_that_a_rival_is_missing() -> None:
    assert "no rival measured" in page(run_of(measured("ours", 0.01, 150, ours=True)), "cpu")


def test_bundles_are_named_on_the_command_line() -> None:
    found = our_systems(arguments(["--ours", "near-lossless=a/b", "--ours", "4-bit=c"]).ours)
    assert {system.name: str(folder) for system, folder in found.items()} == {
        "tapeout near-lossless": "a/b",
        "tapeout 4-bit": "c",
    }
    with pytest.raises(EvidenceError, match="NAME=FOLDER"):
        our_systems(["artifacts/candidate"])
    with pytest.raises(EvidenceError, match="NAME=FOLDER"):
        our_systems(["../x=artifacts/candidate"])
    with pytest.raises(EvidenceError, match="twice"):
        our_systems(["a=b", "a=c"])


@pytest.mark.parametrize("reaped", [False, True], ids=["zombie", "reaped"])
def test_a_peer_that_ends_is_reported_wherever_it_is_noticed(tmp_path: Path, reaped: bool) -> None:
    peer = PeerProcess("ours", Path(sys.executable), tmp_path / "log")
    with peer:
        peer.pause()  # as a benchmark does between commands
        assert peer.peak_memory_bytes() > 0
        pid = peer._process.pid  # pyright: ignore[reportPrivateUsage]
        os.killpg(pid, signal.SIGKILL)
        while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            time.sleep(0.01)
        if reaped:
            peer.pause()
        with pytest.raises(PeerFailedError, match="ended before its memory was read"):
            peer.peak_memory_bytes()
        with pytest.raises(PeerFailedError, match="ours ended during the command prefill"):
            peer.ask("prefill", tokens=[1])


def test_an_engine_whose_memory_was_not_read_does_not_meet_its_bound() -> None:
    found = bars([measured("ours", 0.01, 150, ours=True, budget_bytes=10**8).model_copy(update={"peak_bytes": 0})])
    assert not next(bar for bar in found if bar.what == "peak memory, MB").met


@pytest.mark.parametrize("system", PEERS, ids=lambda system: system.name)
def test_every_peer_has_an_adapter_and_exact_pins(system: object) -> None:
    environment, adapter = getattr(system, "environment", ""), getattr(system, "adapter", "")
    assert environment != OURS
    assert (ROOT / f"benchmarks/peers/adapters/{adapter}.py").is_file()
    if environment in EXTERNAL:
        return
    pins = (ROOT / f"benchmarks/peers/requirements-{environment}.txt").read_text().split()
    assert pins and all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)


def test_a_peer_that_the_user_builds_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TAPEOUT_IK_LLAMA", raising=False)
    with pytest.raises(PeerError, match=r"skipped: \$TAPEOUT_IK_LLAMA is not set"):
        install("ik-llama", print)
    monkeypatch.setenv("TAPEOUT_IK_LLAMA", str(tmp_path / "missing"))
    with pytest.raises(PeerError, match=r"is .*missing"):
        install("ik-llama", print)
    monkeypatch.setenv("TAPEOUT_IK_LLAMA", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/libllama.so").write_bytes(b"a library")
    install("ik-llama", print)
    assert python_of("ik-llama") == Path(sys.executable) and len(versions("ik-llama")["ik-llama"]) == 12


def test_the_seconds_of_prompts_and_of_steps_are_read_from_the_table_of_ik_llama() -> None:
    row = "|   128 |    16 |    8 |   1152 |    0.540 |  1896.45 |    0.301 |   424.63 |    0.841 |  1369.3 |"
    found = ROW.search(f"|    PP |     TG |    B |\n|-------|--------|------|\n{row}\n")
    assert found and found.groups() == ("128", "16", "8", "0.540", "0.301")


def test_without_kl_classes_follow_from_the_bits_per_weight() -> None:
    eight, six, four = (measured(str(b), None, 10, bits=b).model_copy(update={"by_format": True}) for b in (8, 6.6, 4))
    assert [classes(m) for m in (eight, six, four)] == [("near-lossless",), ("near-lossless",), ("4-bit",)]
    ours = measured("ours", None, 30, ours=True, bits=7).model_copy(update={"by_format": True})
    assert rivals(ours, "near-lossless", [ours, eight, six, four]) == [eight, six]
    judged = measured("judged", 0.2, 30, ours=True, bits=4.7)  # the KL of a peer without logits is not known
    assert rivals(judged, "4-bit", [judged, four]) == [four]


def test_a_run_of_random_weights_shows_no_kl(tmp_path: Path) -> None:
    systems = [measured(name, None, speed, ours=name == "ours") for name, speed in (("ours", 150), ("peer", 100))]
    run = run_of(*(m.model_copy(update={"by_format": True}) for m in systems)).model_copy(update={"documents": 0})
    write(run, tmp_path, "a-shape")
    text = (tmp_path / "a-shape.md").read_text()
    assert "| ours | near-lossless | decode, B=1 | 1.50 | at least 1.30 | peer | yes |" in text
    assert "Random weights say nothing of quality" in text and "Domination" not in text and ".svg" not in text
    assert not (tmp_path / "a-shape.svg").exists()
