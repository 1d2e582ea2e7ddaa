"""One form of a JSON schema for all drafts: that of draft 2020-12, without what says nothing about a value."""

from __future__ import annotations

import json
from typing import Any

from runtime.constraints.schemas.keywords import ASSERTIONS, COUNTS, FORMATS, MOST_COUNT, SHAPES, with_subschemas
from tapeout.errors import RequestError

_IN_PLACE = {"$ref", "allOf", "anyOf", "contains", "dependentSchemas", "if", "not", "oneOf"}
_BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))


def normal(schema: Any) -> Any:
    """Older forms are replaced: lists in ``items``, ``additionalItems``, ``dependencies`` and boolean bounds.

    Annotations, keywords that JSON Schema does not know, and unknown formats are left out: they allow every value.

    >>> normal({"items": [{"format": "color"}], "additionalItems": False, "title": "colors"})
    {'prefixItems': [{}], 'items': False}
    >>> normal({"minItems": 1.0})  # JSON has one type of numbers
    {'minItems': 1}
    >>> normal({"minimum": 1, "exclusiveMinimum": True, "maximum": 2, "exclusiveMaximum": False})
    {'maximum': 2, 'exclusiveMinimum': 1}
    """
    if not isinstance(schema, dict):
        return schema
    kept = {keyword: value for keyword, value in schema.items() if keyword in ASSERTIONS}
    _check_shapes(kept)
    found = with_subschemas(kept, normal)
    found |= {keyword: int(min(found[keyword], MOST_COUNT)) for keyword in COUNTS & found.keys()}
    name = found.get("format")
    if isinstance(name, str) and name not in FORMATS:
        del found["format"]
    for bound, exclusive in _BOUNDS:
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    additional = found.pop("additionalItems", True)
    if isinstance(found.get("items"), list):
        items = found.pop("items")
        found |= {"prefixItems": items, "items": additional}
    _split_dependencies(found)
    if not _IN_PLACE & found.keys():  # nothing else can have evaluated a property or an item
        for unevaluated, additional in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if unevaluated in found:
                found.setdefault(additional, found.pop(unevaluated))
    return found


def _check_shapes(schema: dict[str, Any]) -> None:
    for keyword, value in schema.items():
        if not SHAPES[keyword](value):
            raise RequestError(
                f"a JSON schema with {json.dumps(value)[:60]} as `{keyword}`", expected="what JSON Schema allows there"
            )


def _split_dependencies(schema: dict[str, Any]) -> None:
    dependencies = schema.get("dependencies")
    if not isinstance(dependencies, dict):
        return
    del schema["dependencies"]
    for name, needed in dependencies.items():
        keyword = "dependentRequired" if isinstance(needed, list | str) else "dependentSchemas"
        needed = [needed] if isinstance(needed, str) else needed  # as draft 3 allowed
        schema[keyword] = {**schema.get(keyword, {}), name: needed}
