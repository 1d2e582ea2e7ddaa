"""The body that a client sends, and noticing that it has gone away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from runtime.gateway.protocol.errors import ApiError, shortened

T = TypeVar("T")


class DisconnectedError(Exception):
    """The client has closed its connection."""


async def read_body(request: Request, most_bytes: int, seconds: float) -> bytes:
    """The whole body.

    :class:`ApiError` 413 for a larger one, 408 for one that does not come, 415 for one that is compressed.
    """
    encoding = ", ".join(request.headers.getlist("content-encoding"))  # a list may come in several headers
    if {coding.strip().lower() for coding in encoding.split(",")} - {"", "identity"}:
        raise ApiError(
            415,
            f"the body has Content-Encoding: {shortened(encoding)}; expected: JSON that is not compressed",
            code="unsupported_encoding",
            headers={"accept-encoding": "identity"},
        )
    refusal = ApiError(413, f"the body is too large; expected: at most {most_bytes} bytes", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > most_bytes:
        raise refusal
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes:
                    raise refusal
                parts.append(part)
    except TimeoutError as error:
        message, close = f"the body did not arrive within {seconds:g} seconds", {"connection": "close"}
        raise ApiError(408, message, code="timeout", headers=close) from error
    except ClientDisconnect as error:
        raise DisconnectedError from error
    return b"".join(parts)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client goes away: :class:`DisconnectedError`.

    The body of the request must have been read.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DisconnectedError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
