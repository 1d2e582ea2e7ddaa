"""Change values of a YAML file and leave every other byte of it as it is.

A library that reads and writes YAML keeps comments, but not quotes, indentation and how nothing is written. So the
parser only says here where a value stands, and its text alone is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tapeout.errors import RecipeError

INDENT = 2
_COLON = re.compile(r"\s*:|")
_COMMENT = re.compile(r"[ \t]+#.*")


def edited(text: str, changes: Mapping[str, Any]) -> str:
    """``text`` with ``changes`` laid over it: mappings are merged, other values take the place of what is there. Its
    line breaks stay: read it without translating them.

    :class:`RecipeError` where the text cannot be edited so, such as below an alias.
    """
    wanted = _merged(yaml.safe_load(text) or {}, changes)
    try:
        for path, value in _leaves(changes):
            text = _set(text, path, value)
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError:  # what an alias means was replaced
        found = None
    if found != wanted:
        raise RecipeError(
            f"{', '.join('.'.join(path) for path, _ in _leaves(changes))} cannot be changed in place",
            expected="values written where they are used, without aliases and merge keys",
            remedy="write the values out in the parameter file, then run again",
        )
    return text


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{
            key: _merged(base[key], value) if _both_mappings(base.get(key), value) else value
            for key, value in changes.items()
        },
    }


def _both_mappings(one: Any, other: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(other, Mapping)


def _leaves(changes: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for key, value in changes.items():
        found += _leaves(value, (*path, key)) if value and isinstance(value, Mapping) else [((*path, key), value)]
    return found


def _set(text: str, path: tuple[str, ...], value: Any) -> str:
    node: yaml.Node | None = yaml.compose(text)
    loaded: Any = yaml.safe_load(text) or {}
    indent = 0
    for depth, name in enumerate(path):
        pair = _pair(node, name)
        rest: Any = value
        for missing in reversed(path[depth + 1 :]):
            rest = {missing: rest}
        if pair is None and _in_flow(node):
            return _inserted_in_flow(text, node, name, rest)
        if pair is None:
            return _inserted(text, node, name, rest, indent)
        key, child = pair
        below = loaded[name]
        last = depth == len(path) - 1
        if last and below == value and type(below) is type(value):
            return text
        if last or not isinstance(below, Mapping):
            return (_replaced_in_flow if _in_flow(node) else _replaced)(text, key, child, rest)
        node, loaded, indent = child, below, key.start_mark.column + INDENT
    raise AssertionError(path)


def _in_flow(node: yaml.Node | None) -> bool:
    return isinstance(node, yaml.MappingNode) and bool(node.flow_style)


def _pair(node: yaml.Node | None, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    pairs: list[tuple[yaml.Node, yaml.Node]] = node.value if isinstance(node, yaml.MappingNode) else []
    return next(((key, child) for key, child in pairs if key.value == name), None)


def _replaced(text: str, key: yaml.Node, child: yaml.Node, value: Any) -> str:
    """A comment on the key's line stays there."""
    colon = text.index(":", key.end_mark.index) + 1
    line_end = _line_end(text, colon)
    if _end(text, child) <= colon:  # nothing is written there
        comment, end = text[colon:line_end], line_end
    elif _is_block(child):
        written = _COMMENT.search(text, colon, line_end)
        comment, end = written[0] if written else "", _end(text, child)
    elif child.start_mark.index < line_end:
        end = _line_end(text, _end(text, child))
        comment = text[_end(text, child) : end]
    else:
        comment, end = text[colon:line_end], _line_end(text, _end(text, child))
    return text[:colon] + _written(text, value, comment, key.start_mark.column) + text[end:]


def _replaced_in_flow(text: str, key: yaml.Node, child: yaml.Node, value: Any) -> str:
    colon = _behind_colon(text, key)
    if _end(text, child) <= colon:  # nothing is written there
        return f"{text[: key.end_mark.index]}: {_flow(value)}{text[colon:]}"
    return text[: child.start_mark.index] + _flow(value) + text[_end(text, child) :]


def _inserted_in_flow(text: str, node: yaml.Node | None, name: str, value: Any) -> str:
    assert isinstance(node, yaml.MappingNode)
    at, comma = text.index("{", node.start_mark.index) + 1, ""
    if node.value:
        key, child = node.value[-1]
        at, comma = max(_end(text, child), _behind_colon(text, key)), ", "
    return f"{text[:at]}{comma}{_flow({name: value})[1:-1]}{text[at:]}"


def _behind_colon(text: str, key: yaml.Node) -> int:
    """Of a key in a flow mapping, where it may have no colon."""
    found = _COLON.match(text, key.end_mark.index)
    assert found is not None
    return found.end()


def _inserted(text: str, node: yaml.Node | None, name: str, value: Any, indent: int) -> str:
    """A key that is not there, behind the last one of its mapping."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    indent = pairs[0][0].start_mark.column if pairs else indent
    at = _line_end(text, max(_end(text, pairs[-1][1]), pairs[-1][0].end_mark.index)) if pairs else len(text)
    line, ends = f"{' ' * indent}{_flow(name)}:{_written(text, value, '', indent)}", _line_break(text)
    before = text[:at] if not text[:at] or text[:at].endswith("\n") else text[:at] + ends
    return before + line + (text[at:] or ends)


def _end(text: str, node: yaml.Node) -> int:
    """Where its text ends; the parser's end of a block lies behind the comments and the empty lines that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last: Any = node.value[-1]
        return max(_end(text, part) for part in last) if isinstance(last, tuple) else _end(text, last)
    if _is_block(node):
        return node.start_mark.index + len(text[node.start_mark.index : node.end_mark.index].rstrip())
    return node.end_mark.index


def _is_block(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")


def _line_end(text: str, index: int) -> int:
    found = text.find("\n", index)
    if found < 0:
        return len(text)
    return found - (found > index and text[found - 1] == "\r")


def _line_break(text: str) -> str:
    """As the first line has it."""
    return "\r\n" if text[_line_end(text, 0) :].startswith("\r") else "\n"


def _written(text: str, value: Any, comment: str, indent: int) -> str:
    """What follows the colon: in one line, but rules of a list have a line each."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return comment + "".join(f"{_line_break(text)}{' ' * (indent + INDENT)}- {_flow(item)}" for item in value)
    return f" {_flow(value)}{comment}"


def _flow(value: Any) -> str:
    """In one line, and quoted so that it may stand in a flow mapping."""
    listed = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    return listed.strip()[1:-1]
