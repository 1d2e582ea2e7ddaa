"""POST /v1/completions: continue texts or token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from runtime.gateway.http.connection import read_body, unless_disconnected
from runtime.gateway.http.generation import ResponseChoice, ResponseChunk, generate
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
from runtime.gateway.protocol.bodies import CompletionBody, parse
from runtime.gateway.protocol.calls import Call
from runtime.gateway.protocol.errors import invalid
from runtime.gateway.text.model import ResponseText, TextModel
from runtime.wire.messages import TokenLogprobs

NEW_TOKENS = 16  # OpenAI's default


async def completions(service: Service, request: Request) -> Response:
    service.require_open()
    body = parse(CompletionBody, await read_body(request, service.limits.body_bytes, service.limits.body_seconds))
    service.require_model(body.model)
    body.refuse_unsupported()
    session = session_of(body, request.headers)
    opening = session.encode("utf-8", "surrogatepass") or to_json(body.prompt)
    model, info, (texts, prompts) = await service.encoded(
        opening, lambda model, info: _prompts(body, model, most_tokens(body, info))
    )
    prompts = [truncated(body, prompt, info) for prompt in prompts]
    check_prompts(prompts, info, "prompt")
    call = service.call(
        request,
        "cmpl",
        model,
        prompts,
        n=body.n or 1,
        stream=bool(body.stream),
        max_new_tokens=new_tokens(body.max_tokens, NEW_TOKENS, prompts, info),
        conversation=texts,
        session=session,
    )
    constraint = constraint_of(body)
    if constraint is not None:
        await require_constraint(model, body, constraint)
    echoed = body.logprobs if body.echo else None
    asked = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    choices = choices_of(
        body,
        call,
        model,
        info,
        service.limits,
        logprobs=body.logprobs,
        prompt_logprobs=max(asked, default=None),
        constraint=constraint,
    )
    writer = CompletionWriter(body, call, model, texts)
    chunks = generate(service.client, call, choices, service.hooks)
    if not body.stream:
        content = await unless_disconnected(request.receive, writer.response(chunks))
        return JsonResponse(content, headers=headers(call, body))
    # An error before the first token still has a status of its own.
    first = await unless_disconnected(request.receive, anext(chunks))
    return EventStream(writer.events(first, chunks), headers(call, body))


async def _prompts(
    body: CompletionBody, model: TextModel, most: int | None
) -> tuple[list[str | None], list[list[int]]]:
    """Texts (None for one that was given as token ids) and token ids of all prompts."""
    match body.prompt:
        case None | []:
            raise invalid("there is no prompt; expected: a text, texts, token ids, or lists of token ids", "prompt")
        case str() as text:
            given: Sequence[str | list[int]] = [text]
        case [int(), *_] as tokens:
            given = [[token for token in tokens if not isinstance(token, str | list)]]
        case several:
            given = [entry for entry in several if not isinstance(entry, int)]
    texts = [entry if isinstance(entry, str) else None for entry in given]
    encoded = iter(
        await model.encode(
            [text for text in texts if text is not None],
            add_special_tokens=body.add_special_tokens is not False,
            most_tokens=most,
        )
    )
    return texts, [next(encoded) if isinstance(entry, str) else entry for entry in given]


class CompletionWriter:
    """The response of a call, in one piece or as events. ``texts``: of the prompts, where they were given as text."""

    def __init__(self, body: CompletionBody, call: Call, model: TextModel, texts: Sequence[str | None]) -> None:
        self._body, self._call, self._model, self._texts = body, call, model, texts
        self._logprobs = Logprobs(model, as_ids=bool(body.return_tokens_as_token_ids))
        self._echoes: dict[int, tuple[str, list[int]]] = {}
        self._only_text = body.logprobs is None and not body.return_token_ids and not body.continuous_usage
        self._texts_of: dict[int, TextEvents] = {}  # by choice: its events between the first and the last

    async def response(self, chunks: AsyncGenerator[ResponseChunk]) -> dict[str, Any]:
        made: dict[int, list[ResponseChunk]] = {}
        async with aclosing(chunks):
            async for chunk in chunks:
                made.setdefault(chunk.choice.index, []).append(chunk)
        choices = [self._choice(made[index]) for index in sorted(made)]
        return self._head() | {"choices": choices, "usage": usage(self._call)}

    async def events(self, first: ResponseChunk, chunks: AsyncGenerator[ResponseChunk]) -> AsyncGenerator[bytes]:
        async with aclosing(chunks):
            yield self._event(first, begins=True)
            begun = {first.choice.index}
            async for chunk in chunks:
                begins = chunk.choice.index not in begun
                begun.add(chunk.choice.index)
                shown = (
                    chunk.text
                    or chunk.finish_reason
                    or chunk.logprobs
                    or (chunk.tokens and self._body.return_token_ids)
                )
                if shown or begins:
                    yield self._event(chunk, begins=begins)
        if self._body.include_usage:
            yield event(self._head() | {"choices": [], "usage": usage(self._call)})

    def _event(self, chunk: ResponseChunk, *, begins: bool) -> bytes:
        if self._only_text and not begins and chunk.finish_reason is None:
            index = chunk.choice.index
            events = self._texts_of.get(index)
            if events is None:
                events = self._texts_of[index] = TextEvents(self._data(chunk._replace(text=TEXT), begins=False))
            return events.event(chunk.text)
        return event(self._data(chunk, begins=begins))

    def _data(self, chunk: ResponseChunk, *, begins: bool) -> dict[str, Any]:
        data = self._head() | {"choices": [self._choice([chunk], begins=begins)]}
        if self._body.include_usage:
            data["usage"] = usage(self._call) if self._body.continuous_usage else None
        return data

    def _choice(self, chunks: Sequence[ResponseChunk], *, begins: bool = True) -> dict[str, Any]:
        """Of all chunks of a choice, or of one of them."""
        choice, reason = chunks[0].choice, chunks[-1].finish_reason
        echo = bool(self._body.echo) and begins
        text = "".join(chunk.text for chunk in chunks)
        if echo:
            text = self._echo(choice)[0] + text
        found: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs_of(choice, chunks, echo=echo),
            "finish_reason": reason,
            "stop_reason": choice.text.stopped_by if reason else None,
        }
        prompt = next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None)
        if self._body.prompt_logprobs is not None and prompt is not None:
            found["prompt_logprobs"] = self._logprobs.prompt(prompt)
        if self._body.return_token_ids:
            found["token_ids"] = [token for chunk in chunks for token in chunk.tokens]
            found["prompt_token_ids"] = list(choice.request.prompt) if begins else None
        return found

    def _logprobs_of(
        self, choice: ResponseChoice, chunks: Sequence[ResponseChunk], *, echo: bool
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        tokens: list[int] = []
        entries: list[TokenLogprobs | None] = []
        offsets: list[int] = []
        before = 0
        if self._body.echo:
            text, starts = self._echo(choice)
            before = len(text)
            if echo:
                tokens += choice.request.prompt
                entries += next(chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None)
                offsets += starts
        for chunk in chunks:
            tokens += chunk.tokens
            entries += chunk.logprobs
            offsets += [before + offset for offset in chunk.offsets]
        return self._logprobs.completion(tokens, entries, offsets, self._body.logprobs)

    def _echo(self, choice: ResponseChoice) -> tuple[str, list[int]]:
        """Text of a prompt, and where its tokens begin in it."""
        known = self._echoes.get(choice.prompt)
        if known is None:
            read = ResponseText(self._model, skip_special=False).push(choice.request.prompt, "length")
            text = self._texts[choice.prompt] or read.text
            # Special tokens that the tokenizer puts before a text are not in it; a prompt can be the end of a text.
            same_end = text.endswith(read.text) or read.text.endswith(text)
            shift = len(text) - len(read.text) if same_end else 0
            known = self._echoes[choice.prompt] = text, [max(offset + shift, 0) for offset in read.offsets]
        return known

    def _head(self) -> dict[str, Any]:
        call = self._call
        return {"id": call.id, "object": "text_completion", "created": call.created, "model": call.model}
