"""POST /v1/responses: OpenAI's newer form of a chat, for text. The server keeps no conversations.

The body becomes that of a chat, so both have the same rules.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from runtime.gateway.http.chat import begin_chat
from runtime.gateway.http.connection import read_body, unless_disconnected
from runtime.gateway.http.generation import ResponseChunk
from runtime.gateway.http.service import Service, headers
from runtime.gateway.http.sse import EventStream, JsonResponse, event
from runtime.gateway.protocol.bodies import (
    Body,
    ChatBody,
    ContentPart,
    JsonSchema,
    Message,
    ResponseFormat,
    SessionId,
    parse,
)
from runtime.gateway.protocol.calls import Call
from runtime.gateway.protocol.errors import invalid


class InputItem(Body):
    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None


class TextFormat(JsonSchema):
    """As ``response_format``, with the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]


class ResponseTextSettings(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(Body):
    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: ResponseTextSettings | None = None
    prompt_cache_key: SessionId | None = None
    # Known, and refused where they ask for anything.
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    tools: list[Any] | None = None
    include: list[str] | None = None

    def chat(self) -> ChatBody:
        """The same as a chat. :class:`ApiError` for what only a server that keeps conversations can do."""
        for name in ("previous_response_id", "conversation", "background", "prompt", "tools", "include"):
            if getattr(self, name):
                raise invalid(f"{name} is not supported by /v1/responses", name)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise invalid(f"max_output_tokens is {self.max_output_tokens}; expected: at least 1", "max_output_tokens")
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        return ChatBody(
            model=self.model,
            messages=messages + self._messages(),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            prompt_cache_key=self.prompt_cache_key,
            response_format=self._format(),
        )

    def _messages(self) -> list[Message]:
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        found: list[Message] = []
        for item in self.input:
            if item.role is None or item.type not in (None, "message"):
                raise invalid(f"input of type {item.type!r} is not supported; expected: messages", "input")
            content = item.content
            if isinstance(content, list):
                for part in content:
                    if part.type not in ("input_text", "output_text", "text", "refusal"):
                        raise invalid(f"content of type {part.type!r} is not supported; expected: text", "input")
                content = [ContentPart(type="text", text=part.text or part.refusal or "") for part in content]
            found.append(Message(role=item.role, content=content))
        return found

    def _format(self) -> ResponseFormat | None:
        wanted = self.text.format if self.text else None
        return None if wanted is None else ResponseFormat(type=wanted.type, json_schema=wanted)


async def responses(service: Service, request: Request) -> Response:
    service.require_open()
    body = parse(ResponsesBody, await read_body(request, service.limits.body_bytes, service.limits.body_seconds))
    call, _, chunks = await begin_chat(service, request, body.chat(), "resp")
    writer = _ResponseWriter(body, call)
    if not body.stream:
        content = await unless_disconnected(request.receive, writer.response(chunks))
        return JsonResponse(content, headers=headers(call, body))
    # An error before the first token still has a status of its own.
    first = await unless_disconnected(request.receive, anext(chunks))
    return EventStream(writer.events(first, chunks), headers(call, body))


class _ResponseWriter:
    """The response of a call, in one piece or as events."""

    def __init__(self, body: ResponsesBody, call: Call) -> None:
        self._body, self._call = body, call
        self._item = f"msg_{uuid.uuid4().hex}"
        self._events = 0

    async def response(self, chunks: AsyncGenerator[ResponseChunk]) -> dict[str, Any]:
        async with aclosing(chunks):
            text = "".join([chunk.text async for chunk in chunks])
        return self._response(text)

    async def events(self, first: ResponseChunk, chunks: AsyncGenerator[ResponseChunk]) -> AsyncGenerator[bytes]:
        where = {"item_id": self._item, "output_index": 0, "content_index": 0}
        async with aclosing(chunks):
            yield self._event("response.created", response=self._response(None))
            yield self._event("response.in_progress", response=self._response(None))
            yield self._event("response.output_item.added", output_index=0, item=self._message(None))
            yield self._event("response.content_part.added", **where, part=_content(""))
            text = first.text
            if first.text:
                yield self._event("response.output_text.delta", **where, delta=first.text, logprobs=[])
            async for chunk in chunks:
                text += chunk.text
                if chunk.text:
                    yield self._event("response.output_text.delta", **where, delta=chunk.text, logprobs=[])
        yield self._event("response.output_text.done", **where, text=text, logprobs=[])
        yield self._event("response.content_part.done", **where, part=_content(text))
        yield self._event("response.output_item.done", output_index=0, item=self._message(text))
        yield self._event(f"response.{self._status}", response=self._response(text))

    @property
    def _status(self) -> str:
        reason = self._call.finish_reasons.get(0)
        return "in_progress" if reason is None else "completed" if reason == "stop" else "incomplete"

    def _event(self, name: str, **values: Any) -> bytes:
        self._events += 1
        return event({"type": name, "sequence_number": self._events - 1, **values}, name)

    def _message(self, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_content(text)]
        status = "in_progress" if text is None else self._status
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, text: str | None) -> dict[str, Any]:
        """``text`` None: it has only begun."""
        call, body = self._call, self._body
        status = "in_progress" if text is None else self._status
        wanted = body.text.format if body.text else None
        used = {
            "input_tokens": call.prompt_tokens,
            "input_tokens_details": {"cached_tokens": call.cached_tokens},
            "output_tokens": call.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": call.prompt_tokens + call.completion_tokens,
        }
        return {
            "id": call.id,
            "object": "response",
            "created_at": call.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": call.model,
            "output": [] if text is None else [self._message(text)],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "usage": None if text is None else used,
        }


def _content(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
