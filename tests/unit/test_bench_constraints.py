"""The benchmark of constraints counts a schema as right only where every instance comes out as it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import constraints
from benchmarks.constraints import arguments, run
from tests.unit.test_constraints import V, tokenizer

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
GOOD, BAD = {"n": 12}, {"n": "twelve"}


def bench(folder: Path, *cases: tuple[Any, list[tuple[Any, bool]]]) -> int:
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    lines = [
        {"name": f"case {i}", "schema": schema, "tests": [{"data": data, "valid": valid} for data, valid in tests]}
        for i, (schema, tests) in enumerate(cases)
    ]
    (folder / "schemas.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = [str(folder / "schemas.jsonl"), "--tokenizer", str(folder / "tokenizer.json"), "--names"]
    return run(arguments([*words, "--vocab-size", str(V)]))


@pytest.fixture(autouse=True)
def no_time_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is not asserted: other work on the machine may fill its caches."""
    monkeypatch.setattr(constraints, "MASK_P99_BAR_MS", 1e6)
    monkeypatch.setattr(constraints, "MASK_WORST_BAR_MS", 1e6)


def test_a_schema_with_right_instances_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, (NUMBER, [(GOOD, True), (BAD, False)])) == 0
    assert "| 1 schemas | right | 100.0% |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schema", "tests", "line"),
    [
        (NUMBER, [(GOOD, False)], "case 1: invalid instance accepted"),
        (NUMBER, [(BAD, True)], "case 1: valid instance not accepted: after"),
        (NUMBER, [({}, True)], "case 1: valid instance not accepted: after"),
        ({"type": "array", "contains": {"const": 1}}, [([1], True)], "case 1: refused: "),
    ],
)
def test_what_is_wrong_is_counted_and_named(
    schema: Any, tests: list[tuple[Any, bool]], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, (NUMBER, [(GOOD, True)]), (schema, tests)) == 1
    out = capsys.readouterr().out
    assert "| 2 schemas | right | 50.0% |" in out and line in out


def test_an_answer_that_our_limits_end_misses_the_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints.Matcher, "error", property(lambda matcher: "too many items"))
    monkeypatch.setattr(constraints, "RIGHT_BAR", 0.0)
    assert bench(tmp_path, (NUMBER, [(GOOD, True)])) == 1
    assert "| | ended in the middle | 1 | 0 |" in capsys.readouterr().out
