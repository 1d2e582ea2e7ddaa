"""Rewritten schemas allow exactly the values that the original ones allow, and masks let through no other."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.validators import validator_for

from runtime.constraints.schemas import rewrite
from runtime.constraints.schemas.enforce import enforceable
from runtime.constraints.schemas.facts import disjoint
from runtime.constraints.schemas.values import other_texts
from runtime.wire.messages import Constraint
from tapeout.errors import RequestError
from tests.unit.test_constraints import END, compiler, tokenizer

NAMES = ("a", "b", "")
SCALARS = (None, True, False, 0, 1, 2, 1.5, -3, "", "a", "b", "ab", "abc")


def values() -> st.SearchStrategy[Any]:
    return st.recursive(
        st.sampled_from(SCALARS),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        max_leaves=6,
    )


def schemas() -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)
    counts, numbers = st.integers(0, 3), st.sampled_from([-1, 0, 1, 1.5, 2])
    types = st.sampled_from(["null", "boolean", "number", "integer", "string", "array", "object"])
    leaf = st.one_of(
        st.booleans(),
        types.map(lambda name: {"type": name}),
        st.lists(types, min_size=1, max_size=3, unique=True).map(lambda names: {"type": names}),
        st.lists(values(), min_size=1, max_size=3).map(lambda values: {"enum": values}),
        values().map(lambda value: {"const": value}),
        names.map(lambda names: {"required": names}),
        st.tuples(st.sampled_from(["minLength", "maxLength", "minItems", "maxItems"]), counts).map(
            lambda it: dict([it])
        ),
        st.tuples(st.sampled_from(["minProperties", "maxProperties"]), counts).map(lambda it: dict([it])),
        st.tuples(st.sampled_from(["minimum", "exclusiveMaximum", "maximum"]), numbers).map(lambda it: dict([it])),
        st.dictionaries(st.sampled_from(NAMES), names, min_size=1).map(lambda needed: {"dependentRequired": needed}),
    )

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, min_size=1, max_size=3)
        named = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=3)
        return st.one_of(
            st.tuples(st.sampled_from(["allOf", "anyOf", "oneOf"]), several).map(lambda it: dict([it])),
            st.tuples(st.sampled_from(["not", "items", "contains", "if"]), inner).map(lambda it: dict([it])),
            named.map(lambda properties: {"properties": properties}),
            st.tuples(named, st.lists(st.sampled_from(NAMES), unique=True), st.booleans(), counts, counts).map(
                lambda it: {
                    "type": "object",
                    "properties": it[0],
                    "required": it[1],
                    "additionalProperties": it[2],
                    "minProperties": it[3],
                    "maxProperties": it[3] + it[4],
                }
            ),
            named.map(lambda needed: {"dependentSchemas": needed}),
            st.tuples(inner, inner, inner).map(lambda it: {"if": it[0], "then": it[1], "else": it[2]}),
            st.tuples(inner, counts).map(lambda it: {"items": it[0], "uniqueItems": True, "maxItems": it[1]}),
            inner.map(lambda names: {"propertyNames": names}),
            st.tuples(inner, inner).map(lambda it: {**as_dict(it[0]), **as_dict(it[1])}),
        )

    return st.recursive(leaf, nested, max_leaves=6)


def as_dict(schema: Any) -> dict[str, Any]:
    return schema if isinstance(schema, dict) else {}


@given(schema=schemas(), examples=st.lists(values(), min_size=3, max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_rewritten_schema_allows_the_same_values(schema: Any, examples: list[Any]) -> None:
    try:
        found = enforceable(schema)
    except RequestError:
        assume(False)
        return
    for value in examples:
        assert Draft202012Validator(found).is_valid(value) == Draft202012Validator(schema).is_valid(value), (
            found,
            value,
        )


@given(one=schemas(), other=schemas(), examples=st.lists(values(), min_size=3, max_size=8))
@settings(max_examples=300, deadline=None)
def test_schemas_that_are_called_disjoint_share_no_value(one: Any, other: Any, examples: list[Any]) -> None:
    if disjoint([one], [other], {}):
        for value in examples:
            assert not (Draft202012Validator(one).is_valid(value) and Draft202012Validator(other).is_valid(value))


@given(
    texts=st.lists(st.text("ab.\n\U0001f642", max_size=3), min_size=1, max_size=4),
    text=st.text("ab.\U0001f642", max_size=4),
)
def test_a_pattern_of_other_texts_matches_all_others(texts: list[str], text: str) -> None:
    assert bool(re.search(other_texts(texts), text)) == (text not in texts)


def accepts(schema: Any, value: Any) -> bool:
    matcher = compiler().compile(Constraint("json_schema", json.dumps(schema)))
    for token in tokenizer().encode(json.dumps(value, ensure_ascii=False)).ids:
        if not matcher.mask([END])[token >> 5] >> (token & 31) & 1:
            return False
        matcher.advance(token)
        assert matcher.error is None
    return bool(matcher.mask([END])[END] & 1)


@given(schema=schemas(), examples=st.lists(values(), min_size=3, max_size=6))
@settings(max_examples=100, deadline=None)
def test_masks_let_through_no_invalid_value(schema: Any, examples: list[Any]) -> None:
    try:
        compiler().compile(Constraint("json_schema", json.dumps(schema)))
    except RequestError:
        assume(False)
    for value in examples:
        if accepts(schema, value):
            assert Draft202012Validator(schema).is_valid(value)


CIRCLE = {"properties": {"kind": {"const": "circle"}, "radius": {"type": "number"}}, "required": ["kind", "radius"]}
SQUARE = {"properties": {"kind": {"const": "square"}, "side": {"type": "number"}}, "required": ["kind", "side"]}
PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "oneOf, told apart by a constant": (
        {"type": "object", "oneOf": [CIRCLE, SQUARE]},
        [{"kind": "circle", "radius": 1}, {"kind": "square", "side": 2}],
        [{"kind": "circle", "side": 2}, {"radius": 1}],
    ),
    "oneOf, told apart behind references": (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "string"}}},
        ["x", None],
        [1, {}],
    ),
    "oneOf, told apart by required keys": (
        PAIR | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "oneOf, told apart by bounds": (
        {"type": "string", "oneOf": [{"maxLength": 1}, {"minLength": 3}]},
        ["", "abc"],
        ["ab"],
    ),
    "not required": (PAIR | {"not": {"required": ["a", "b"]}}, [{"a": 1}, {"b": 2}, {}], [{"a": 1, "b": 2}]),
    "not enum": ({"type": "string", "not": {"enum": ["ab", "a.c"]}}, ["a", "abc", "aac", ""], ["ab", "a.c"]),
    "not a number": ({"type": "integer", "not": {"const": 0}}, [-1, 1, 10], [0]),
    "not type": ({"not": {"type": ["object", "array"]}}, [1, "a", None], [{}, []]),
    "not not": ({"type": "string", "not": {"not": {"pattern": "^a+$"}}}, ["aa"], ["b"]),
    "dependentRequired": (PAIR | {"dependentRequired": {"b": ["a"]}}, [{}, {"a": 1}, {"a": 1, "b": 2}], [{"b": 2}]),
    "dependentSchemas": (
        PAIR | {"dependentSchemas": {"b": {"properties": {"a": {"minimum": 5}}}}},
        [{"a": 1}, {"a": 5, "b": 2}],
        [{"a": 1, "b": 2}],
    ),
    "if, then, else": (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["x", "y"]}, "n": {"type": "integer"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "x"}}},
            "then": {"required": ["n"]},
            "else": {"properties": {"n": False}},
        },
        [{"kind": "x", "n": 1}, {"kind": "y"}],
        [{"kind": "x"}, {"kind": "y", "n": 1}],
    ),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["a", "b", 3]}, "uniqueItems": True},
        [[], ["b", "a"], [3, "a", "b"]],
        [["a", "a"], ["a", 3, "a"]],
    ),
    "uniqueItems, bounded": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1, "maxItems": 1},
        [[True]],
        [[], [True, True]],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        [{}, {"b": 1, "a": 1}],
        [{"c": 1}, {"a": "x"}],
    ),
    "propertyNames, none": ({"type": "object", "propertyNames": {"enum": [1]}}, [{}], [{"": 1}, {"a": 1}, {"1": 1}]),
    "minProperties": (PAIR | {"minProperties": 1}, [{"b": 1}, {"x": 1}], [{}]),
    "maxProperties": (PAIR | {"maxProperties": 1}, [{"b": 1}, {"x": 1}, {}], [{"a": 1, "b": 1}, {"b": 1, "x": 1}]),
    "overlapping patterns of one schema": (
        {"type": "object", "patternProperties": {"^a": {"type": "null"}, "b$": {"type": "null"}}},
        [{"ab": None, "x": 1}],
        [{"ab": 1}],
    ),
    "unevaluatedProperties": (PAIR | {"unevaluatedProperties": False}, [{"a": 1}], [{"x": 1}]),
    "json-pointer": ({"type": "string", "format": "json-pointer"}, ["", "/a/b~0"], ["a", "/~2"]),
    "relative-json-pointer": (
        {"type": "string", "format": "relative-json-pointer"},
        ["0", "1/a", "0#"],
        ["", "01", "/a"],
    ),
    "uri-reference": (
        {"type": "string", "format": "uri-reference"},
        ["", "#a", "a/b?c#d", "//h/p", "https://a.b:80/c", "urn:x:y", "/"],
        ["a b", "1a:b", "%zz", "a#b#c"],
    ),
    "uri-template": (
        {"type": "string", "format": "uri-template"},
        ["/a/{b}", "{?a,b*}", "x"],
        ["{", "{a", "}", "{!!}"],
    ),
}


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED.values(), ids=ENFORCED)
def test_rewritten_keywords_are_enforced(schema: Any, good: list[Any], bad: list[Any]) -> None:
    checker = None if "format" in schema else validator_for(schema)(schema)
    for value in good:
        assert accepts(schema, value) and (checker is None or checker.is_valid(value)), value
    for value in bad:
        assert not accepts(schema, value) and (checker is None or not checker.is_valid(value)), value


def test_older_drafts_mean_the_same() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"t": {"items": [{"type": "integer"}], "additionalItems": {"type": "null"}, "type": "array"}},
        "dependencies": {"a": ["t"], "b": {"required": ["a"]}},
        "type": "object",
    }
    for value in ({"t": [1, None]}, {"t": ["x"]}, {"t": [1, 2]}, {"a": 1}, {"t": [], "a": 1}, {"t": [], "b": 1}):
        assert accepts(schema, value) == Draft7Validator(schema).is_valid(value), value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {"pattern": "a"}}, "`not` over `pattern`"),
        ({"not": {"type": "integer"}}, "`not` over the type `integer`"),
        ({"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"properties": {"x": {"$ref": "#/$defs/a"}}}}}, "to itself"),
        ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, "`not` over `multipleOf`"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "`uniqueItems` over items of any number"),
        ({"items": {"enum": list(range(9))}, "uniqueItems": True}, "`uniqueItems` over 9 values"),
        ({"contains": {"type": "null"}}, "`contains`"),
        ({"propertyNames": {"format": "date"}}, "`propertyNames` with `format`"),
        ({"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}}, "beside `patternProperties`"),
        ({"allOf": [{}], "unevaluatedProperties": False}, "`unevaluatedProperties`"),
        ({"properties": dict.fromkeys("abcdefg", True), "minProperties": 2}, "`minProperties` beside 7"),
        ({"$dynamicRef": "#a"}, "dynamicRef"),
        ({"required": "a"}, '"a" as `required`'),
        ({"items": {"maximum": "3"}}, '"3" as `maximum`'),
        ({"properties": [1]}, r"\[1\] as `properties`"),
        ({"enum": 3}, "3 as `enum`"),
        ({"type": {"a": 1}}, "as `type`"),
        ({"allOf": {}}, "as `allOf`"),
    ],
)
def test_what_cannot_be_enforced_is_refused_before_a_response(schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        compiler().compile(Constraint("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "minLength": 1.0, "maxLength": 2e0}, "ab", "abc"),
        ({"items": {"enum": ["a", "b"]}, "type": "array", "uniqueItems": True, "minItems": 1.0}, ["a"], []),
        ({"type": "object", "propertyNames": {"maxLength": 1.0}}, {"a": 1}, {"ab": 1}),
        (PAIR | {"minProperties": 1.0}, {"a": 1}, {}),
        ({"type": "array", "not": {"minItems": 2.0}}, [1], [1, 2]),
    ],
)  # fmt: skip
def test_counts_may_be_written_as_floats(schema: Any, good: Any, bad: Any) -> None:
    assert accepts(schema, good) and not accepts(schema, bad)


def test_a_schema_that_grows_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "MOST_SCHEMAS", 50)
    branches = [{"required": [f"a{i}"]} for i in range(10)]
    with pytest.raises(RequestError, match="becomes too large"):
        enforceable({"type": "object", "oneOf": branches})
