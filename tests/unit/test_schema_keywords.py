"""``docs/serving.md`` says of every keyword what becomes of it, as the tables in the code do."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.constraints.limits import CHECKED
from runtime.constraints.schemas.keywords import ENFORCED, FORMATS, REFUSED, REWRITTEN
from runtime.constraints.schemas.rewrite import FORMAT_PATTERNS

PAGE = (Path(__file__).parents[2] / "docs/serving.md").read_text()
SECTION = PAGE.partition("## Structured output\n")[2].partition("\n## ")[0]


def words(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def table() -> list[tuple[list[str], str]]:
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", SECTION, re.MULTILINE)
    return [(words(keywords), said) for keywords, said in rows]


def test_every_keyword_has_one_row() -> None:
    listed = [keyword for keywords, _ in table() for keyword in keywords]
    assert sorted(listed) == sorted(ENFORCED | REWRITTEN | REFUSED)


def test_rows_say_what_the_code_does() -> None:
    (enforced, *rewritten, refused) = table()
    assert (set(enforced[0]), enforced[1].split(";")[0]) == (set(ENFORCED), "enforced")
    assert refused == (sorted(REFUSED), "refused")
    assert {keyword for keywords, _ in rewritten for keyword in keywords} == REWRITTEN


def test_every_format_that_is_enforced_is_listed() -> None:
    ((_, said),) = [row for row in table() if row[0] == ["format"]]
    assert words(said) == sorted(FORMATS) and FORMAT_PATTERNS.keys() <= FORMATS


def test_the_share_of_the_check_is_that_of_the_code() -> None:
    assert "two fifths of the work" in SECTION and CHECKED.share == 2 / 5
