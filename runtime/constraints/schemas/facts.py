"""What a value must be to meet several schemas, as far as that is easily seen: enough to tell schemas apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.constraints.schemas.keywords import TYPES
from runtime.constraints.schemas.values import key_of, type_of, values_of

MOST_LEVELS = 6  # of properties that are compared inside properties
# Lower and upper bounds, and the type that they are about.
_BOUNDS = (
    ("number", "minimum", "maximum"),
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
    ("object", "minProperties", "maxProperties"),
)


def target(reference: str, definitions: Mapping[str, Any]) -> Any:
    return definitions[reference.removeprefix("#/$defs/")]


@dataclass
class Facts:
    """``types``: of which a value may be. ``values``: of which it is one, if they are known. ``closed``: no others."""

    types: set[str] = field(default_factory=lambda: set(TYPES))
    values: list[Any] | None = None
    required: set[str] = field(default_factory=set[str])
    properties: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    closed: list[set[str]] = field(default_factory=list[set[str]])
    low: dict[str, float] = field(default_factory=dict[str, float])
    high: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, schemas: Iterable[Any], definitions: Mapping[str, Any]) -> Facts:
        """Of a value that meets all of these schemas."""
        facts, waiting, seen = cls(), list(schemas), set[str]()
        while waiting:
            schema = waiting.pop()
            if schema is False:
                facts.types.clear()
            if not isinstance(schema, dict):
                continue
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                waiting.append(target(reference, definitions))
            waiting += schema.get("allOf", [])
            facts._take(schema, definitions)
        if facts.values is not None:
            facts.values = [value for value in facts.values if type_of(value) in facts.types]
            facts.types &= {type_of(value) for value in facts.values}
        return facts

    def forbids(self, name: str) -> bool:
        return False in self.properties.get(name, []) or any(name not in names for names in self.closed)

    def _take(self, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> None:
        types = schema.get("type")
        if isinstance(types, str | list):
            self.types &= {
                "number" if name == "integer" else name for name in ([types] if isinstance(types, str) else types)
            }
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self._take_choice(schema[keyword], definitions)
        if (values := values_of(schema)) is not None:
            self._take_values(values)
        self.required.update(schema.get("required", []))
        properties = schema.get("properties", {})
        for name, inner in properties.items():
            self.properties.setdefault(name, []).append(inner)
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            self.closed.append(set(properties))
        for kind, low, high in _BOUNDS:
            if low in schema:
                self.low[kind] = max(schema[low], self.low.get(kind, schema[low]))
            if high in schema:
                self.high[kind] = min(schema[high], self.high.get(kind, schema[high]))

    def _take_choice(self, choices: list[Any], definitions: Mapping[str, Any]) -> None:
        """Their types and values; references are not followed, for they may lead back here."""
        found = [Facts() if _refers(choice) else Facts.of([choice], definitions) for choice in choices]
        self.types &= {name for facts in found for name in facts.types}
        if all(facts.values is not None for facts in found):
            self._take_values([value for facts in found for value in facts.values or []])

    def _take_values(self, values: list[Any]) -> None:
        if self.values is not None:
            known = set(map(key_of, self.values))
            values = [value for value in values if key_of(value) in known]
        self.values = values


def disjoint(one: list[Any], other: list[Any], definitions: Mapping[str, Any], levels: int = MOST_LEVELS) -> bool:
    """Whether certainly no value meets all schemas of both lists.

    >>> disjoint([{"type": "string"}], [{"type": "integer"}], {}), disjoint([{"type": "number"}], [{"minimum": 1}], {})
    (True, False)
    """
    a, b = Facts.of(one, definitions), Facts.of(other, definitions)
    common = a.types & b.types
    if a.values is not None and b.values is not None:
        return set(map(key_of, a.values)).isdisjoint(map(key_of, b.values))
    return all(_apart(kind, a, b, definitions, levels) for kind in common)


def _apart(kind: str, a: Facts, b: Facts, definitions: Mapping[str, Any], levels: int) -> bool:
    """Whether no value of this type can meet both."""
    low = max((facts.low[kind] for facts in (a, b) if kind in facts.low), default=None)
    high = min((facts.high[kind] for facts in (a, b) if kind in facts.high), default=None)
    if low is not None and high is not None and low > high:
        return True
    if kind != "object":
        return False
    return any(
        a.forbids(name)
        or b.forbids(name)
        or (
            levels > 0
            and name in a.properties
            and name in b.properties
            and disjoint(a.properties[name], b.properties[name], definitions, levels - 1)
        )
        for name in a.required | b.required
    )


def _refers(schema: Any) -> bool:
    return isinstance(schema, dict) and ("$ref" in schema or any(map(_refers, schema.get("allOf", []))))
