"""The frame in which operators are timed: how many copies run, when they are loaded, and what a time is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engines.costs.timing import ROUNDS, CasesByTokens, OperatorTimer, TimedCase
from engines.target import Target
from tapeout.fingerprint import Fingerprint
from tests.native import own_cache

COPY_SECONDS = {"small": 1e-3, "large": 2e-3}


@dataclass
class Run:
    """A model that is loaded. A copy takes as long for each token as its alternative says."""

    name: str
    copies: int
    log: list[tuple[str, int]]  # alternative and tokens of each run
    tokens: int = 0

    def bind(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.tokens = len(arrays["x"])

    def seconds(self) -> float:
        self.log.append((self.name, self.tokens))
        return self.copies * self.tokens * COPY_SECONDS[self.name]


@dataclass
class Machine:
    name: str = "fake"
    loaded: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])  # alternative and copies
    log: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def timer(self, model: ir.Model, threads: int) -> Run:
        name, copies = cast(tuple[str, int], model)
        self.loaded.append((name, copies))
        return Run(name, copies, self.log)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(machine="fake", features=(), libraries={})

    def kernels_version(self) -> str:
        return ""


@dataclass(frozen=True)
class Layer:
    """``shared``: one model is for all numbers of tokens."""

    shared: bool
    most_copies: int | None = None
    names: tuple[str, ...] = ("small", "large")

    def described(self, tokens: int) -> Mapping[str, Any]:
        return {"tokens": tokens}

    def cases(self, target: Target[Any], tokens: Collection[int]) -> CasesByTokens:
        for counts in [tokens] if self.shared else [[count] for count in tokens]:
            yield counts, {"small": self._case("small", 10), "large": self._case("large", 40)}

    def _case(self, name: str, size: int) -> TimedCase:
        def model(copies: int) -> ir.Model:
            return cast(ir.Model, (name, copies))

        def arrays(copies: int, tokens: int) -> dict[str, NDArray[Any]]:
            return {"x": np.zeros(tokens)}

        return TimedCase(size, model, arrays, self.most_copies)


def timer(machine: Machine, streamed: int, **options: Any) -> OperatorTimer:
    return OperatorTimer(cast(Target[Any], machine), streamed, threads=1, **options)


@given(streamed=st.integers(1, 500), most=st.none() | st.integers(1, 9), shared=st.booleans())
def test_a_time_is_that_of_one_copy_however_many_run(streamed: int, most: int | None, shared: bool) -> None:
    machine = Machine()
    found = timer(machine, streamed).measure(Layer(shared, most), [1, 3, 7])
    for name, seconds in found.items():
        assert seconds == pytest.approx({count: count * COPY_SECONDS[name] for count in (1, 3, 7)})
    for name, copies in machine.loaded:
        size = {"small": 10, "large": 40}[name]
        enough = (copies - 1) * size < streamed <= copies * size
        assert enough if most is None else copies <= most and (enough or copies == most < streamed / size)


@pytest.mark.parametrize("shared", [False, True])
def test_models_are_loaded_as_often_as_the_operator_says_and_alternatives_take_turns(shared: bool) -> None:
    machine = Machine()
    timer(machine, 80).measure(Layer(shared), [1, 3])
    assert machine.loaded == [("small", 8), ("large", 2)] * (1 if shared else 2)
    assert machine.log == [(name, count) for count in (1, 3) for _ in range(ROUNDS + 1) for name in COPY_SECONDS]


def test_what_is_kept_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(monkeypatch, tmp_path / "cache")
    machine, layer = Machine(), Layer(shared=True)
    only_kept = timer(machine, 80, only_kept=True)
    assert only_kept.costs(layer, [1, 3]) == {"small": {}, "large": {}} and not machine.loaded
    first = timer(machine, 80).costs(layer, [1])
    assert only_kept.costs(layer, [1, 3]) == first and len(machine.loaded) == 2
    both = timer(machine, 80).costs(layer, [1, 3])
    assert len(machine.loaded) == 4 and {count for _, count in machine.log[2 * (ROUNDS + 1) :]} == {3}
    assert both == timer(machine, 80).costs(layer, [1, 3]) and len(machine.loaded) == 4
    timer(machine, 81).costs(layer, [1])
    assert len(machine.loaded) == 6, "times over other amounts of data are other times"
