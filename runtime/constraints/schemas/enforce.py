"""From any JSON schema to one that llguidance enforces."""

from __future__ import annotations

from typing import Any

from runtime.constraints.schemas.normal import normal
from runtime.constraints.schemas.numbers import held
from runtime.constraints.schemas.references import SelfContained, self_contained
from runtime.constraints.schemas.rewrite import rewritten
from tapeout.errors import RequestError


def enforceable(schema: Any) -> Any:
    """An equal schema of keywords that llguidance knows. :class:`RequestError` where there is none.

    >>> enforceable({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"format": "color"}}})
    {'items': {'$ref': '#/$defs/0'}, '$defs': {'0': {}}}
    """
    try:
        root, definitions = self_contained(schema)
        named = {name: normal(definition) for name, definition in definitions.items()}
        return held(SelfContained(*rewritten(normal(root), named)).joined())
    except RecursionError as error:
        raise RequestError("a JSON schema that is nested too deeply", expected="a few hundred levels") from error
