"""References of a JSON schema: each is resolved in the schema that it stands in, and then names a definition.

A schema whose references are all ``#/$defs/NAME`` can become part of another one: the caller takes the definitions
along. Without that, ``#/$defs/x`` of a tool would be looked up in the list of calls that the tool is a part of.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

from runtime.constraints.schemas.keywords import with_subschemas
from tapeout.errors import RequestError

# Read here, and of no meaning once references are resolved.
IDENTIFIERS = frozenset(("$anchor", "$defs", "$dynamicAnchor", "$id", "$schema", "definitions", "id"))
OLD_DRAFTS = ("draft-03", "draft-04")  # of JSON Schema, which write ``id`` for ``$id``


class SelfContained(NamedTuple):
    """A schema whose references are all ``#/$defs/NAME``, and what these names stand for."""

    schema: Any
    definitions: dict[str, Any]

    def joined(self) -> Any:
        return {**self.schema, "$defs": self.definitions} if self.definitions else self.schema


def self_contained(schema: Any, prefix: str = "") -> SelfContained:
    """:class:`RequestError` for a reference to something that the schema does not hold.

    ``prefix``: of the definitions' names, which keeps those of several schemas apart. Definitions that no reference
    reaches are left out.

    >>> self_contained({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "null"}}}, "x")
    SelfContained(schema={'items': {'$ref': '#/$defs/x0'}}, definitions={'x0': {'type': 'null'}})
    """
    references = _References(schema, prefix)
    return SelfContained(references.copied(schema), references.definitions())


class _Resource(NamedTuple):
    """A schema with an identifier of its own, or the whole: what ``#`` means inside it."""

    root: Any
    uri: str
    anchors: dict[str, Any]


class _References:
    def __init__(self, schema: Any, prefix: str) -> None:
        draft = schema.get("$schema") if isinstance(schema, dict) else None
        self._id = "id" if isinstance(draft, str) and any(old in draft for old in OLD_DRAFTS) else "$id"
        self._prefix = prefix
        self._by_uri: dict[str, _Resource] = {}
        self._of: dict[int, _Resource] = {}  # the resource that each schema is a part of, by its id()
        self._names: dict[int, str] = {}
        self._wanted: list[tuple[str, Any]] = []
        whole = _Resource(schema, "", {})
        self._by_uri[""] = whole
        self._index(schema, whole)

    def copied(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        kept = {keyword: value for keyword, value in schema.items() if keyword not in IDENTIFIERS}
        copy = with_subschemas(kept, self.copied)
        if "$ref" in copy:
            copy["$ref"] = self._named(copy["$ref"], self._of[id(schema)])
        return copy

    def definitions(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._wanted:  # copying one may reach others
            name, schema = self._wanted.pop()
            found[name] = self.copied(schema)
        return found

    def _index(self, schema: Any, resource: _Resource) -> Any:
        """Remember which resource each schema is in. Returns the schema."""
        if not isinstance(schema, dict) or id(schema) in self._of:
            return schema
        identifier = schema.get(self._id)
        if isinstance(identifier, str) and identifier.startswith("#"):  # what older drafts write for $anchor
            resource.anchors.setdefault(identifier[1:], schema)
        elif isinstance(identifier, str):
            uri = _joined(resource.uri, identifier).rstrip("#")
            resource = _Resource(schema, uri, {})
            self._by_uri.setdefault(uri, resource)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                resource.anchors.setdefault(anchor, schema)
        self._of[id(schema)] = resource
        with_subschemas(schema, lambda inner: self._index(inner, resource))
        return schema

    def _named(self, reference: Any, resource: _Resource) -> str:
        if not isinstance(reference, str):
            raise RequestError(f"a $ref of type {type(reference).__name__}", expected="a string")
        target = self._target(reference, resource)
        if id(target) not in self._names:
            self._names[id(target)] = f"{self._prefix}{len(self._names)}"
            self._wanted.append((self._names[id(target)], target))
        return f"#/$defs/{self._names[id(target)]}"

    def _target(self, reference: str, resource: _Resource) -> Any:
        uri, _, fragment = reference.partition("#")
        found = self._by_uri.get(_joined(resource.uri, uri)) if uri else resource
        fragment = unquote(fragment)
        if found is not None and fragment and not fragment.startswith("/"):
            if fragment in found.anchors:
                return found.anchors[fragment]
            found = None
        if found is None:
            raise _missing(reference)
        node, within = found.root, found
        for part in fragment.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            elif part or node is not found.root:  # "#/" is often written for "#"
                raise _missing(reference)
            within = self._of.get(id(node), within)
        if not isinstance(node, dict | bool):
            raise RequestError(f"a reference to {reference!r}, which is no schema", expected="an object or a boolean")
        return self._index(node, within)  # it may stand where no keyword holds schemas


def _joined(base: str, reference: str) -> str:
    """``urljoin`` knows no relative references to URNs."""
    return urljoin(base, reference) if reference else base


def _missing(reference: str) -> RequestError:
    return RequestError(
        f"a reference to {reference!r}, which the schema does not hold",
        expected="references within the schema: nothing is fetched",
        remedy="put what it refers to under $defs",
    )
