"""Values of a parameter file are changed, and every other byte stays."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.yaml_edit import edited
from tapeout.errors import RecipeError

TEXT = """\
# A recipe.
model:
    source:   "file:a"   # where it lies
    adapter: ~
    sha256:
plan:
  schemes: # the first that matches decides
  # a comment of its own
  - {match: '*', bits: 8}   # all
  - match: head
    bits: 6

  goal: 'workload'
  tail: [1,
    2]   # in two lines
flow: {a: 1, "b": {c: 2}}

# the end
"""


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({"model": {"source": "file:b"}}, '  "file:a"   # where', "'file:b'   # where"),
        ({"model": {"adapter": "file:x"}}, "adapter: ~", "adapter: 'file:x'"),
        ({"model": {"sha256": "0x1"}}, "sha256:\n", "sha256: '0x1'\n"),
        ({"model": {"new": True}}, "sha256:\n", "sha256:\n    new: true\n"),
        ({"plan": {"goal": None}}, "'workload'", "null"),
        ({"plan": {"tail": [3]}}, "[1,\n    2]   # in", "[3]   # in"),
        (
            {"plan": {"schemes": "auto"}},
            TEXT[TEXT.index(" # the first") : TEXT.index("\n\n  goal")],
            " auto # the first that matches decides",
        ),
        (
            {"plan": {"schemes": [{"match": "*", "bits": 4}]}},
            TEXT[TEXT.index("  # a comment of") : TEXT.index("\n\n  goal")],
            "    - {match: '*', bits: 4}",
        ),
        ({"flow": {"b": {"c": 3}}}, '{a: 1, "b": {c: 2}}', '{a: 1, "b": {c: 3}}'),
        ({"flow": {"b": {"d": "x"}}}, '"b": {c: 2}}', '"b": {c: 2, d: x}}'),
        ({"flow": {"a": None, "e": [1]}}, '{a: 1, "b": {c: 2}}', '{a: null, "b": {c: 2}, e: [1]}'),
        ({"new": {"section": 1}}, "{c: 2}}\n", "{c: 2}}\nnew: {section: 1}\n"),
    ],
)
def test_one_value_is_replaced(changes: dict[str, Any], before: str, after: str) -> None:
    assert TEXT.count(before) == 1
    assert edited(TEXT, changes) == TEXT.replace(before, after)


FLOW = """\
plan: { # all of it
  "max_kl":   0.02,   # half of the gate's
  goal: 'latency', kv_cache: {dtype: int8},
  empty: , bare,
  schemes: {}, # none
}   # end
"""


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({"max_kl": 0.1}, "0.02", "0.1"),
        ({"goal": "throughput"}, "'latency'", "throughput"),
        ({"kv_cache": {"dtype": "int4"}}, "int8", "int4"),
        ({"kv_cache": {"group": 8}}, "dtype: int8", "dtype: int8, group: 8"),
        ({"empty": 1}, "empty: ,", "empty: 1 ,"),
        ({"bare": "x"}, "bare,", "bare: x,"),
        ({"schemes": {"a": 1}}, "schemes: {}", "schemes: {a: 1}"),
        ({"new": True}, "schemes: {}", "schemes: {}, new: true"),
    ],
)
@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["unix", "windows"])
def test_a_flow_mapping_in_several_lines_keeps_its_comments(
    changes: dict[str, Any], before: str, after: str, ends: str
) -> None:
    assert FLOW.count(before) == 1
    text = FLOW.replace("\n", ends)
    assert edited(text, {"plan": changes}) == text.replace(before, after)


@pytest.mark.parametrize("scalar", ["|", "|-", "|+", ">", "|2", "!!str |", "&a >-"])
@pytest.mark.parametrize("note", ["", "   # of the value"])
@pytest.mark.parametrize("content", ["text", "text  # text\n    more\n\n    end"])
@pytest.mark.parametrize("behind", ["", "# behind\n", "\n\n# behind\n", "  b: 1\n", "# behind\n  b: 1\n", "c: 2\n"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["unix", "windows"])
def test_a_block_of_text_is_replaced_alone(scalar: str, note: str, content: str, behind: str, ends: str) -> None:
    """What the parser calls its end lies at the line behind it."""
    text = f"m:\n  a: {scalar}{note}\n    {content}\n{behind}".replace("\n", ends)
    assert edited(text, {"m": {"a": "v"}}) == f"m:\n  a: v{note}\n{behind}".replace("\n", ends)


def test_a_key_is_inserted_behind_a_block_of_text() -> None:
    text = "m:\n  a: |\n    text\n# of n\nn: 1\n"
    assert edited(text, {"m": {"b": 1}}) == text.replace("text\n", "text\n  b: 1\n")
    assert edited(text, {"m": {"a": [{"x": 1}]}}) == "m:\n  a:\n    - {x: 1}\n# of n\nn: 1\n"


def test_line_breaks_of_both_kinds_stay() -> None:
    text = "a: 1\r\nb: 2 # two\nc:\r\n  d: 3\r\n"
    assert edited(text, {"b": 5, "c": {"e": 4}}) == "a: 1\r\nb: 5 # two\nc:\r\n  d: 3\r\n  e: 4\r\n"


def test_equal_values_are_not_written_again() -> None:
    assert edited(TEXT, yaml.safe_load(TEXT)) == TEXT
    assert edited(TEXT, {}) == TEXT


def test_a_file_without_a_last_line_break_and_an_empty_one() -> None:
    assert edited("a: 1", {"a": 2}) == "a: 2"
    assert edited("a: 1", {"b": 2}) == "a: 1\nb: 2\n"
    assert edited("", {"b": {"c": 2}}) == "b: {c: 2}\n"


def test_what_stands_elsewhere_is_refused() -> None:
    text = "base: &base {a: 1}\nother:\n  <<: *base\n  b: 2\nthird: *base\n"
    with pytest.raises(RecipeError, match=r"base\.a cannot be changed in place"):
        edited(text, {"base": {"a": 2}})
    assert edited(text, {"other": {"b": 3}}) == text.replace("b: 2", "b: 3")


words = st.sampled_from(["a", "b", "c", "d"])
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.text("ab#: '\"é{", max_size=5), st.lists(st.integers(), max_size=3)
)
rules = st.lists(st.dictionaries(words, st.integers(), min_size=1), min_size=1, max_size=2)
recipes = st.dictionaries(words, st.one_of(leaves, st.dictionaries(words, st.one_of(leaves, rules), min_size=1)))


@given(recipes, recipes, st.sampled_from([None, False, True]))
def test_the_result_is_what_was_asked_for(base: dict[str, Any], changes: dict[str, Any], flow: bool | None) -> None:
    text = yaml.safe_dump(base, default_flow_style=flow, allow_unicode=True, sort_keys=False) if base else ""
    lines = text.splitlines()
    result = edited(text, changes)
    assert edited(text.replace("\n", "\r\n"), changes) == result.replace("\n", "\r\n") or not text
    expected = {**base}
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        expected[key] = {**base[key], **value} if both else value
    assert yaml.safe_load(result) == expected if expected else not yaml.safe_load(result)
    if not text.startswith("{"):
        untouched = [line for line in lines if line[:1] not in " -" and line.partition(":")[0] not in changes]
        assert set(untouched) <= set(result.splitlines())
