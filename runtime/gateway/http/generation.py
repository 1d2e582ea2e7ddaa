"""From a call to its pieces of text: all its choices at once, cancelled as soon as nobody needs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from runtime.constraints.size import TOO_COMPLEX
from runtime.gateway.engines.client import EngineClient
from runtime.gateway.protocol.calls import Call, Hook
from runtime.gateway.protocol.errors import ApiError, draining, from_exception, invalid
from runtime.gateway.text.model import ResponseText
from runtime.wire.messages import Delta, GenerateRequest, TokenLogprobs


@dataclass(frozen=True)
class ResponseChoice:
    """One response to one prompt. ``prompt``: index of its prompt in the call."""

    index: int
    prompt: int
    request: GenerateRequest
    text: ResponseText


class ResponseChunk(NamedTuple):
    """New text of a choice, and the tokens behind it. The last chunk of a choice has a ``finish_reason``."""

    choice: ResponseChoice
    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]  # where they begin in the whole text, in characters
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: str | None


async def generate(
    client: EngineClient, call: Call, choices: Sequence[ResponseChoice], hooks: Sequence[Hook]
) -> AsyncGenerator[ResponseChunk]:
    """The chunks of all choices as they come. Closing the generator cancels what still runs.

    :class:`ApiError` for whatever ends the call early, with the status that a response would have.
    """
    admitted: list[Hook] = []
    try:
        for hook in hooks:
            await hook.prepare(call)
        for hook in hooks:
            hook.admit(call)
            admitted.append(hook)
        followed = [_follow(client, call, choice, hooks) for choice in choices]
        async with aclosing(followed[0] if len(followed) == 1 else _merged(followed)) as chunks:
            async for chunk in chunks:
                yield chunk
    except (asyncio.CancelledError, GeneratorExit):
        call.cancelled = len(call.finish_reasons) < call.choices
        raise
    except Exception as error:
        call.error, call.rejected = from_exception(error), len(admitted) < len(hooks)
        raise call.error from error
    finally:
        call.end = time.monotonic()
        for hook in admitted:
            hook.ended(call)


async def _follow(
    client: EngineClient, call: Call, choice: ResponseChoice, hooks: Sequence[Hook]
) -> AsyncGenerator[ResponseChunk]:
    index, written = choice.index, call.responses.setdefault(choice.index, [])
    answer = None if index else call.answer
    request = answer.request(choice.request) if answer else choice.request
    async with aclosing(client.generate(request, time.monotonic() - call.arrival, call.session, call.digest)) as deltas:
        async for delta in deltas:
            _require_success(delta)
            delta = answer.delta(delta) if answer else delta
            if delta.tokens:
                now = time.monotonic()
                if call.first_token is None:
                    call.first_token, call.queue_seconds = now, delta.queue_seconds
                    call.level = client.level_of(request.id)
                for hook in hooks:
                    hook.tokens(call, index, len(delta.tokens), now)
            text, offsets, reason = choice.text.push(delta.tokens, delta.finish_reason)
            used = len(offsets)
            call.completion_tokens += used
            if delta.cached_tokens and index % call.n == 0:
                call.cached[choice.prompt] = delta.cached_tokens  # the others share what the first has computed
            if text:
                written.append(text)
            if reason:
                call.finish_reasons[index] = reason
            yield ResponseChunk(
                choice, text, delta.tokens[:used], offsets, (delta.logprobs or ())[:used], delta.prompt_logprobs, reason
            )
            if reason:
                return


def _require_success(delta: Delta) -> None:
    match delta.finish_reason:
        case "timeout":
            raise ApiError(408, delta.error or "the request took longer than the server allows", code="timeout")
        case "cancelled":
            raise draining()  # nobody else cancels a request whose deltas are still read
        case "error" if (delta.error or "").startswith(TOO_COMPLEX):
            raise invalid(delta.error or TOO_COMPLEX)
        case "error":
            raise ApiError(500, delta.error or "the engine failed on this request", code="engine_error")
        case _:
            return


async def _merged(streams: Sequence[AsyncGenerator[ResponseChunk]]) -> AsyncGenerator[ResponseChunk]:
    """The chunks of several streams in the order in which they come; the first error ends all of them."""
    # Few: what a slow client has not read waits in the streams, which have limits.
    queue: asyncio.Queue[ResponseChunk | Exception | None] = asyncio.Queue(len(streams))

    async def read(stream: AsyncGenerator[ResponseChunk]) -> None:
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    await queue.put(chunk)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(read(stream)) for stream in streams]
    try:
        open_streams = len(streams)
        while open_streams:
            match await queue.get():
                case None:
                    open_streams -= 1
                case Exception() as error:
                    raise error
                case chunk:
                    yield chunk
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
