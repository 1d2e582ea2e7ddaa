from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engines import costs
from engines.bundle import Fingerprint


def test_every_kernel_that_fits_a_shape_is_timed_at_every_row_count() -> None:
    found = costs.measure_shape(64, 32, (1, 3), threads=1)
    assert list(found) == ["fp32", "4-bit g32", "4-bit g64", "8-bit g32", "8-bit g64", "static int8"]
    assert all(list(by_rows) == [1, 3] and min(by_rows.values()) > 0 for by_rows in found.values())


def test_a_machine_measures_a_shape_once_and_another_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def measure(columns: int, outputs: int, rows: Sequence[int], threads: int) -> dict[str, dict[int, float]]:
        asked.append((columns, outputs))
        return {"fp32": {count: count * 1e-3 for count in rows}}

    def ask(columns: int) -> dict[str, dict[int, float]]:
        return costs.costs(columns, 8, rows=(1, 4), threads=1, cache=tmp_path, measure=measure)

    first = ask(16)
    assert ask(16) == first == {"fp32": {1: 1e-3, 4: 4e-3}}
    assert len(asked) == 1
    ask(32)
    other = Fingerprint(machine="other", features=(), libraries={})
    monkeypatch.setattr(costs.fingerprint, "current", lambda _: other)
    ask(16)
    assert asked == [(16, 8), (32, 8), (16, 8)]


def test_the_table_shows_operations_a_second() -> None:
    text = costs.table(1000, 500, {"fp32": {1: 1e-3, 8: 4e-3}})
    assert text.splitlines()[1].split() == ["fp32", "1", "2"]
