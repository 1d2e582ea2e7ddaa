"""The JSON text of a tool call, complete or cut off: where it ends, and its name and arguments as they were written.

Arguments stay the model's own text: parsed and written again, large numbers and repeated keys would change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

# A string (its end can be missing), a mark of structure, or a number or literal.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
# Where the state changes outside and inside a string. Outside, JSON has no letters but those of true, false and null.
_STOPS = {False: re.compile(r"[^\s0-9+\-.eEtrufalsn,:]"), True: re.compile(r'["\\]')}


class CallText(NamedTuple):
    """``arguments``: JSON text of an object; of a call that was cut off, as far as it came."""

    name: str
    arguments: str


class ValueEnd:
    """Finds the end of a JSON object or list that comes in pieces, in linear time. Brackets in strings do not count.

    A character that JSON cannot have there ends the value, too: such a text is no JSON, whatever follows.
    """

    def __init__(self) -> None:
        self._depth, self._string, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """Index after the end of the value in the next piece; None if it goes on. The first piece begins with it."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = _STOPS[self._string].search(text, at)
            if found is None:
                return None
            at = found.end()
            match found[0]:
                case '"':
                    self._string = not self._string
                case "\\" if self._string:
                    self._escaped = True
                case "{" | "[":
                    self._depth += 1
                case "}" | "]" if self._depth > 1:
                    self._depth -= 1
                case "}" | "]":
                    return at
                case _:
                    return at - 1
        return None


def value_end(text: str) -> int | None:
    """Index after the JSON object or list that ``text`` begins with; None if it is cut off.

    >>> value_end('{"a": "}"} b'), value_end('{"a": "}"'), value_end('{"a": 1 <')
    (10, None, 8)
    """
    return ValueEnd().find(text)


def call_of(text: str, *, cut_off: bool = False, needs_arguments: bool = False) -> CallText | None:
    """The call that a JSON text is; None if it is none. ``cut_off``: the text may end early, but not in the name.

    ``needs_arguments``: an object with a name and no arguments is no call, as where nothing else marks one.

    >>> call_of('{"name": "add", "arguments": {"x": 1.0}}')
    CallText(name='add', arguments='{"x": 1.0}')
    >>> call_of('{"name": "add", "arguments": {"x": "a', cut_off=True)
    CallText(name='add', arguments='{"x": "a')
    """
    parsed = parsed_json(text, allow_partial=cut_off)
    if not isinstance(parsed, dict) or not isinstance(name := parsed.get("name"), str) or not name:
        return None
    members = dict(_members(text))
    if needs_arguments and not members.keys() & {"arguments", "parameters"} and not (cut_off and len(members) == 1):
        return None
    arguments = members.get("arguments", members.get("parameters", ""))
    if arguments.startswith('"'):  # some models write a string that holds the JSON text
        arguments = parsed_json(arguments, allow_partial="trailing-strings" if cut_off else False) or ""
    if arguments in ("", "null"):
        return CallText(name, "" if cut_off else "{}")
    return CallText(name, arguments) if isinstance(parsed_json(arguments, allow_partial=cut_off), dict) else None


def parsed_json(text: str, *, allow_partial: bool | Literal["trailing-strings"] = False) -> Any:
    """None for a text that is not JSON. ``allow_partial``: it may be cut off; see ``pydantic_core.from_json``."""
    try:
        return from_json(text, allow_inf_nan=False, allow_partial=allow_partial)
    except ValueError:
        return None


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Keys and values (their text) of the JSON object that ``text`` begins with; the last value can be cut off."""
    depth, key, start, end = 0, "", None, 0
    for token in _TOKEN.finditer(text):
        word = token[0]
        if depth == 1 and word in (",", "}"):
            if start is not None:
                yield key, text[start:end]
            key, start = "", None
        elif depth == 1 and start is None and word != ":":
            if not key and word[0] == '"':
                key = parsed_json(word) or ""
            else:
                start = token.start()
        depth += (word in ("{", "[")) - (word in ("}", "]"))
        end = token.end()
        if not depth:
            return
    if start is not None:
        yield key, text[start:]
