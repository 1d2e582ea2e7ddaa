"""Numbers that a constraint cannot hold exactly: what is written meets the schema, or the schema is refused."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.constraints.schemas.numbers import END, SAFE, STEP, held
from runtime.constraints.schemas.rewrite import rewritten
from runtime.gateway.http.requests import constraint_of
from runtime.gateway.protocol.bodies import CompletionBody, parse
from runtime.wire.messages import Constraint
from tapeout.errors import RequestError
from tests.unit.test_constraints import END as STOP
from tests.unit.test_constraints import compiler, tokenizer

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LARGE = (SAFE, 10**17, 10**18, 1 << 60, 1 << 62, END - 1024, END // STEP * STEP, END, 2 * END, 10**30)


def integers() -> st.SearchStrategy[int]:
    near = st.tuples(st.sampled_from(LARGE), st.integers(-1030, 1030), st.sampled_from((1, -1)))
    return near.map(lambda it: it[2] * (it[0] + it[1])) | st.integers(-2 * END, 2 * END) | st.integers(-9, 9)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.dictionaries(st.sampled_from(BOUNDS), integers() | st.sampled_from((-3.4e38, 1e308)), max_size=3)
    return st.tuples(bounds, st.sampled_from(("integer", "number"))).map(lambda it: {"type": it[1], **it[0]})


def meets(value: int, schema: dict[str, Any]) -> bool:
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    above, below = schema.get("exclusiveMinimum", value - 1), schema.get("exclusiveMaximum", value + 1)
    return low <= value <= high and above < value < below


def allowed(schema: str, text: str) -> bool:
    """Whether a response may be this text and end."""
    matcher = compiler().compile(Constraint("json_schema", schema))
    for token in tokenizer().encode(text).ids:
        if not matcher.mask([STOP])[token >> 5] >> (token & 31) & 1:
            return False
        matcher.advance(token)
    return bool(matcher.mask([STOP])[STOP >> 5] >> (STOP & 31) & 1)


@settings(max_examples=300, deadline=None)
@given(schema=schemas(), near=st.integers(-1030, 1030), other=integers())
def test_no_response_breaks_a_large_bound(schema: dict[str, Any], near: int, other: int) -> None:
    tried = [other, *(int(bound) + near for key, bound in schema.items() if key != "type" and abs(bound) < 1e40)]
    try:
        found = [value for value in tried if allowed(json.dumps(schema), str(value))]
    except RequestError:
        return
    assert all(meets(value, schema) for value in found)


@settings(max_examples=300, deadline=None)
@given(schema=schemas())
def test_a_bound_is_moved_no_further_than_it_must(schema: dict[str, Any]) -> None:
    """Up to the last number below it that can be held: a neighbouring double, or a multiple where fractions may be."""
    try:
        kept = held(schema)
    except RequestError:
        return
    gap = 1024 if schema["type"] == "integer" else STEP
    for low, high, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        asked = [sign * schema[key] for key in (low, high) if key in schema]
        if not asked or high in kept:
            continue
        assert max(asked) <= sign * kept[low] <= max(max(asked), -END) + 2 * gap


@pytest.mark.parametrize("bound", [(1 << 62), END - 1, 10**18, 10**16, SAFE + 1])
def test_integers_reach_their_bound(bound: int) -> None:
    schema = json.dumps({"type": "integer", "maximum": bound})
    assert allowed(schema, str(bound)) and not allowed(schema, str(bound + 1)) and allowed(schema, "-7")


@pytest.mark.parametrize("schema", [{"minimum": -3.4e38, "maximum": 3.4e38}, {"minimum": -1e308}, {"maximum": 1e308}])
def test_bounds_of_floats_leave_every_number_of_64_bits(schema: dict[str, Any]) -> None:
    text = json.dumps({"type": "number", **schema})
    assert all(allowed(text, number) for number in ("-9", "0.25", str(-(10**18)), str(9 * 10**18)))


@pytest.mark.parametrize("literal", ["1e400", "9" * 400, "-1e400"])
def test_a_bound_beyond_double_precision_is_one_beyond_64_bits(literal: str) -> None:
    keyword = "minimum" if literal.startswith("-") else "maximum"
    assert allowed(f'{{"type": "integer", "{keyword}": {literal}}}', "12")
    assert allowed(f'{{"type": "string", "maxLength": {literal.strip("-")}}}', '"ab"')


@settings(max_examples=200, deadline=None)
@example(value=10**17 + 110)  # the shortest digits of a double that is another integer
@example(value=END - 1)
@given(value=integers() | st.integers(0, 60).map(lambda exponent: 10**exponent))
def test_a_constant_is_itself_or_refused(value: int) -> None:
    for schema in ({"const": value}, {"enum": ["a", [value]]}):
        try:
            kept = held(schema)
        except RequestError:
            assert abs(value) > SAFE
            continue
        (number,) = [kept["const"]] if "const" in kept else kept["enum"][1]
        assert Decimal(repr(number)) == value
        text = str(value) if "const" in schema else f"[{value}]"
        assert allowed(json.dumps(schema), text)
        assert not allowed(json.dumps(schema), text.replace(str(value), str(value + 1)))


def test_negated_bounds_are_held_too() -> None:
    """What is rewritten has bounds of its own."""
    schema = {"type": "integer", "not": {"maximum": 1 << 62}}
    assert "exclusiveMinimum" in json.dumps(rewritten(schema, {})[0])
    text = json.dumps(schema)
    assert not allowed(text, str(1 << 62)) and allowed(text, str((1 << 62) + STEP))


def test_numbers_come_through_a_request_as_they_were_written() -> None:
    def constraint(schema: str) -> Constraint:
        wanted = f'{{"type": "json_schema", "json_schema": {{"name": "a", "schema": {schema}}}}}'
        body = parse(CompletionBody, f'{{"prompt": "x", "response_format": {wanted}}}'.encode())
        found = constraint_of(body)
        assert found is not None
        return found

    for schema in ('{"maximum": 1e400, "type": "integer"}', f'{{"maximum": {"9" * 40}, "type": "integer"}}'):
        assert allowed(constraint(schema).text, "12")
    for number in ("1e400", "18446744073709551617", "-9223372036854775809", "9007199254740993"):
        with pytest.raises(RequestError, match="`const` of "):
            compiler().compile(constraint(f'{{"const": {number}}}'))


def test_minus_zero_is_zero() -> None:
    assert allowed('{"const": -0.0}', "0")
