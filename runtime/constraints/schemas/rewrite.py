"""Rules that replace keywords which llguidance does not know by equal schemas of those that it knows.

Each rule adds schemas that a value must meet besides the others (``allOf``). They are rewritten in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, permutations
from math import perm
from typing import Any

from runtime.constraints.schemas.facts import Facts, disjoint, target
from runtime.constraints.schemas.keywords import TYPES, with_subschemas
from runtime.constraints.schemas.negation import negated
from runtime.constraints.schemas.refusal import refusal
from runtime.constraints.schemas.values import distinct, one_of_texts, values_of
from tapeout.errors import RequestError

MOST_SCHEMAS = 20_000  # that one schema may become
MOST_ARRAYS = 400  # with distinct items: all orders of five values are 326
MOST_CHOSEN = 64  # sets of properties

# Formats of JSON Schema that llguidance does not know. Characters of a URI, other than those with a meaning there:
_PLAIN = r"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_SEGMENT = rf"(?:{_PLAIN}|:)"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_VARIABLE = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+(?:\.(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+)*(?::[1-9][0-9]{0,3}|\*)?"
FORMAT_PATTERNS = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "uri-reference": (
        rf"^(?:[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_SEGMENT}|[\[\]])*(?:/{_SEGMENT}*)*|/?(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?)"
        rf"|//(?:{_SEGMENT}|[\[\]])*(?:/{_SEGMENT}*)*|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?|(?:{_PLAIN}+(?:/{_SEGMENT}*)*)?)"
        rf"(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?$"
    ),
    "uri-template": (
        r"^(?:[^\u0000-\u0020\"'%<>\\^`{|}\u007f]|%[0-9A-Fa-f]{2}"
        rf"|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"
    ),
}


def rewritten(schema: Any, definitions: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The schema and its definitions, of keywords that llguidance knows. :class:`RequestError` where there are none."""
    rewriter = _Rewriter(definitions)
    return rewriter.schema(schema), {name: rewriter.schema(inner) for name, inner in definitions.items()}


class _Rewriter:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._left = MOST_SCHEMAS
        self._rules: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
            "contains": self._contains,
            "dependentRequired": self._dependent_required,
            "dependentSchemas": self._dependent_schemas,
            "else": _nothing,  # with "if"
            "format": self._format,
            "if": self._condition,
            "maxContains": _nothing,  # with "contains"
            "minContains": _nothing,
            "not": lambda schema: [negated(schema["not"], self._definitions)],
            "oneOf": self._one_of,
            "propertyNames": self._property_names,
            "then": _nothing,
            "unevaluatedItems": lambda schema: _all_or_refused("unevaluatedItems", schema),
            "unevaluatedProperties": lambda schema: _all_or_refused("unevaluatedProperties", schema),
            "uniqueItems": self._unique_items,
        }

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._left -= 1
        if self._left < 0:
            raise RequestError("a JSON schema that becomes too large", expected=f"at most {MOST_SCHEMAS} parts")
        schema, more = self._with_counts(_with_patterns_joined(schema))
        found: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword not in self._rules or (keyword == "format" and value not in FORMAT_PATTERNS):
                found |= with_subschemas({keyword: value}, self.schema)
                continue
            added = self._rules[keyword](schema)
            if keyword == "oneOf" and "anyOf" not in schema:
                found |= with_subschemas(added[0], self.schema)  # here, for the order of properties
            else:
                more += added
        if more:
            found["allOf"] = [*found.get("allOf", []), *map(self.schema, more)]
        return found

    def _one_of(self, schema: dict[str, Any]) -> list[Any]:
        """Branches that no value meets together are alternatives; of others, each excludes those that it overlaps."""
        rest = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        branches = [branch for branch in schema["oneOf"] if branch is not False]
        overlaps: list[list[Any]] = [[] for _ in branches]
        for one, other in combinations(range(len(branches)), 2):
            if not disjoint([branches[one], rest], [branches[other], rest], self._definitions):
                overlaps[one].append(negated(branches[other], self._definitions))
                overlaps[other].append(negated(branches[one], self._definitions))
        ways = [
            {"allOf": [branch, *others]} if others else branch
            for branch, others in zip(branches, overlaps, strict=True)
        ]
        return [{"anyOf": ways or [False]}]

    def _condition(self, schema: dict[str, Any]) -> list[Any]:
        if not {"then", "else"} & schema.keys():
            return []
        condition = schema["if"]
        met = {"allOf": [condition, schema.get("then", True)]}
        unmet = {"allOf": [negated(condition, self._definitions), schema.get("else", True)]}
        return [{"anyOf": [met, unmet]}]

    def _dependent_required(self, schema: dict[str, Any]) -> list[Any]:
        return [
            {"anyOf": [{"properties": {name: False}}, {"required": [name, *needed]}]}
            for name, needed in schema["dependentRequired"].items()
            if needed
        ]

    def _dependent_schemas(self, schema: dict[str, Any]) -> list[Any]:
        return [
            {"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, inner]}]}
            for name, inner in schema["dependentSchemas"].items()
        ]

    def _contains(self, schema: dict[str, Any]) -> list[Any]:
        if schema.get("minContains") == 0 and "maxContains" not in schema:
            return []
        raise refusal("contains", "over arrays")

    def _format(self, schema: dict[str, Any]) -> list[Any]:
        return [{"pattern": FORMAT_PATTERNS[schema["format"]]}]

    def _unique_items(self, schema: dict[str, Any]) -> list[Any]:
        """All arrays, if they are few."""
        if not schema["uniqueItems"] or "array" not in Facts.of([schema], self._definitions).types:
            return []
        most = schema.get("maxItems")
        if most is not None and most < 2:
            return []
        values = None if "prefixItems" in schema else self._few_values(schema.get("items", True))
        if values is None:
            raise refusal("uniqueItems", "over items of any number")
        sizes = range(schema.get("minItems", 0), min(len(values), len(values) if most is None else int(most)) + 1)
        if sum(perm(len(values), size) for size in sizes) > MOST_ARRAYS:
            raise refusal("uniqueItems", f"over {len(values)} values")
        arrays = [list(array) for size in sizes for array in permutations(values, size)]
        return [{"anyOf": [{"enum": arrays}, {"type": [name for name in TYPES if name != "array"]}]}]

    def _few_values(self, schema: Any) -> list[Any] | None:
        """Those that a schema may allow; None if they are not known."""
        facts = Facts.of([schema], self._definitions)
        if facts.values is not None:
            return distinct(facts.values)
        few: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
        return [value for name in sorted(facts.types) for value in few[name]] if facts.types <= few.keys() else None

    def _property_names(self, schema: dict[str, Any]) -> list[Any]:
        patterns = self._name_patterns(schema["propertyNames"])
        if patterns is None:
            return []
        if schema.get("patternProperties"):
            raise refusal("propertyNames", "beside `patternProperties`")
        return [{"patternProperties": dict.fromkeys(patterns, True), "additionalProperties": False}]

    def _name_patterns(self, names: Any) -> list[str] | None:
        """One of them must match each name; None for any name, and no pattern where no name is allowed."""
        if isinstance(names, dict) and "$ref" in names and len(names) == 1:
            return self._name_patterns(target(names["$ref"], self._definitions))
        facts = Facts.of([names], self._definitions)
        if "string" not in facts.types:
            return []
        keywords = names.keys() - {"type"} if isinstance(names, dict) else set[str]()
        if not keywords:
            return None
        if keywords <= {"const", "enum"}:
            return [one_of_texts([value for value in values_of(names) or [] if isinstance(value, str)])]
        if keywords == {"pattern"}:
            return [names["pattern"]]
        if keywords <= {"minLength", "maxLength"}:
            return [f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"]
        raise refusal("propertyNames", f"with {' and '.join(f'`{keyword}`' for keyword in sorted(keywords))}")

    def _with_counts(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """``minProperties`` and ``maxProperties`` beside optional properties, as choices of these properties."""
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        known = {name for name, inner in schema.get("properties", {}).items() if inner is not False}
        required = set(schema.get("required", []))
        closed = schema.get("additionalProperties", True) is False and not schema.get("patternProperties")
        schema = dict(schema)
        if least <= len(required):
            schema.pop("minProperties", None)
            least = 0
        if closed and most is not None and most >= len(known):
            del schema["maxProperties"]
            most = None
        optional = [name for name in schema.get("properties", {}) if name in known - required]
        one_or_none = least <= len(required) + 1 and most in (None, len(required) + 1)  # llguidance knows these
        if not optional or (not least and most is None) or (closed and one_or_none):
            return schema, []
        bounds = {keyword: schema.pop(keyword) for keyword in ("minProperties", "maxProperties") if keyword in schema}
        if most is None and least == len(required) + 1:
            none = {"properties": dict.fromkeys(optional, False), **bounds}
            return schema, [{"anyOf": [*({"required": [name]} for name in optional), none]}]
        if 1 << len(optional) > MOST_CHOSEN:
            raise refusal("`, `".join(bounds), f"beside {len(optional)} optional properties")
        ways = [
            {"required": chosen, "properties": dict.fromkeys((set(optional) - set(chosen)), False), **bounds}
            for size in range(len(optional) + 1)
            for chosen in map(list, combinations(optional, size))
        ]
        return schema, [{"anyOf": ways}]


def _with_patterns_joined(schema: dict[str, Any]) -> dict[str, Any]:
    """Patterns with equal schemas may overlap: one pattern takes their place. Overlaps of others are refused later."""
    patterns = schema.get("patternProperties")
    if not patterns or len(patterns) == 1:
        return schema
    joined: list[tuple[list[str], Any]] = []
    for pattern, inner in patterns.items():
        same = next((found for found, known in joined if known == inner), None)
        if same is None:
            joined.append(([pattern], inner))
        else:
            same.append(pattern)
    one = {found[0] if len(found) == 1 else "|".join(f"(?:{p})" for p in found): inner for found, inner in joined}
    return schema | {"patternProperties": one}


def _all_or_refused(keyword: str, schema: dict[str, Any]) -> list[Any]:
    if schema[keyword] is True or schema[keyword] == {}:
        return []
    raise refusal(keyword, "beside schemas that it depends on")


def _nothing(schema: dict[str, Any]) -> list[Any]:
    return []
