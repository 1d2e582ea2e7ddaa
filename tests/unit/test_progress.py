"""Progress of long work, in a log and on a terminal."""

from __future__ import annotations

import re
import time
from io import StringIO
from types import SimpleNamespace

import pytest

from tapeout import progress
from tapeout.progress import ProgressBar, Steps


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """Standard error as a file, and lines every 20 ms."""
    written = StringIO()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=written))
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.02)
    return written


def wait_for(log: StringIO, text: str) -> None:
    """Until ``text`` is in the log; a minute is for a machine that stands still."""
    end = time.monotonic() + 60
    while text not in log.getvalue() and time.monotonic() < end:
        time.sleep(0.005)
    assert text in log.getvalue()


def test_a_log_gets_whole_lines_with_a_rate_and_what_is_left(log: StringIO) -> None:
    for item in ProgressBar(range(4), title="calibrating", unit="sample"):
        if item == 3:
            wait_for(log, "75% (3 of 4)")
    lines = log.getvalue().splitlines()
    assert "\r" not in log.getvalue()
    pattern = r"  calibrating: 75% \(3 of 4\), [\d.]+ sample/s, \d\d:\d\d gone, \d\d:\d\d left"
    assert any(re.fullmatch(pattern, line) for line in lines), lines


def test_a_unit_that_takes_long_does_not_silence_a_log(log: StringIO) -> None:
    with ProgressBar(title="compiling", unit="step", total=2):
        wait_for(log, "0% (0 of 2)")
        before = log.getvalue().count("\n")
        while log.getvalue().count("\n") < before + 2:
            time.sleep(0.005)


def test_work_without_a_known_total_says_how_much_is_done(log: StringIO) -> None:
    with ProgressBar(title="model.safetensors", unit="B") as bar:
        bar.update(5_000_000)
        wait_for(log, "model.safetensors: 5.00M")
        bar.show(6_000_000, 12_000_000)
        wait_for(log, "50% (6.00M of 12.0M)")


def test_resumed_work_counts_what_was_done_before_but_not_in_its_rate(log: StringIO) -> None:
    with ProgressBar(title="calibrating", unit="sample", total=200, done=100) as bar:
        wait_for(log, "50% (100 of 200), ? sample/s")
        bar.update()
        wait_for(log, "(101 of 200)")


def test_slow_work_says_how_long_each_takes(log: StringIO) -> None:
    with ProgressBar(title="quantizing", unit="layer", total=9) as bar:
        bar.update()
        bar.start_t -= 60
        wait_for(log, " s/layer")


def test_short_hidden_and_ended_work_writes_nothing(log: StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 30.0)
    assert list(ProgressBar(range(3), title="short", unit="step")) == [0, 1, 2]
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.001)
    with ProgressBar(title="hidden", unit="step", hidden=True):
        time.sleep(0.02)
    assert log.getvalue() == ""

    with ProgressBar(title="seen", unit="step"):
        wait_for(log, "seen")
    written = log.getvalue()
    time.sleep(0.05)
    assert log.getvalue() == written


def test_an_error_ends_the_lines(log: StringIO) -> None:
    with pytest.raises(ValueError, match="broken") as ended:
        for _ in ProgressBar(range(3), title="seen", unit="step"):
            wait_for(log, "seen")
            raise ValueError("broken")
    del ended  # its frame holds the iterator
    written = log.getvalue()
    time.sleep(0.05)
    assert log.getvalue() == written


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    assert list(ProgressBar(range(3), title="quantizing", unit="layer")) == [0, 1, 2]
    assert "\rquantizing: 100%|" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()


def test_a_step_that_shows_nothing_of_its_own_is_named_again(log: StringIO) -> None:
    with Steps("export") as steps:
        wait_for(log, "  export, 00:00 gone\n")
        steps.begin("tracing")
        wait_for(log, "  export: tracing, 00:00 gone\n")
        with ProgressBar(title="weights", unit="tensor", total=2):
            wait_for(log, "weights: 0%")
            time.sleep(0.05)
            written = log.getvalue().count("tracing")
            time.sleep(0.1)
            assert log.getvalue().count("tracing") == written  # the bar says more
        while log.getvalue().count("tracing") == written:
            time.sleep(0.005)
    written = log.getvalue()
    time.sleep(0.05)
    assert log.getvalue() == written


def test_short_steps_and_hidden_bars_say_nothing(log: StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 30.0)
    with Steps("export") as steps:
        steps.begin("tracing")
        time.sleep(0.05)
    assert log.getvalue() == ""
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.02)
    with Steps("serving"), ProgressBar(title="answers", unit="answer", hidden=True):
        wait_for(log, "serving, ")
