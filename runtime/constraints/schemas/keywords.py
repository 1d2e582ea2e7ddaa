"""The keywords of JSON Schema: what becomes of each, and which hold other schemas.

docs/serving.md shows the first four tables; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

ENFORCED = frozenset(
    (
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "items",
        "maxItems",
        "maxLength",
        "maximum",
        "minItems",
        "minLength",
        "minimum",
        "multipleOf",
        "pattern",
        "prefixItems",
        "properties",
        "required",
        "type",
    )
)
# Enforced where they can be written with those above; refused elsewhere.
REWRITTEN = frozenset(
    (
        "additionalItems",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "format",
        "if",
        "maxProperties",
        "minProperties",
        "not",
        "oneOf",
        "patternProperties",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    )
)
REFUSED = frozenset(("$dynamicRef", "$recursiveRef", "maxContains"))
ASSERTIONS = ENFORCED | REWRITTEN | REFUSED | {"minContains"}  # minContains says something with contains only
# Other formats are ignored, as JSON Schema says.
FORMATS = frozenset(
    (
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "json-pointer",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    )
)
COUNTS = frozenset(
    (
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
    )
)
MOST_COUNT = (1 << 31) - 1  # more than any response has of anything
TYPES = ("null", "boolean", "number", "string", "array", "object")  # integers are numbers

ONE_SCHEMA = frozenset(
    (
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
LISTED_SCHEMAS = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
NAMED_SCHEMAS = frozenset(
    ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
)


def with_subschemas(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy whose direct subschemas are what ``change`` makes of them. A list in ``dependencies`` holds names.

    >>> with_subschemas({"items": {}, "enum": [{}], "properties": {"items": {"type": "null"}}}, lambda schema: True)
    {'items': True, 'enum': [{}], 'properties': {'items': True}}
    """
    copy: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in LISTED_SCHEMAS and isinstance(value, list):
            copy[keyword] = [change(schema) for schema in value]
        elif keyword in ONE_SCHEMA and not isinstance(value, list):
            copy[keyword] = change(value)
        elif keyword in NAMED_SCHEMAS and isinstance(value, dict):
            copy[keyword] = {
                name: schema if keyword == "dependencies" and isinstance(schema, list) else change(schema)
                for name, schema in value.items()
            }
        else:
            copy[keyword] = value
    return copy


def _schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_schema, value))


def _named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_schema, value.values()))


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _count(value: Any) -> bool:
    return _number(value) and value >= 0 and (value == math.inf or value % 1 == 0)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _list(value: Any) -> bool:
    return isinstance(value, list)


SHAPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(ASSERTIONS & ONE_SCHEMA, _schema),
    **dict.fromkeys(ASSERTIONS & LISTED_SCHEMAS, _schemas),
    **dict.fromkeys(ASSERTIONS & NAMED_SCHEMAS, _named_schemas),
    **dict.fromkeys(COUNTS, _count),
    **dict.fromkeys(("minimum", "maximum"), _number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), lambda value: isinstance(value, bool) or _number(value)),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef"), _text),
    "const": lambda value: True,
    "dependencies": lambda value: (
        isinstance(value, dict) and all(_schema(needed) or _names(needed) or _text(needed) for needed in value.values())
    ),
    "dependentRequired": lambda value: isinstance(value, dict) and all(map(_names, value.values())),
    "enum": _list,
    "items": lambda value: _schema(value) or _schemas(value),
    "multipleOf": lambda value: _number(value) and value > 0,
    "required": _names,
    "type": lambda value: _text(value) or _names(value),
    "uniqueItems": lambda value: isinstance(value, bool),
}
