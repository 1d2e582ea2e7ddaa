"""References mean the schema that they stand in, whatever their form."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from runtime.constraints.schemas.normal import normal
from runtime.constraints.schemas.references import self_contained
from tapeout.errors import RequestError

INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": INTEGER}, "properties": {"x": {"$ref": "#/$defs/a"}}},
        {"definitions": {"a": INTEGER}, "properties": {"x": {"$ref": "#/definitions/a"}}},
        {"properties": {"x": {"$ref": "#/properties/y"}, "y": INTEGER}},
        {"$defs": {"a/b~c d": INTEGER}, "properties": {"x": {"$ref": "#/$defs/a~1b~0c%20d"}}},
        {"$defs": {"a": {"$anchor": "here"} | INTEGER}, "properties": {"x": {"$ref": "#here"}}},
        {"$defs": {"a": {"$id": "#here"} | INTEGER}, "properties": {"x": {"$ref": "#here"}}},
        {"$defs": {"a": {"$id": "a.json"} | INTEGER}, "properties": {"x": {"$ref": "a.json"}}},
        {
            "$id": "https://example.com/s/root.json",
            "$defs": {"a": {"$id": "a.json"} | INTEGER},
            "properties": {"x": {"$ref": "https://example.com/s/a.json#"}},
        },
        {"$id": "urn:root", "$defs": {"a": INTEGER}, "properties": {"x": {"$ref": "urn:root#/$defs/a"}}},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": "http://example.com/root",
            "definitions": {"a": INTEGER},
            "properties": {"x": {"$ref": "root#/definitions/a"}},
        },
        {"$defs": {"l": {"anyOf": [{}, INTEGER]}}, "properties": {"x": {"$ref": "#/$defs/l/anyOf/1"}}},
        {"x-own": {"a": INTEGER}, "properties": {"x": {"$ref": "#/x-own/a"}}},
        # An identifier begins a schema of its own, in which "#" means that schema.
        {
            "$defs": {"a": {"type": "string"}},
            "properties": {"x": {"$id": "inner", "$ref": "#/$defs/a", "$defs": {"a": INTEGER}}},
        },
        # A name of a property is no keyword.
        {"properties": {"$id": {"type": "null"}, "x": {"$ref": "#/properties/y"}, "y": INTEGER}},
    ],
)
def test_every_form_is_resolved(schema: dict[str, Any]) -> None:
    found = self_contained(schema).joined()
    assert set(found) <= {"properties", "$defs", "x-own"}
    jsonschema.validate({"x": 1}, found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"x": "1"}, found)


def test_a_schema_may_refer_to_itself() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    found = self_contained(tree).joined()
    jsonschema.validate({"child": {"child": {}}}, found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"child": {"child": {"other": 1}}}, found)


def test_prefixes_keep_definitions_apart() -> None:
    one = self_contained({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "string"}}}, "1.")
    two = self_contained({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "null"}}}, "2.")
    assert one.definitions.keys().isdisjoint(two.definitions)


def test_definitions_that_nothing_reaches_are_left_out() -> None:
    schema = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/nowhere"}}, "type": "null"}
    assert self_contained(schema).joined() == {"type": "null"}


@pytest.mark.parametrize(
    "reference", ["#/$defs/b", "#b", "other.json", "https://example.com/x", "#/$defs/a/type", "#/allOf/7", 5]
)
def test_what_the_schema_does_not_hold_is_refused(reference: Any) -> None:
    schema = {"$defs": {"a": INTEGER}, "allOf": [{}], "items": {"$ref": reference}}
    with pytest.raises(RequestError):
        self_contained(schema)


def test_unknown_formats_and_keywords_allow_everything() -> None:
    assert normal({"format": "color", "x-order": 3, "items": {"format": "uuid"}}) == {"items": {"format": "uuid"}}
