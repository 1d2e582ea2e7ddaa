"""Server-sent events, written straight to the connection: no layer between a new token and its bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.gateway.http.connection import DisconnectedError, unless_disconnected
from runtime.gateway.protocol.errors import from_exception

DONE = b"data: [DONE]\n\n"
SEND = "send"  # in the state of a request: sends what comes after the headers, past every middleware
TEXT = "\0text\0"  # no other value of an event holds it


def event(data: Any, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


class TextEvents:
    """Events that differ in one text alone: the rest is encoded once. ``data`` has :data:`TEXT` in its place.

    >>> TextEvents({"choices": [{"text": TEXT}]}).event("a\\"b")
    b'data: {"choices":[{"text":"a\\\\"b"}]}\\n\\n'
    """

    def __init__(self, data: Any) -> None:
        self._before, self._after = event(data).split(orjson.dumps(TEXT))

    def event(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class EventStream(Response):
    """Sends events as they come, then ``[DONE]``; an error becomes the last event before it.

    ``events`` is closed as soon as the client goes away, which cancels what still runs for it.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers=dict(headers) | {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(DisconnectedError):
            await unless_disconnected(receive, self._write(scope["state"][SEND]))

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events):
            try:
                async for content in self._events:
                    await send({"type": "http.response.body", "body": content, "more_body": True})
            except Exception as error:
                content = event(from_exception(error).body)
                await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})
