"""JSON values as JSON Schema compares them: 1 equals 1.0, and neither equals true."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def key_of(value: Any) -> Any:
    """Equal for equal values, and hashable.

    >>> key_of([1, {"a": True}]) == key_of([1.0, {"a": True}]), key_of(1) == key_of(True)
    (True, False)
    """
    match value:
        case bool() | None:
            return ("constant", value)
        case dict():
            return ("object", frozenset((name, key_of(inner)) for name, inner in value.items()))
        case list():
            return ("array", tuple(map(key_of, value)))
        case _:
            return (type_of(value), value)


def type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def distinct(values: Iterable[Any]) -> list[Any]:
    """In order, without what equals an earlier one."""
    return list({key_of(value): value for value in reversed(list(values))}.values())[::-1]


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """What ``const`` and ``enum`` allow together; None if neither is there."""
    found = None
    if "enum" in schema:
        found = distinct(schema["enum"])
    if "const" in schema:
        constant = schema["const"]
        found = [constant] if found is None or key_of(constant) in map(key_of, found) else []
    return found


def one_of_texts(texts: Sequence[str]) -> str:
    """A pattern of just these texts.

    >>> import re
    >>> bool(re.search(one_of_texts(["a.b", "c"]), "a.b")), bool(re.search(one_of_texts(["a.b", "c"]), "axb"))
    (True, False)
    """
    return f"^(?:{'|'.join(map(literal, texts))})$"


def other_texts(texts: Iterable[str]) -> str:
    """A pattern of every text but these, without look-ahead, which llguidance does not know.

    >>> import re
    >>> pattern = re.compile(other_texts(["cat", "car", ""]))
    >>> [text for text in ("cat", "car", "", "ca", "cart", "c", "dog") if pattern.search(text)]
    ['ca', 'cart', 'c', 'dog']
    """
    return f"^{_other(set(texts))}$"


def literal(text: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else _escaped(letter) for letter in text)


def _other(texts: set[str]) -> str:
    """Follows the texts letter by letter: it differs at the first letter that none of them has, or by its length."""
    tails: dict[str, set[str]] = {}
    for text in sorted(texts):
        if text:
            tails.setdefault(text[0], set()).add(text[1:])
    if not tails:
        return "(?s:.+)"
    others = "[^" + "".join(map(literal, tails)) + "](?s:.*)"
    ways = "|".join([others, *(literal(letter) + _other(rest) for letter, rest in tails.items())])
    return f"(?:{ways})" if "" in texts else f"(?:{ways})?"


def _escaped(letter: str) -> str:
    return f"\\u{ord(letter):04x}" if ord(letter) < 1 << 16 else f"\\U{ord(letter):08x}"
