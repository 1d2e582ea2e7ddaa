"""The keywords of JSON Schema: what becomes of each, and which hold other schemas.

docs/serving.md shows the first four tables; a test compares them.
"""

from __future__ import annotations

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
FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
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
