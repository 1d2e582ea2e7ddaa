"""POST /v1/chat/completions: the next message of a conversation, which can be calls of tools."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from runtime.gateway.http.connection import read_body, unless_disconnected
from runtime.gateway.http.generation import ResponseChunk, generate
from runtime.gateway.http.logprobs import Logprobs
from runtime.gateway.http.requests import (
    check_prompts,
    choices_of,
    constraint_of,
    most_tokens,
    new_tokens,
    require_constraint,
    session_of,
    truncated,
)
from runtime.gateway.http.service import Service, headers, usage
from runtime.gateway.http.sse import TEXT, EventStream, JsonResponse, TextEvents, event
from runtime.gateway.protocol.bodies import ChatBody, NamedTool, Tool, parse
from runtime.gateway.protocol.calls import Call
from runtime.gateway.protocol.errors import invalid
from runtime.gateway.text.calls import CallDelta, Read, ToolReader
from runtime.gateway.text.conversations import encode_chat, opening_of, variables_of
from runtime.gateway.text.model import TextModel
from runtime.gateway.text.tools import NamedReader, RequiredReader, reader, required_call
from runtime.wire.messages import Constraint, EngineInfo


async def chat(service: Service, request: Request) -> Response:
    service.require_open()
    body = parse(ChatBody, await read_body(request, service.limits.body_bytes, service.limits.body_seconds))
    call, model, chunks = await begin_chat(service, request, body, "chatcmpl")
    writer = _ChatWriter(body, call, model, _tools(body))
    if not body.stream:
        content = await unless_disconnected(request.receive, writer.response(chunks))
        return JsonResponse(content, headers=headers(call, body, *body.messages))
    # An error before the first token still has a status of its own.
    first = await unless_disconnected(request.receive, anext(chunks))
    return EventStream(writer.events(first, chunks), headers(call, body, *body.messages))


async def begin_chat(
    service: Service, request: Request, body: ChatBody, prefix: str
) -> tuple[Call, TextModel, AsyncGenerator[ResponseChunk]]:
    """The call of a chat, and the chunks of its choices. ``prefix``: of its id."""
    service.require_model(body.model)
    body.refuse_unsupported()
    tools = _tools(body)
    constraint = _constraint(body, tools)

    async def encode(model: TextModel, info: EngineInfo) -> list[int]:
        return await encode_chat(
            model,
            body.messages,
            tools,
            add_generation_prompt=body.add_generation_prompt,
            variables=variables_of(model, body.reasoning_effort, body.chat_template_kwargs),
            parse_special=bool(body.parse_special_tokens),
            most_tokens=most_tokens(body, info),
            answer_follows=constraint is not None,
        )

    session = session_of(body, request.headers)
    opening = session.encode("utf-8", "surrogatepass") or opening_of(body.messages)
    model, info, tokens = await service.encoded(opening, encode)
    prompts = [truncated(body, tokens, info)]
    check_prompts(prompts, info, "messages")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    call = service.call(
        request,
        prefix,
        model,
        prompts,
        n=body.n or 1,
        stream=bool(body.stream),
        max_new_tokens=new_tokens(asked, None, prompts, info),
        conversation=body.messages,
        session=session,
    )
    if constraint is not None:
        await require_constraint(model, body, constraint)
    choices = choices_of(
        body,
        call,
        model,
        info,
        service.limits,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        constraint=constraint,
        # Marks of these formats are special tokens. A response that follows a constraint has none.
        show_special=constraint is None
        and (model.tool_format == "harmony" or (bool(tools) and model.tool_format == "mistral")),
    )
    return call, model, generate(service.client, call, choices, service.hooks)


def _tools(body: ChatBody) -> list[Tool]:
    """The tools that the model may call."""
    if not body.tools:
        if isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required":
            raise invalid("tool_choice asks for a call, but there are no tools", "tool_choice")
        return []
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise invalid("two tools have the same name", "tools")
    return [] if body.tool_choice == "none" else body.tools


def _constraint(body: ChatBody, tools: Sequence[Tool]) -> Constraint | None:
    constraint, choice = constraint_of(body), body.tool_choice
    if not tools or choice in (None, "auto"):
        return constraint
    if constraint is not None:
        raise invalid("a response cannot both have a format and be a call of a tool", "tool_choice")
    named = choice if isinstance(choice, NamedTool) else None
    return required_call(tools, named, body.parallel_tool_calls is not False)


@dataclass
class _Message:
    """What a choice has said so far."""

    reader: ToolReader | None
    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list[CallDelta])
    chunks: list[ResponseChunk] = field(default_factory=list[ResponseChunk])


class _ChatWriter:
    """The response of a call, in one piece or as events."""

    def __init__(self, body: ChatBody, call: Call, model: TextModel, tools: Sequence[Tool]) -> None:
        self._body, self._call, self._model, self._tools = body, call, model, tools
        self._logprobs = Logprobs(model, as_ids=bool(body.return_tokens_as_token_ids))
        self._messages = [_Message(self._reader()) for _ in range(call.choices)]
        self._only_text = not (body.logprobs or body.return_token_ids or body.continuous_usage)
        self._texts: dict[int, TextEvents] = {}  # by choice: its events between the first and the last

    def _reader(self) -> ToolReader | None:
        match self._body.tool_choice:
            case NamedTool(function=function) if self._tools:
                return NamedReader(function.name)
            case "required" if self._tools:
                return RequiredReader()
            case _:
                constrained = _constraint(self._body, self._tools) is not None
                return reader(self._model.tool_format, tools=bool(self._tools), constrained=constrained)

    async def response(self, chunks: AsyncGenerator[ResponseChunk]) -> dict[str, Any]:
        async with aclosing(chunks):
            async for chunk in chunks:
                message = self._messages[chunk.choice.index]
                message.chunks.append(chunk)
                content, calls, reasoning = self._read(message, chunk)
                message.content += content
                message.reasoning += reasoning
                message.calls += calls
        found = self._head("chat.completion")
        found["choices"] = [self._choice(index, message) for index, message in enumerate(self._messages)]
        found["usage"] = usage(self._call)
        prompt = next((chunk.prompt_logprobs for chunk in self._messages[0].chunks if chunk.prompt_logprobs), None)
        if prompt is not None:
            found["prompt_logprobs"] = self._logprobs.prompt(prompt)
        if self._body.return_token_ids:
            found["prompt_token_ids"] = list(self._call.prompts[0])
        return found

    def _choice(self, index: int, message: _Message) -> dict[str, Any]:
        last = message.chunks[-1]
        shown: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning:
            shown["reasoning_content"] = message.reasoning
        if message.calls:
            shown["content"] = message.content or None
            shown["tool_calls"] = _whole_calls(message.calls)
        choice: dict[str, Any] = {
            "index": index,
            "message": shown,
            "logprobs": self._logprobs_of(message.chunks),
            "finish_reason": self._reason(message, last),
            "stop_reason": last.choice.text.stopped_by,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [token for chunk in message.chunks for token in chunk.tokens]
        return choice

    async def events(self, first: ResponseChunk, chunks: AsyncGenerator[ResponseChunk]) -> AsyncGenerator[bytes]:
        async with aclosing(chunks):
            for index in range(self._call.choices):
                yield self._event(index, {"role": "assistant", "content": ""}, first=True)
            for content in self._of(first):
                yield content
            async for chunk in chunks:
                for content in self._of(chunk):
                    yield content
        if self._body.include_usage:
            yield event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage(self._call)})

    def _of(self, chunk: ResponseChunk) -> list[bytes]:
        """The events of a chunk: one, unless it holds content, reasoning or calls together."""
        message = self._messages[chunk.choice.index]
        content, calls, reasoning = self._read(message, chunk)
        if self._only_text and content and not (calls or reasoning) and chunk.finish_reason is None:
            return [self._text(chunk.choice.index, content)]
        message.calls += [call for call in calls if call.name is not None]
        deltas: list[dict[str, Any]] = [{"reasoning_content": reasoning}] if reasoning else []
        deltas += [{"content": content}] if content else []
        deltas += [{"tool_calls": [call.body()]} for call in calls]
        if not deltas and (chunk.finish_reason or chunk.logprobs or (chunk.tokens and self._body.return_token_ids)):
            deltas = [{}]
        last = len(deltas) - 1
        return [self._event(chunk.choice.index, delta, chunk if i == last else None) for i, delta in enumerate(deltas)]

    def _text(self, index: int, text: str) -> bytes:
        events = self._texts.get(index)
        if events is None:
            events = self._texts[index] = TextEvents(self._data(index, {"content": TEXT}))
        return events.event(text)

    def _event(
        self, index: int, delta: dict[str, Any], chunk: ResponseChunk | None = None, *, first: bool = False
    ) -> bytes:
        return event(self._data(index, delta, chunk, first=first))

    def _data(
        self, index: int, delta: dict[str, Any], chunk: ResponseChunk | None = None, *, first: bool = False
    ) -> dict[str, Any]:
        """``chunk``: whose end this event is."""
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if chunk is not None:
            choice["logprobs"] = self._logprobs_of([chunk]) if chunk.logprobs else None
            if chunk.finish_reason:
                choice["finish_reason"] = self._reason(self._messages[index], chunk)
                choice["stop_reason"] = chunk.choice.text.stopped_by
            if self._body.return_token_ids:
                choice["token_ids"] = list(chunk.tokens)
        data = self._head("chat.completion.chunk") | {"choices": [choice]}
        if first and self._body.return_token_ids:
            data["prompt_token_ids"] = list(self._call.prompts[0])
        if self._body.include_usage:
            data["usage"] = usage(self._call) if self._body.continuous_usage else None
        return data

    @staticmethod
    def _read(message: _Message, chunk: ResponseChunk) -> Read:
        """Content, calls and reasoning in new text."""
        if message.reader is None:
            return Read(chunk.text, [])
        found = message.reader.push(chunk.text)
        if chunk.finish_reason:
            rest = message.reader.finish()
            found = Read(found.content + rest.content, found.calls + rest.calls, found.reasoning + rest.reasoning)
        return found

    def _reason(self, message: _Message, chunk: ResponseChunk) -> str | None:
        named = isinstance(self._body.tool_choice, NamedTool)  # OpenAI's reason is "stop" where a function is named
        called = message.calls and chunk.finish_reason == "stop" and not named
        return "tool_calls" if called else chunk.finish_reason

    def _logprobs_of(self, chunks: Sequence[ResponseChunk]) -> dict[str, Any] | None:
        return (
            self._logprobs.chat([entry for chunk in chunks for entry in chunk.logprobs])
            if self._body.logprobs
            else None
        )

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._call.id, "object": kind, "created": self._call.created, "model": self._call.model}


def _whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    arguments: dict[int, str] = {}
    for delta in deltas:
        arguments[delta.place] = arguments.get(delta.place, "") + delta.arguments
    begun = [delta for delta in deltas if delta.name is not None]
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments[call.place]}}
        for call in begun
    ]
