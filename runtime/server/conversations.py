"""From the messages of a chat to the prompt that the model's chat template makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.server.errors import invalid
from runtime.server.protocol import Message, Tool
from runtime.server.text import TextModel


async def encode_chat(
    model: TextModel,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool | None,
    variables: Mapping[str, Any] | None,
    most_tokens: int | None = None,
) -> list[int]:
    """Token ids of a conversation."""
    if model.template is None:
        raise invalid("this model has no chat template; expected: a request to /v1/completions", "model")
    reserved = {"messages", "tools", "documents", "add_generation_prompt"} & (variables or {}).keys()
    if reserved:
        raise invalid(f"chat_template_kwargs has {', '.join(sorted(reserved))}", "chat_template_kwargs")
    text = model.template.render(
        [plain(message) for message in messages],
        tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        add_generation_prompt=add_generation_prompt is not False,
        **(variables or {}),
    )
    (tokens,) = await model.encode([text], add_special_tokens=False, most_tokens=most_tokens)
    return tokens


def plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: its content is one text, and the arguments of its calls are objects."""
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found["content"] = _content(message)
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
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


def _arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed: Any = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid("the arguments of a tool call are not a JSON object", "messages")
    return parsed
