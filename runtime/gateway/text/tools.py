"""Tool calls in the OpenAI format: how a model writes them, read out of its text as it grows.

A format is known by what the chat template shows the model. Text that looks like a call but is none stays content, so
nothing that the model said is lost. A call that was cut off is given as far as it came, once its name is complete.
However the text is cut into pieces, the calls and the content are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from runtime.constraints.schemas.references import SelfContained, self_contained
from runtime.gateway.protocol.bodies import NamedTool, Tool
from runtime.gateway.protocol.errors import invalid
from runtime.gateway.text.call_text import CallText, ValueEnd, call_of, parsed_json, value_end
from runtime.gateway.text.calls import CallDelta, Calls, Read, ToolReader
from runtime.gateway.text.harmony import CHANNEL, HarmonyReader
from runtime.gateway.text.stops import overlap
from runtime.wire.messages import Constraint
from tapeout.errors import RequestError

ToolFormat = Literal["harmony", "hermes", "llama3", "mistral"]
# What each format's templates hold, in this order.
_MARKS: tuple[tuple[ToolFormat, str], ...] = (
    ("harmony", CHANNEL),
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama3", '"parameters"'),
)
_NAME = re.compile(r"[\w.\-]+")
PYTHON_TAG, TOOL_CALLS, ARGUMENTS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"


def format_of(template: str) -> ToolFormat | None:
    """How a model with this chat template writes tool calls; None for a template without tools.

    >>> format_of("{% if tools %}... <tool_call>"), format_of("{{ messages }}")
    ('hermes', None)
    """
    if "tools" not in template:
        return None
    return next((name for name, mark in _MARKS if mark in template), None)


def reader(kind: ToolFormat | None, *, tools: bool, constrained: bool) -> ToolReader | None:
    """For a response of a model that writes like this; None where it is content alone.

    ``tools``: the request has some. ``constrained``: the response follows a constraint. In the harmony format it is one
    message then, whatever marks it spells.
    """
    if kind == "harmony":
        return None if constrained else HarmonyReader(calls=tools)
    if kind is None or not tools:
        return None
    return {"hermes": HermesReader, "llama3": Llama3Reader, "mistral": MistralReader}[kind]()


class HermesReader:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, of Hermes and Qwen.

    A call ends where its JSON ends: its strings can hold any text, the marks too. The closing mark can be missing.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._calls, self._held = Calls(), ""
        self._inside = False  # after an opening mark, whose call is not complete
        self._unclosed = False  # after a call, whose closing mark has not come
        self._layout = False  # white space here stands between marks, so it is no content
        self._end, self._scanned = ValueEnd(), 0

    def push(self, text: str) -> Read:
        return self._read(text, ended=False)

    def finish(self) -> Read:
        return self._read("", ended=True)

    def _read(self, text: str, *, ended: bool) -> Read:
        self._held += text
        content, calls = "", list[CallDelta]()
        while True:
            if not self._inside:
                content += self._content(ended)
                if not self._inside:
                    return Read(content, calls)
            end = self._call_end()
            if end is None and not ended:
                return Read(content, calls)
            call = call_of(self._held[:end], cut_off=end is None)
            self._inside, self._end, self._scanned = False, ValueEnd(), 0
            if call is None:
                content += self.OPEN
                continue  # what follows the mark can hold another one
            calls.append(self._calls.new(*call))
            self._held = "" if end is None else self._held[end:]
            self._unclosed = self._layout = True

    def _content(self, ended: bool) -> str:
        """The text up to the next opening mark, as far as it is certain."""
        content = ""
        while True:
            if self._layout:
                self._held = self._held.lstrip()
                self._layout = not self._held
            marks = (self.OPEN, self.CLOSE) if self._unclosed else (self.OPEN,)
            found = [(place, mark) for mark in marks if (place := self._held.find(mark)) >= 0]
            if not found:
                keep = 0 if ended else max(overlap(self._held, mark) for mark in marks)
                content += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                return content
            place, mark = min(found)
            content += self._held[:place]
            self._held = self._held[place + len(mark) :]
            self._unclosed = False
            if mark == self.OPEN:
                self._inside = True
                return content
            self._layout = True

    def _call_end(self) -> int | None:
        """Where the JSON of the call ends in the held text; None if it goes on."""
        if not self._scanned:
            begin = len(self._held) - len(self._held.lstrip())
            if begin == len(self._held):
                return None
            if self._held[begin] != "{":
                return begin
            self._scanned = begin
        end, before = self._end.find(self._held[self._scanned :]), self._scanned
        self._scanned = len(self._held)
        return None if end is None else before + end


class Llama3Reader:
    """A response that is only ``{"name": ..., "parameters": {...}}``, or several of them, separated by ``;``."""

    def __init__(self) -> None:
        self._calls, self._held, self._content = Calls(), "", False

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
        if self._content:
            return Read(held, [])
        found, rest = _listed(held.lstrip().removeprefix(PYTHON_TAG), ";", needs_arguments=True)
        return Read(rest, [self._calls.new(*call) for call in found]) if found else Read(held, [])


class MistralReader:
    """``[TOOL_CALLS]`` and a list of calls, or a name and its arguments; the mark is a token of its own."""

    def __init__(self) -> None:
        self._calls, self._held, self._inside = Calls(), "", False

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
        text = held.lstrip()
        found, rest = _listed(text[1:], ",", closing="]") if text.startswith("[") else _named(text)
        if not found:
            return Read(TOOL_CALLS + held, [])
        return Read(TOOL_CALLS + rest if rest else "", [self._calls.new(*call) for call in found])


class NamedReader:
    """The whole response is the arguments of one function: a constraint sees to that."""

    def __init__(self, name: str) -> None:
        self._call = Calls().new(name, "")
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
    """The response is a JSON list of calls: a constraint sees to that. Each call is given once it is complete.

    What else there is of the list is our own form, which no client knows: it is never content.
    """

    def __init__(self) -> None:
        self._calls, self._held = Calls(), ""
        self._end = ValueEnd()

    def push(self, text: str) -> Read:
        calls: list[CallDelta] = []
        while text:
            if not self._held:
                text = text[len(text.partition("{")[0]) :]
            end = self._end.find(text)
            self._held += text[:end]
            if end is None:
                break
            text = text[end:]
            calls += self._taken(cut_off=False)
        return Read("", calls)

    def finish(self) -> Read:
        return Read("", self._taken(cut_off=True))

    def _taken(self, *, cut_off: bool) -> list[CallDelta]:
        call = call_of(self._held, cut_off=cut_off)
        self._held, self._end = "", ValueEnd()
        return [] if call is None else [self._calls.new(*call)]


def required_call(tools: Sequence[Tool], choice: NamedTool | None, parallel: bool) -> Constraint:
    """What a response must match that calls the chosen function (only its arguments), or at least one of the tools."""
    if choice is not None:
        tool = next((tool for tool in tools if tool.function.name == choice.function.name), None)
        if tool is None:
            raise invalid(f"tool_choice names {choice.function.name!r}, which is not in tools", "tool_choice")
        return Constraint("json_schema", json.dumps(_arguments(tool).joined()))
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for place, tool in enumerate(tools):
        schema, needed = _arguments(tool, prefix=f"{place}.")
        definitions |= needed
        properties: dict[str, Any] = {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": schema}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    several: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return Constraint("json_schema", json.dumps(several | ({} if parallel else {"maxItems": 1})))


def _arguments(tool: Tool, prefix: str = "") -> SelfContained:
    """The schema of a tool's arguments. They are an object, also where the tool's own schema allows other values."""
    parameters = tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        schema, definitions = self_contained(parameters, prefix)
    except RequestError as error:
        raise invalid(f"the tool {tool.function.name!r}: {error.found}", "tools") from error
    if schema.get("type") != "object":
        schema = {"type": "object", "allOf": [schema]}
    return SelfContained(schema, definitions)


def _listed(
    text: str, separator: str, *, closing: str = "", needs_arguments: bool = False
) -> tuple[list[CallText], str]:
    """The calls of a list, and the text of one whose name was cut off. None if there is anything else."""
    found: list[CallText] = []
    text = text.lstrip()
    while text.rstrip() not in ("", closing):
        end = value_end(text) if text[0] == "{" else 0
        call = call_of(text[:end], cut_off=end is None, needs_arguments=needs_arguments)
        if call is None:
            return (found, text) if end is None else ([], "")
        found.append(call)
        text = "" if end is None else text[end:].lstrip().removeprefix(separator).lstrip()
    return found, ""


def _named(text: str) -> tuple[list[CallText], str]:
    """As :func:`_listed`, of calls as ``name{...}`` or ``name[ARGS]{...}``, with the mark between them."""
    found: list[CallText] = []
    while text:
        name, brace, _ = text.partition("{")
        if not brace:
            return found, text
        written = text[len(name) :]
        end = value_end(written)
        name = name.strip().removesuffix(ARGUMENTS).strip()
        if not _NAME.fullmatch(name) or not isinstance(parsed_json(written[:end], allow_partial=end is None), dict):
            return [], ""
        found.append(CallText(name, written[:end]))
        rest = "" if end is None else written[end:].lstrip()
        text = rest.removeprefix(TOOL_CALLS)
        if rest and text == rest:
            return [], ""
    return found, ""
