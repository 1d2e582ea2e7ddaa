"""Tool calls in the OpenAI format: how a model writes them, read out of its text as it grows.

A format is known by what the chat template shows the model. Text that looks like a call but is none stays content, so
nothing that the model said is lost.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from runtime.messages import Constraint
from runtime.server.errors import invalid
from runtime.server.protocol import NamedTool, Tool

Format = Literal["hermes", "llama3", "mistral"]
# What each format's templates hold, in this order.
_MARKS: tuple[tuple[Format, str], ...] = (
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama3", '"parameters"'),
)
PYTHON_TAG, TOOL_CALLS, ARGUMENTS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"


class CallDelta(NamedTuple):
    """A new call (with ``id`` and ``name``), or more of the arguments of one. ``place``: among the calls."""

    place: int
    id: str | None
    name: str | None
    arguments: str

    def body(self) -> dict[str, Any]:
        if self.name is None:
            return {"index": self.place, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.place, "id": self.id, "type": "function", "function": function}


class Read(NamedTuple):
    content: str
    calls: list[CallDelta]


class ToolReader(Protocol):
    def push(self, text: str) -> Read:
        """What new text certainly is."""
        ...

    def finish(self) -> Read:
        """The text that was held back, at the end of the response."""
        ...


def format_of(template: str) -> Format | None:
    """How a model with this chat template writes tool calls; None for a template without tools.

    >>> format_of("{% if tools %}... <tool_call>"), format_of("{{ messages }}")
    ('hermes', None)
    """
    if "tools" not in template:
        return None
    return next((name for name, mark in _MARKS if mark in template), None)


def reader(kind: Format) -> ToolReader:
    return {"hermes": HermesReader, "llama3": Llama3Reader, "mistral": MistralReader}[kind]()


class _Calls:
    """Numbers the calls of a response."""

    def __init__(self) -> None:
        self.count = 0

    def new(self, name: str, arguments: str) -> CallDelta:
        self.count += 1
        return CallDelta(self.count - 1, f"call_{uuid.uuid4().hex[:24]}", name, arguments)


class HermesReader:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, of Hermes and Qwen."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._calls, self._held, self._inside = _Calls(), "", False
        self._called = False  # a call has just ended: white space after it is layout

    def push(self, text: str) -> Read:
        self._held += text
        content, calls = "", list[CallDelta]()
        while True:
            if self._called:
                self._held = self._held.lstrip()
                self._called = not self._held
            before, found, after = self._held.partition(self.CLOSE if self._inside else self.OPEN)
            if not found:
                break
            self._held = after
            if self._inside and (call := self._call(before)):
                calls.append(call)
                self._called = True
            elif self._inside:
                content += self.OPEN + before + self.CLOSE
            else:
                content += before
            self._inside = not self._inside
        if not self._inside:
            keep = overlap(self._held, self.OPEN)
            content += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
        return Read(content, calls)

    def finish(self) -> Read:
        held, self._held = self._held, ""
        if not self._inside:
            return Read(held, [])
        call = self._call(held)
        return Read("", [call]) if call else Read(self.OPEN + held, [])

    def _call(self, text: str) -> CallDelta | None:
        parsed = _function(_loads(text))
        return self._calls.new(*parsed) if parsed else None


class Llama3Reader:
    """A response that is only ``{"name": ..., "parameters": {...}}``, or several of them, separated by ``;``."""

    def __init__(self) -> None:
        self._calls, self._held, self._content = _Calls(), "", False

    def push(self, text: str) -> Read:
        if self._content:
            return Read(text, [])
        self._held += text
        start = self._held.lstrip()
        if not start or start[0] == "{" or PYTHON_TAG.startswith(start[: len(PYTHON_TAG)]):
            return Read("", [])
        self._content = True
        return self.finish()

    def finish(self) -> Read:
        held, self._held = self._held, ""
        parsed = None if self._content else _functions(held.strip().removeprefix(PYTHON_TAG), ";")
        return Read("", [self._calls.new(*call) for call in parsed]) if parsed else Read(held, [])


class MistralReader:
    """``[TOOL_CALLS]`` and a list of calls, or a name and its arguments; the mark is a token of its own."""

    def __init__(self) -> None:
        self._calls, self._held, self._inside = _Calls(), "", False

    def push(self, text: str) -> Read:
        self._held += text
        if self._inside:
            return Read("", [])
        content, found, after = self._held.partition(TOOL_CALLS)
        if found:
            self._inside, self._held = True, after
            return Read(content, [])
        keep = overlap(content, TOOL_CALLS)
        self._held = content[len(content) - keep :]
        return Read(content[: len(content) - keep], [])

    def finish(self) -> Read:
        held, self._held = self._held, ""
        if not self._inside:
            return Read(held, [])
        text = held.strip()
        if text.startswith("["):
            listed: Any = _loads(text)
            parsed = [_function(entry) for entry in listed] if isinstance(listed, list) else []
        else:
            parsed = [_named_arguments(part) for part in text.split(TOOL_CALLS)]
        calls = [call for call in parsed if call]
        if not calls or len(calls) < len(parsed):
            return Read(TOOL_CALLS + held, [])
        return Read("", [self._calls.new(*call) for call in calls])


class NamedReader:
    """The whole response is the arguments of one function: a constraint sees to that."""

    def __init__(self, name: str) -> None:
        self._call = _Calls().new(name, "")
        self._begun = False

    def push(self, text: str) -> Read:
        if not text:
            return Read("", [])
        delta = CallDelta(0, None, None, text) if self._begun else self._call._replace(arguments=text)
        self._begun = True
        return Read("", [delta])

    def finish(self) -> Read:
        return Read("", [])


class RequiredReader:
    """The response is a JSON list of calls: a constraint sees to that. Each call is given once it is complete."""

    def __init__(self) -> None:
        self._calls, self._held = _Calls(), ""
        self._depth, self._string, self._escaped = 0, False, False

    def push(self, text: str) -> Read:
        calls: list[CallDelta] = []
        for letter in text:
            if self._depth or letter == "{":
                self._held += letter
            self._scan(letter)
            if self._held and not self._depth:
                parsed = _function(_loads(self._held))
                calls += [self._calls.new(*parsed)] if parsed else []
                self._held = ""
        return Read("", calls)

    def finish(self) -> Read:
        held, self._held = self._held, ""
        return Read(held, [])  # cut off by the token limit

    def _scan(self, letter: str) -> None:
        if self._string:
            self._string = self._escaped or letter != '"'
            self._escaped = letter == "\\" and not self._escaped
        elif letter == '"':
            self._string = True
        elif letter in "{}":
            self._depth += 1 if letter == "{" else -1


def required_call(tools: Sequence[Tool], choice: NamedTool | None, parallel: bool) -> Constraint:
    """What a response must match that calls the chosen function (only its arguments), or at least one of the tools."""
    if choice is not None:
        tool = next((tool for tool in tools if tool.function.name == choice.function.name), None)
        if tool is None:
            raise invalid(f"tool_choice names {choice.function.name!r}, which is not in tools", "tool_choice")
        return Constraint("json_schema", json.dumps(_parameters(tool)))
    definitions: dict[str, dict[str, Any]] = {}
    calls: list[dict[str, Any]] = []
    for tool in tools:
        schema = dict(_parameters(tool))
        for place in ("$defs", "definitions"):  # references are from the root of a schema
            for name, entry in dict(schema.pop(place, None) or {}).items():
                if definitions.setdefault(place, {}).setdefault(name, entry) != entry:
                    raise invalid(f"two tools define {place}.{name} differently", "tools")
        properties: dict[str, Any] = {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": schema}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    several: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return Constraint("json_schema", json.dumps(several | ({} if parallel else {"maxItems": 1}) | definitions))


def overlap(text: str, mark: str) -> int:
    """Length of the longest beginning of ``mark`` that ``text`` ends with.

    >>> overlap("a <tool", "<tool_call>"), overlap("a", "<tool_call>")
    (5, 0)
    """
    longest = min(len(mark) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _function(call: Any) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of a call as models write it."""
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _functions(text: str, separator: str) -> list[tuple[str, str]] | None:
    """All calls of a text that holds nothing else."""
    found: list[tuple[str, str]] = []
    decoder = json.JSONDecoder()
    text = text.strip()
    while text:
        try:
            call, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return None
        parsed = _function(call)
        if parsed is None:
            return None
        found.append(parsed)
        text = text[end:].lstrip().removeprefix(separator).lstrip()
    return found


def _named_arguments(text: str) -> tuple[str, str] | None:
    """``name{...}`` or ``name[ARGS]{...}``."""
    name, brace, rest = text.strip().partition("{")
    return _function({"name": name.strip().removesuffix(ARGUMENTS).strip(), "arguments": _loads(brace + rest)})
