"""``tapeout engine`` once a server has asked for another bundle: which one it serves, and what it says of the other."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from types import SimpleNamespace

import pytest

from pipeline.cli import engine
from pipeline.cli.engine import serve
from runtime.wire.messages import Reopen
from runtime.wire.start import Start
from tapeout.errors import ArtifactError, FingerprintError

REFUSED = {
    "unjudged": FingerprintError("it has no evidence for x86-64-avx2, which this machine has", expected="evidence"),
    "gone": ArtifactError("no record.json", expected="a bundle"),
}


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the bundle before is left here, and looking for it in a process of many tests takes seconds."""
    monkeypatch.setattr(engine, "gc", SimpleNamespace(collect=lambda: None))


def served(asked: Sequence[str], broken: str = "") -> list[tuple[str, str]]:
    """The bundles that were opened, each with its notice, while servers asked for these in turn."""
    opened: list[tuple[str, str]] = []
    left = list(asked)

    def start(source: str) -> Start:
        if source in REFUSED:
            raise REFUSED[source]
        return Start(source)

    def listen(start: Start, notice: str = "") -> Reopen | None:
        if start.bundle == broken:
            raise ArtifactError("its weights are damaged", expected="whole files")
        opened.append((start.bundle, notice))
        return Reopen(left.pop(0), 1.0) if left else None

    serve(Start("first"), start, listen)
    return opened


def test_a_start_is_counted_from_that_of_the_process() -> None:
    assert 0 < engine.seconds_of_process() < monotonic() + 1, "at most since the machine has started"
    before, begun = engine.seconds_of_process(), monotonic()
    assert engine.seconds_of_process() - before <= monotonic() - begun + 1e-3


def test_it_opens_what_is_asked_for_and_goes_back() -> None:
    assert served(["second", "", "third", "", ""]) == [
        *[("first", ""), ("second", ""), ("first", "")],
        *[("third", ""), ("first", ""), ("third", "")],
    ]


def test_one_that_is_told_twice_to_open_a_bundle_still_knows_the_one_before() -> None:
    """A release that was interrupted tells it again. Planted: a rollback opens the new bundle once more."""
    assert [bundle for bundle, _ in served(["second", "second", ""])] == ["first", "second", "second", "first"]


@pytest.mark.parametrize(("source", "why"), [("unjudged", "no evidence for x86-64-avx2"), ("gone", "no record.json")])
def test_what_may_not_be_served_here_leaves_the_bundle_and_says_why(source: str, why: str) -> None:
    """Planted: the new bundle opened without the checks of the start, or no bundle at all."""
    first, again, second = served([source, "second"])
    assert first == ("first", "") and again[0] == "first" and why in again[1] and second == ("second", "")


def test_what_does_not_open_leaves_the_bundle_and_says_why() -> None:
    _, again = served(["damaged"], broken="damaged")
    assert again[0] == "first" and "weights are damaged" in again[1]
