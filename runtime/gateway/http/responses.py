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
from runtime.gateway.http.requests import constraint_of
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
from runtime.gateway.protocol.errors import ApiError, invalid
from runtime.gateway.text.calls import Read, ToolReader
from runtime.gateway.text.tools import reader

Kind = Literal["message", "reasoning"]  # of items of the output
FIELDS = {"messages": "input", "response_format": "text"}  # of a chat, and what they are here


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


class ReasoningSettings(Body):
    effort: str | None = None


class ResponsesBody(Body):
    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: ResponseTextSettings | None = None
    reasoning: ReasoningSettings | None = None
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
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
        )

    def _messages(self) -> list[Message]:
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        found: list[Message] = []
        for item in self.input:
            if item.type == "reasoning":  # of an earlier response: before an answer, templates leave it out
                continue
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
    chat = body.chat()
    try:
        call, model, chunks = await begin_chat(service, request, chat, "resp")
    except ApiError as error:
        error.param = FIELDS.get(error.param or "", error.param)
        raise
    constrained = constraint_of(chat) is not None  # not by a format that says "text"
    writer = _ResponseWriter(body, call, reader(model.tool_format, tools=False, constrained=constrained))
    if not body.stream:
        content = await unless_disconnected(request.receive, writer.response(chunks))
        return JsonResponse(content, headers=headers(call, body))
    # An error before the first token still has a status of its own.
    first = await unless_disconnected(request.receive, anext(chunks))
    return EventStream(writer.events(first, chunks), headers(call, body))


class _Item:
    """An item of the output, as far as it has come. ``place``: among the items."""

    def __init__(self, kind: Kind, place: int) -> None:
        self.kind: Kind = kind
        self.place, self.text = place, ""
        self.id = f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}"

    @property
    def event(self) -> str:
        return "output_text" if self.kind == "message" else "reasoning_text"

    def part(self, text: str) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": self.event, "text": text, **more}

    def body(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        content = [self.part(self.text)] if begun else []
        own = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"id": self.id, "type": self.kind, "status": status, "content": content, **own}


class _ResponseWriter:
    """The response of a call, in one piece or as events. ``reader``: of a model that writes more than its answer."""

    def __init__(self, body: ResponsesBody, call: Call, reader: ToolReader | None) -> None:
        self._body, self._call, self._reader = body, call, reader
        self._items: list[_Item] = []
        self._events = 0
        self._reasoning_tokens = 0  # of the steps that brought reasoning and nothing else

    async def response(self, chunks: AsyncGenerator[ResponseChunk]) -> dict[str, Any]:
        async with aclosing(chunks):
            async for chunk in chunks:
                for kind, text in self._read(chunk):
                    self._item(kind).text += text
        self._item("message")
        return self._response(done=True)

    async def events(self, first: ResponseChunk, chunks: AsyncGenerator[ResponseChunk]) -> AsyncGenerator[bytes]:
        async with aclosing(chunks):
            yield self._event("response.created", response=self._response(done=False))
            yield self._event("response.in_progress", response=self._response(done=False))
            for content in self._of(first):
                yield content
            async for chunk in chunks:
                for content in self._of(chunk):
                    yield content
        if not self._items or self._items[-1].kind != "message":
            for content in self._next("message"):
                yield content
        for content in self._closed():
            yield content
        yield self._event(f"response.{self._status}", response=self._response(done=True))

    def _read(self, chunk: ResponseChunk) -> list[tuple[Kind, str]]:
        """Reasoning and text of the answer, in this order; the answer of other models begins at once."""
        if self._reader is None:
            return [("message", chunk.text)]
        found = self._reader.push(chunk.text)
        rest = self._reader.finish() if chunk.finish_reason else Read("", [])
        if found.reasoning and not found.content:
            self._reasoning_tokens += len(chunk.tokens)
        parts: list[tuple[Kind, str]] = [
            ("reasoning", found.reasoning + rest.reasoning),
            ("message", found.content + rest.content),
        ]
        return [(kind, text) for kind, text in parts if text]

    def _item(self, kind: Kind) -> _Item:
        """The last item, or a new one of another kind."""
        if not self._items or self._items[-1].kind != kind:
            self._items.append(_Item(kind, len(self._items)))
        return self._items[-1]

    def _of(self, chunk: ResponseChunk) -> list[bytes]:
        found: list[bytes] = []
        for kind, text in self._read(chunk):
            if not self._items or self._items[-1].kind != kind:
                found += self._next(kind)
            item = self._items[-1]
            item.text += text
            more = {"logprobs": []} if kind == "message" else {}
            if text:
                found.append(self._event(f"response.{item.event}.delta", **self._where(item), delta=text, **more))
        return found

    def _next(self, kind: Kind) -> list[bytes]:
        """The events that end the last item and begin another."""
        found = self._closed() if self._items else []
        item = self._item(kind)
        begun = item.body("in_progress", begun=False)
        return [
            *found,
            self._event("response.output_item.added", output_index=item.place, item=begun),
            self._event("response.content_part.added", **self._where(item), part=item.part("")),
        ]

    def _closed(self) -> list[bytes]:
        item = self._items[-1]
        more = {"logprobs": []} if item.kind == "message" else {}
        done = item.body(self._status_of(item))
        return [
            self._event(f"response.{item.event}.done", **self._where(item), text=item.text, **more),
            self._event("response.content_part.done", **self._where(item), part=item.part(item.text)),
            self._event("response.output_item.done", output_index=item.place, item=done),
        ]

    @staticmethod
    def _where(item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.place, "content_index": 0}

    def _status_of(self, item: _Item) -> str:
        """What is followed by another item is complete."""
        status = self._status
        return "completed" if status == "in_progress" or item is not self._items[-1] else status

    @property
    def _status(self) -> str:
        reason = self._call.finish_reasons.get(0)
        return "in_progress" if reason is None else "completed" if reason == "stop" else "incomplete"

    def _event(self, name: str, **values: Any) -> bytes:
        self._events += 1
        return event({"type": name, "sequence_number": self._events - 1, **values}, name)

    def _response(self, *, done: bool) -> dict[str, Any]:
        call, body = self._call, self._body
        status = self._status if done else "in_progress"
        wanted = body.text.format if body.text else None
        used = {
            "input_tokens": call.prompt_tokens,
            "input_tokens_details": {"cached_tokens": call.cached_tokens},
            "output_tokens": call.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
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
            "output": [item.body(self._status_of(item)) for item in self._items] if done else [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "usage": used if done else None,
        }
