"""HTTP connections with limits: clients that send nothing, headers too slowly, or read nothing, do not keep theirs.

Bodies have a limit of their own (:func:`runtime.gateway.http.connection.read_body`).
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import httptools
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from runtime.gateway.protocol.errors import RETRY_SECONDS, ApiError

MOST_FILES = 1 << 16  # that a server asks for: no more connections are of use
OTHER_FILES = 256  # that are no connections: the bundle, the engine's process, logs and databases
FEW_CONNECTIONS = 1024
UPGRADE_HEADERS = (b"upgrade", b"http2-settings")  # and names in "connection"


@dataclass(frozen=True)
class ConnectionLimits:
    """``header_seconds``: to the end of a request's headers, from its first byte or from that of the connection.

    ``idle_seconds``: that a connection stays open between two requests. Clients and load balancers keep theirs for up
    to 60 s: if the server closes first, a request that is on its way is lost. With uvicorn's 5 s a load test on a busy
    machine lost 5 of 12,387. ``read_seconds``: that a client may read nothing of what waits for it.
    ``connections``: at once; more are told so and closed.
    """

    header_seconds: float = 20.0
    read_seconds: float = 60.0
    idle_seconds: int = 75
    header_bytes: int = 64 << 10
    connections: int = MOST_FILES


def most_connections() -> int:
    """Connections that the limit of open files leaves room for. That is raised as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except ValueError:  # macOS has a lower limit besides, and says infinity here
            pass
    allowed = MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return max(allowed - OTHER_FILES, allowed // 2)


def http_config(app: Any, limits: ConnectionLimits, malformed: Callable[[], None] | None, **values: Any) -> Config:
    """uvicorn's configuration. ``malformed``: is told of each request that is no HTTP, and so reaches no route."""
    protocol: Any = partial(_Connection, limits=limits, malformed=malformed or (lambda: None))
    return Config(app, http=protocol, ws="none", lifespan="off", timeout_keep_alive=limits.idle_seconds, **values)


class _Connection(HttpToolsProtocol):
    def __init__(self, *args: Any, limits: ConnectionLimits, malformed: Callable[[], None], **values: Any) -> None:
        super().__init__(*args, **values)
        self._limits, self._malformed = limits, malformed
        self._late: asyncio.TimerHandle | None = None  # of headers, or of a connection that is being closed
        self._unread: asyncio.TimerHandle | None = None
        self._in_headers, self._in_body = False, False
        self._unused_bytes = 0  # since the begin or the end of headers, or a piece of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(503, "the server has no room for another connection", "too_many_connections")
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_headers()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unused_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self.transport.is_closing():
            return
        if self._unused_bytes > self._limits.header_bytes:
            if self._in_headers:
                self._refuse_headers()
                return
            if self._in_body:  # headers behind a body that comes in chunks: nobody reads them, and they are kept
                self.transport.abort()
                return
        # uvicorn counts an idle connection from its last byte, and one of line breaks is for ever idle.
        if self._late is None and self._unoccupied:
            self._expect_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._expect_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._unused_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        # A path with bytes beyond ASCII is routed like one that has them escaped.
        super().on_url(url if url.isascii() else quote(url, safe=bytes(range(128))).encode())

    def on_headers_complete(self) -> None:
        if self._asks_for_upgrade:
            return
        self._in_headers, self._in_body, self._unused_bytes = False, True, 0
        self._forget_headers()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self._limits.header_bytes:
            self._refuse_headers()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade:
            return
        self._in_body = False
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self._in_headers and self._unoccupied:  # they began while the response before them was written
            self._expect_headers()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"this is no HTTP request: {msg}")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if cycle.scope["http_version"] < "1.1" else app)

    def _parse(self, data: bytes) -> None:
        """No other protocol is spoken here: a request that asks for one is read again without that.

        The parser takes what follows its headers for the other protocol. Java's client asks for HTTP/2 with each first
        request of a connection, and its body would be lost.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._asks_for_upgrade:
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    @property
    def _asks_for_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        lines = [b" ".join([self.parser.get_method(), self.url, b"HTTP/1.1"])]
        for name, value in self.headers:
            if name == b"connection":
                kept = [part for part in value.split(b",") if part.strip().lower() not in UPGRADE_HEADERS]
                lines.append(b"connection: " + b",".join(kept))
            elif name not in UPGRADE_HEADERS:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    @property
    def _unoccupied(self) -> bool:
        """No request is being answered."""
        return not self.cycle or self.cycle.response_complete

    def _expect_headers(self) -> None:
        self._late = self.loop.call_later(self._limits.header_seconds, self._headers_late)

    def _forget_headers(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _headers_late(self) -> None:
        if self._in_headers:
            seconds = self._limits.header_seconds
            self._refuse(408, f"the headers did not arrive within {seconds:g} seconds", "timeout")
        else:
            self._close()

    def _refuse_headers(self) -> None:
        self._refuse(431, f"the headers have more than {self._limits.header_bytes} bytes")

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer, and close the connection."""
        self._malformed()
        body = orjson.dumps(ApiError(status, message, code=code).body)
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *([f"retry-after: {RETRY_SECONDS}"] if status == 503 else []),
            "connection: close",
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self._close()

    def _close(self) -> None:
        """Close the connection once the client has read what was written, or nothing of it for ``read_seconds``."""
        self._forget_headers()
        self._forget_unread()
        self.transport.close()
        self._late = self._expect_reading(self.transport.get_write_buffer_size())

    def _expect_reading(self, waiting: int) -> asyncio.TimerHandle:
        return self.loop.call_later(self._limits.read_seconds, self._look_at_reader, waiting)

    def _look_at_reader(self, waiting: int) -> None:
        """``waiting``: bytes that did ``read_seconds`` ago. A client that takes a large body slowly has read some."""
        left = self.transport.get_write_buffer_size()
        if left >= waiting:
            self.transport.abort()
            return
        again = self._expect_reading(left)
        if self.transport.is_closing():
            self._late = again
        else:
            self._unread = again


def _without_chunks(cycle: RequestResponseCycle, app: ASGIApp) -> Any:
    """HTTP/1.0 knows no chunks: a body whose length is not known ends with the connection, which such a client expects.

    uvicorn would send chunks.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        unknown = False

        async def send_whole(message: Message) -> None:
            nonlocal unknown
            if message["type"] == "http.response.start":
                unknown = all(name.lower() != b"content-length" for name, _ in message.get("headers", []))
                if unknown:
                    cycle.chunked_encoding = False
            elif unknown:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_whole)

    return call
