"""``not``: what llguidance has no keyword for, written with those that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from runtime.constraints.schemas.facts import target
from runtime.constraints.schemas.keywords import TYPES
from runtime.constraints.schemas.refusal import refusal
from runtime.constraints.schemas.values import other_texts, type_of, values_of

# A value breaks such a bound where it is of the type and meets the other keyword with the bound moved by the step.
_BOUNDS: dict[str, tuple[str, str, int]] = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}


def negated(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema of exactly the values that this one does not allow. :class:`RequestError` where none can be written.

    >>> negated({"required": ["a"], "maxProperties": 2}, {})["anyOf"][1]
    {'type': 'object', 'minProperties': 3}
    """
    return _Negation(definitions).of(schema)


class _Negation:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._open: set[str] = set()  # references that are being followed

    def of(self, schema: Any) -> Any:
        if isinstance(schema, bool):
            return not schema
        ways: list[Any] = []
        done = set[str]()
        for keyword in schema:
            if keyword not in done:
                done |= {"const", "enum"} if keyword in ("const", "enum") else {keyword}
                ways += self._ways(keyword, schema)
        if any(way is True for way in ways):
            return True
        ways = [way for way in ways if way is not False]
        return ways[0] if len(ways) == 1 else {"anyOf": ways} if ways else False

    def _ways(self, keyword: str, schema: Mapping[str, Any]) -> Iterator[Any]:
        """How a value can break this keyword."""
        value = schema[keyword]
        match keyword:
            case "$ref":
                if value in self._open:
                    raise refusal("not", "over a schema that refers to itself")
                self._open.add(value)
                yield self.of(target(value, self._definitions))
                self._open.remove(value)
            case "not":
                yield value
            case "allOf":
                yield from map(self.of, value)
            case "anyOf":
                yield {"allOf": [self.of(inner) for inner in value]}
            case "const" | "enum":
                yield other_values(values_of(schema) or [])
            case "type":
                others = _other_types([value] if isinstance(value, str) else value)
                yield {"type": others} if others else False
            case "required":
                for name in value:
                    yield {"type": "object", "properties": {name: False}}
            case "properties":
                for name, inner in value.items():
                    if (broken := self.of(inner)) is not False:
                        yield {"type": "object", "properties": {name: broken}, "required": [name]}
            case "contains":
                if {"minContains", "maxContains"} & schema.keys():
                    raise refusal("not", "over `minContains` and `maxContains`")
                yield {"type": "array", "items": self.of(value)}
            case "dependentRequired":
                for name, needed in value.items():
                    yield from (
                        {"required": [name], "type": "object", "properties": {other: False}} for other in needed
                    )
            case _ if keyword in _BOUNDS:
                kind, other, step = _BOUNDS[keyword]
                if value + step >= 0 or kind == "number":
                    yield {"type": kind, other: value + step}
            case _ if value is not True and value != {}:
                raise refusal("not", f"over `{keyword}`")
            case _:
                pass  # it allows every value


def other_values(values: list[Any]) -> Any:
    """A schema of every value but these.

    >>> other_values([False, 3])["anyOf"][1:]
    [{'enum': [True]}, {'type': 'number', 'exclusiveMaximum': 3}, {'type': 'number', 'exclusiveMinimum': 3}]
    """
    groups: dict[str, list[Any]] = {}
    for value in values:
        groups.setdefault(type_of(value), []).append(value)
    ways: list[Any] = [{"type": [name for name in TYPES if name not in groups]}]
    for kind, found in groups.items():
        ways += _OTHERS[kind](found)
    return {"anyOf": [way for way in ways if way.get("type") != []]}


def _other_booleans(values: list[Any]) -> list[Any]:
    left = [value for value in (False, True) if value not in values]
    return [{"enum": left}] if left else []


def _other_numbers(values: list[Any]) -> list[Any]:
    ordered = sorted(values)
    between = [{"type": "number", "exclusiveMinimum": a, "exclusiveMaximum": b} for a, b in pairwise(ordered) if a < b]
    below, above = {"exclusiveMaximum": ordered[0]}, {"exclusiveMinimum": ordered[-1]}
    return [{"type": "number", **below}, *between, {"type": "number", **above}]


def _other_arrays(values: list[Any]) -> list[Any]:
    """Longer, shorter, or another item somewhere; for each of the values."""
    return [{"allOf": [{"anyOf": list(_other_than_array(value))} for value in values], "type": "array"}]


def _other_than_array(value: list[Any]) -> Iterator[Any]:
    yield {"type": "array", "minItems": len(value) + 1}
    if value:
        yield {"type": "array", "maxItems": len(value) - 1}
    for place, item in enumerate(value):
        yield {"type": "array", "prefixItems": [{}] * place + [other_values([item])], "minItems": place + 1}


def _other_objects(values: list[Any]) -> list[Any]:
    """More properties, one that is missing, or one with another value; for each of the values."""
    return [{"allOf": [{"anyOf": list(_other_than_object(value))} for value in values], "type": "object"}]


def _other_than_object(value: dict[str, Any]) -> Iterator[Any]:
    yield {"type": "object", "required": list(value), "minProperties": len(value) + 1}
    for name, inner in value.items():
        yield {"type": "object", "properties": {name: False}}
        yield {"type": "object", "properties": {name: other_values([inner])}, "required": [name]}


_OTHERS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "null": lambda values: [],
    "boolean": _other_booleans,
    "number": _other_numbers,
    "string": lambda values: [{"type": "string", "pattern": other_texts(values)}],
    "array": _other_arrays,
    "object": _other_objects,
}


def _other_types(names: list[str]) -> list[str]:
    if "integer" in names and "number" not in names:
        raise refusal("not", "over the type `integer`")
    return [name for name in TYPES if name not in names]
