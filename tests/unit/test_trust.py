"""``docs/trust.md`` names every planted defect, and no test that does not exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/trust.md").read_text()
ROW = re.compile(r"^\| .+ \| .+ \| (.+) \| `(test_\w+\.py::test_\w+)` \|$", re.MULTILINE)
WAY = re.compile(r"^\| [^|]+ \| [^|]+ \| `(\w+/test_\w+\.py)::(test_\w+)` \|$", re.MULTILINE)


def planted() -> set[str]:
    """``file::function`` of every test in tests/planted."""
    return {
        f"{file.name}::{node.name}"
        for file in (ROOT / "tests/planted").glob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_page_lists_every_planted_defect_and_no_other() -> None:
    assert {test for _, test in ROW.findall(PAGE)} == planted()


def test_the_tests_of_ways_of_use_exist() -> None:
    rows = WAY.findall(PAGE)
    assert len(rows) >= 15
    for file, name in rows:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {name}"


def test_every_row_of_the_page_is_read() -> None:
    heads = ("| planted defect", "| way of use")
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(heads)]
    assert len(ROW.findall(PAGE)) + len(WAY.findall(PAGE)) == len(rows)
