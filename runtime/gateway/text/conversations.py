"""From the messages of a chat to the prompt that the model's chat template makes of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic_core import to_json

from runtime.gateway.protocol.bodies import Message, Tool
from runtime.gateway.protocol.errors import MESSAGE_CHARACTERS, invalid
from runtime.gateway.text.call_text import parsed_json
from runtime.gateway.text.harmony import EFFORTS, FINAL
from runtime.gateway.text.model import TextModel
from runtime.gateway.text.tools import ToolFormat
from tapeout.errors import RequestError, one_line


async def encode_chat(
    model: TextModel,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool | None,
    variables: Mapping[str, Any] | None,
    parse_special: bool = False,
    most_tokens: int | None = None,
    answer_follows: bool = False,
) -> list[int]:
    """Token ids of a conversation. ``answer_follows``: what comes is the answer, whatever a model may write before it.

    A special token that a message or a tool spells is plain text, unless ``parse_special``: else a user's text could
    end its message, and begin one of the system.
    """
    if model.template is None:
        raise invalid("this model has no chat template; expected: a request to /v1/completions", "model")
    reserved = {"messages", "tools", "documents", "add_generation_prompt"} & (variables or {}).keys()
    if reserved:
        raise invalid(f"chat_template_kwargs has {', '.join(sorted(reserved))}", "chat_template_kwargs")
    given: Any = [plain(message, model.tool_format) for message in messages]
    shown: Any = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None
    values: Any = dict(variables or {})
    mark = None if parse_special else _unused(json.dumps([given, shown, values], ensure_ascii=False))
    if mark is not None:
        given, shown, values = (model.mark_special(value, mark) for value in (given, shown, values))
    begins = add_generation_prompt is not False
    render = partial(model.template.render, tools=shown, add_generation_prompt=begins, variables=values)
    try:
        try:
            text = render(given)
        except RequestError:
            single = one_call_each(given)
            if single == given:
                raise
            text = render(single)
    except RequestError as error:
        raise invalid(one_line(error, MESSAGE_CHARACTERS), "messages") from error
    if answer_follows and model.tool_format == "harmony" and begins:
        text += FINAL
    (tokens,) = await model.encode([text], add_special_tokens=False, most_tokens=most_tokens, cut=mark)
    return tokens


def one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A message for each call, and its results behind it: templates such as Llama 3's refuse several in one.

    Results belong to the call of their id, and without one to the calls in order; what is left over follows the last.

    >>> calls = [{"id": name, "function": {"name": name}} for name in "ab"]
    >>> results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ba"]
    >>> found = one_call_each([{"role": "assistant", "content": "Both.", "tool_calls": calls}, *results])
    >>> [message["tool_calls"][0]["id"] if "tool_calls" in message else message["content"] for message in found]
    ['a', 'a', 'b', 'b']
    """
    found: list[Mapping[str, Any]] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls: Sequence[Any] = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        end = next((place for place, later in enumerate(rest) if later["role"] != "tool"), len(rest))
        results, rest = rest[:end], rest[end:]
        for place, call in enumerate(calls):
            found.append({**message, "tool_calls": [call]} | ({"content": ""} if place else {}))
            own = [result for result in results if call["id"] and result.get("tool_call_id") == call["id"]]
            if not own:
                own = [result for result in results if not result.get("tool_call_id")][:1]
            results = [result for result in results if not any(result is one for one in own)]
            found += own
        found += results
    return found


def opening_of(messages: Sequence[Message]) -> bytes:
    """What all turns of a conversation share: its messages up to the first of the user."""
    first = next((place for place, message in enumerate(messages) if message.role == "user"), len(messages) - 1)
    return to_json([message.model_dump(mode="json", exclude_none=True) for message in messages[: first + 1]])


def _unused(text: str) -> str:
    """A character for private use (U+E000 and on) that is not in ``text``."""
    present = set(text)
    for mark in map(chr, range(0xE000, 0xF900)):
        if mark not in present:
            return mark
    raise invalid("the text has every character from U+E000 to U+F8FF; expected: one of them left out", "messages")


def variables_of(model: TextModel, effort: str | None, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of the template: those that the request names, and how much to reason, where the template asks for it."""
    asks = effort is not None and model.template is not None and "reasoning_effort" in model.template.source
    if asks and model.tool_format == "harmony" and effort not in EFFORTS:
        raise invalid(f"reasoning_effort is {effort!r}; expected: {', '.join(EFFORTS)}", "reasoning_effort")
    return ({"reasoning_effort": effort} if asks else {}) | dict(variables or {})


def plain(message: Message, tool_format: ToolFormat | None = None) -> dict[str, Any]:
    """A message as templates expect it: its content is one text, and the arguments of its calls are objects.

    Mistral's templates refuse ids of calls that are not 9 letters and digits. That of gpt-oss takes reasoning before a
    call as ``thinking``, where the message has no content; reasoning before an answer is left out.
    """

    def shown(id: str | None) -> str:
        return hashlib.sha256((id or "").encode()).hexdigest()[:9] if tool_format == "mistral" else id or ""

    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found["content"] = _content(message)
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = shown(message.tool_call_id)
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": shown(call.id),
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
        if tool_format == "harmony" and message.reasoning_content and not found["content"]:
            found["thinking"] = message.reasoning_content
    return found


def _content(message: Message) -> str:
    match message.content:
        case None:
            return message.refusal or ""
        case str() as text:
            return text
        case parts:
            for part in parts:
                if part.type not in ("text", "refusal"):
                    raise invalid(f"content of type {part.type!r} is not supported; expected: text", "messages")
            return "\n".join(part.text or part.refusal or "" for part in parts)


def _arguments(arguments: Any) -> dict[str, Any]:
    """An object, as templates expect. Whatever a model once wrote can be rendered: else a conversation is stuck on it.

    >>> _arguments('{"city": "Par'), _arguments("[1]"), _arguments("")
    ({'city': 'Par'}, {'arguments': [1]}, {})
    """
    if isinstance(arguments, str):
        written = arguments.strip()
        found = parsed_json(written, allow_partial="trailing-strings" if written.startswith("{") else False)
        arguments = written if found is None and written != "null" else found
    if isinstance(arguments, dict):
        return arguments
    return {} if arguments in (None, "") else {"arguments": arguments}
